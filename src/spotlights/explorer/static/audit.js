// The audit: a queue of training examples whose labels look wrong. Keep, relabel or drop each; take the decisions away.

import { ask } from "./api.js";
import { controls, rowsOf, theAnswer } from "./answer.js";
import { $, attempt, datum, explain, fill, h, percent, shown, waits } from "./dom.js";
import { NOT_RETRAINING, touched } from "./mask.js";
import { spell } from "./selections.js";
import { ask_about, change, ink, looking, maskParts, maskText, run, state } from "./state.js";
import { download } from "./svg.js";
import { table } from "./tables.js";

const COUNT = 60;
const WORDS = { keep: "keep", relabel: "relabel", drop: "drop" };
let suspects = [];
let decisions = {};
let listed = null;

const place = () => `spotlights-decisions:${run.title}`;

export function setUpAudit() {
  decisions = Object.fromEntries(run.decisions.map((row) => [row.example, row]));
  try { Object.assign(decisions, readBack(JSON.parse(localStorage.getItem(place())))); } catch { /* a browser that keeps nothing */ }
}

export async function showAudit(keys) {
  if (suspects.length && listed === state.where && keys.every((key) => ["suspect", "mask", "in"].includes(key))) return draw();
  const panel = h("div", { class: "panel wide" }, h("p", { class: "quiet" }, "Adding up the errors of every visit …"));
  fill($("view"), panel);
  await attempt(panel, async () => {
    const found = await ask("audit", { top: COUNT, where: state.where }, "audit");
    if (!looking("audit")) return;
    suspects = found.suspects;
    listed = state.where;
    controls();
    draw();
  }, () => showAudit(["view"]));
}

const current = () => suspects.find(({ example }) => String(example) === state.suspect) ?? suspects[0];
export const moveOn = (by) => { const at = suspects.indexOf(current()) + by; if (suspects[at]) change({ suspect: suspects[at].example }, { quietly: true }); };

function draw() {
  if (!suspects.length) return fill($("view"), h("div", { class: "panel wide" }, h("p", { class: "empty" }, "No example has been visited yet.")));
  const row = current();
  const made = Object.keys(decisions).length;
  const picture = suspects[0].shown?.kind === "image";
  fill($("view"),
    h("section", { class: "panel wide", id: "suspect", "data-example": row.example },
      h("h2", {}, `Suspect ${suspects.indexOf(row) + 1} of ${suspects.length}`, h("span", { class: "quiet" }, state.where ? "among the chosen ones" : "the most suspicious first")),
      h("div", { class: "suspect" },
        h("div", { class: "big" }, datum(row.shown, { ink: ink(), name: `training example ${row.example}` })),
        h("div", {},
          row.label === undefined || row.label === null ? null : h("div", { class: "versus" }, h("span", { class: "quiet" }, "given label"), h("b", { class: "given" }, row.label_name), row.says === null ? null : [h("span", { class: "quiet" }, "the network says"), h("b", { class: "says" }, row.says_name)]),
          h("p", { class: "quiet" }, `training example ${row.example}; its errors over ${row.visits} visits add up to ${shown(row.suspicion)}.`),
          h("div", { class: "decide" }, Object.keys(WORDS).map((word) => h("button", { "data-decision": word, "aria-pressed": String(decisions[row.example]?.decision === word), disabled: word === "relabel" && (row.says === null || row.says === undefined), onclick: () => decide(word) }, word === "relabel" && row.says !== null && row.says !== undefined ? `relabel: ${row.says_name} ` : `${word} `, h("kbd", {}, { keep: "k", relabel: "b", drop: "d" }[word]))),
            h("button", { onclick: () => moveOn(-1), disabled: row === suspects[0], "aria-label": "Previous suspect" }, "‹"), h("button", { onclick: () => moveOn(1), disabled: row === suspects.at(-1), "aria-label": "Next suspect" }, "›")),
          run.training_queries ? h("button", { class: "more", onclick: () => ask_about(`train:${row.example}`, { view: "", where: "" }) }, "make it the input") : null), h("div", { id: "neighbours" })),
      h("div", { id: "affected" })),
    h("section", { class: "panel wide" }, h("h2", {}, "The queue", h("span", { class: "quiet" }, "A ranking, not a verdict: hard and rare examples are here too."), run.no_masks ? null : h("button", { id: "mask-suspects", onclick: leaveOut }, "Leave all of these out"), state.where ? h("button", { onclick: () => change({ where: "" }) }, "Show all suspects") : null),
      suspects[0].shown?.kind === "table" ? queueTable(row) : h("div", { class: picture ? `strip ${suspects.some(({ label_name: name }) => String(name ?? "").length > 5) ? "named" : ""}` : "strip text" }, suspects.map((each) => h("button", { class: `thumb ${decisions[each.example] ? "done" : ""}`, "data-example": each.example, "aria-current": String(each === row), title: `example ${each.example}: label ${each.label_name ?? "–"}, the network says ${each.says_name ?? "–"}`, onclick: () => change({ suspect: each.example }, { quietly: true }) }, datum(each.shown, { ink: ink(), name: `example ${each.example}` }), h("span", { class: "tag" }, decisions[each.example] ? decisions[each.example].decision : each.label_name ?? ""))))),
    h("section", { class: "panel wide", id: "decisions" }, h("h2", {}, `${made} decision${made === 1 ? "" : "s"}`, h("button", { id: "export-json", disabled: !made, onclick: () => take("json") }, "Export JSON"), h("button", { id: "export-csv", disabled: !made, onclick: () => take("csv") }, "Export CSV"), h("button", { disabled: !made, onclick: () => { decisions = {}; keep(); draw(); } }, "Forget all")),
      h("p", { class: "quiet" }, "They stay in this browser; export them before you clean the data. ", explain(h("b", { class: "caution-text" }, "Leaving examples out here is a mask, not retraining."), NOT_RETRAINING))));
  neighbours(row);
  affected(row);
  document.body.dataset.audited = String(row.example);
}

/** The queue of rows of a table, as one table: the columns under each other. */
const queueTable = (now) => table(suspects, { own: now.shown, name: "this one", label: "The queue", mark: (row) => ({ class: decisions[row.example] ? "done" : "", "aria-current": String(row === now) }), facts: [
  ["example", (row) => h("button", { class: "more", "data-example": row.example, onclick: () => change({ suspect: row.example }, { quietly: true }) }, row.example)],
  ["label", (row) => row.label_name ?? ""],
  ["the network says", (row) => row.says_name ?? ""],
  ["decision", (row) => decisions[row.example]?.decision ?? ""],
] });

/** The nearest examples that agree with the label, and those that agree with the network. */
async function neighbours(row) {
  if (!run.training_queries || row.label === undefined || row.label === null || !("label" in run.groups)) return;
  const layer = theAnswer()?.layer ?? run.layers.at(-1).name;
  const near = (label) => ask("layer", { q: `train:${row.example}`, layer, measure: "score", by: "example", where: `label=${spell(label)}`, top: 9 }).then(({ top }) => top.filter(({ example }) => example !== row.example).slice(0, 8).map(({ label: _, ...other }) => other)).catch(() => []);
  const agreeing = await near(row.label);
  const other = row.says === null || row.says === row.label ? [] : await near(row.says);
  if (current() !== row || !$("neighbours")) return;
  const by = () => h("span", { class: "quiet" }, "by score");
  fill($("neighbours"), h("div", { class: "sides" }, rowsOf([`Most similar with the given label, ${row.label_name}`, by()], agreeing, "", { signed: false }, "score", row.shown), other.length ? rowsOf([`Most similar with what the network says, ${row.says_name}`, by()], other, "", { signed: false }, "score", row.shown) : null));
}

/** The test inputs that change without this example: asked with a click, since all of them are. */
function affected(row) {
  if (run.no_masks || !run.labelled) return;
  const place = $("affected");
  const see = () => {
    fill(place, h("span", { class: "quiet" }, "Asking all test inputs …"));
    return attempt(place, async () => {
      const found = await ask("accuracy", { mask: `example=${row.example}` }, "accuracy", waits(place, "Still preparing."));
      fill(place, h("p", { id: "affected-answer" }, `Right answers on all ${run.inputs.toLocaleString("en")} test inputs with and without it: `, h("b", {}, percent(found.with.all)), " and ", h("b", {}, percent(found.without.all)), found.worse.length + found.better.length ? "" : ". No answer moves by more than 1 %."), touched("Less sure of the right answer without it", found.worse, "against"), touched("Surer of the right answer without it", found.better, "for"));
    }, see);
  };
  fill(place, h("button", { id: "see-affected", onclick: see }, "Which test inputs change without it?"));
}

function leaveOut() {
  const parts = maskParts();
  change({ view: "", where: "", mask: maskText({ ...parts, example: [...new Set([...(parts.example ?? []), ...suspects.map(({ example }) => spell(example))])] }) });
}

// -- decisions --------------------------------------------------------------------------------

/** What was kept, as far as it is decisions: other pages of this machine's address may have written there. */
const readBack = (kept) => Object.fromEntries(Object.values(kept ?? {}).filter((each) => Object.hasOwn(WORDS, each?.decision) && each.example !== undefined)
  .map(({ example, decision, given, label }) => [example, { example, decision, given: given ?? null, label: label ?? null }]));

/** A cell of a table that spreadsheets open: what begins as a formula is text. */
function cell(value) {
  const text = String(value ?? "");
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function keep() {
  try { localStorage.setItem(place(), JSON.stringify(decisions)); } catch { /* a browser that keeps nothing: export before leaving */ }
}

export function decide(word) {
  if (state.view !== "audit" || !suspects.length) return;
  const row = current();
  if (word === "relabel" && (row.says === null || row.says === undefined)) return;
  decisions[row.example] = { example: row.example, decision: word, given: row.label ?? null, label: word === "relabel" ? row.says : null };
  keep();
  if (row === suspects.at(-1)) draw();
  else moveOn(1);
}

function take(kind) {
  const rows = Object.values(decisions);
  const text = kind === "json" ? JSON.stringify({ memory: run.title, decisions: rows }, null, 2) : ["example,decision,given,label", ...rows.map(({ example, decision, given, label }) => [example, decision, given, label].map(cell).join(","))].join("\n") + "\n";
  download(new Blob([text], { type: kind === "json" ? "application/json" : "text/csv" }), `decisions.${kind}`);
}
