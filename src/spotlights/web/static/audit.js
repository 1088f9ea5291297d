// The audit: training examples whose labels look wrong, what they do to this answer, and the click that leaves them out.

import { ask, Replaced } from "./api.js";
import { $, caution, datum, explain, fill, h, problem, shown, signed, visible, waits } from "./dom.js";
import { asked, ESTIMATING } from "./look.js";
import { NOT_RETRAINING } from "./mask.js";
import { change, isMasked, maskParts, maskText, state, toggleMasked } from "./state.js";

const SHOWN = 24;
let run;
let count = SHOWN;

export function setUpAudit(about) {
  run = about;
  const views = [["", "This answer", "What the answer is made of"], ["audit", "Audit the labels", "Training examples that the network kept disagreeing with: their labels may be wrong (a)"]];
  fill($("views"), views.map(([view, name, title]) => h("button", { role: "tab", "data-view": view, title, onclick: () => change({ view }) }, name)));
  $("views").hidden = !run.audit;
  showView();
}

function showView() {
  for (const each of $("views").children) each.setAttribute("aria-selected", String(each.dataset.view === state.view));
  $("audit").hidden = !state.view;
  $("made").hidden = Boolean(state.view);
}

export async function showAudit() {
  showView();
  if (!state.view || !state.q) return;
  const { q, at, layer, measure, target } = asked();
  const wanted = { q, at, layer, measure, target, top: count };
  $("audit").classList.add("busy");
  try {
    const found = await ask("audit", wanted, "audit", waits($("audit"), ESTIMATING));
    show(found, wanted);
    document.body.dataset.audited = location.hash;
  } catch (error) {
    if (!(error instanceof Replaced)) fill($("audit"), problem(error, showAudit));
  } finally {
    $("audit").classList.remove("busy");
  }
}

function show(found, wanted) {
  const { suspects } = found;
  const given = Object.entries(wanted).filter(([, value]) => value !== "" && value !== null);
  const csv = h("a", { class: "quiet", href: `api/audit.csv?${new URLSearchParams(given)}`, download: "spotlights-audit.csv" }, "CSV");
  const more = h("button", { class: "more", onclick: () => { count = count === SHOWN ? 5 * SHOWN : SHOWN; showAudit(); } }, count === SHOWN ? "more" : "fewer");
  const least = found.measure === "contribution" ? 0.0005 : 0.001 * Math.max(...suspects.map(({ value }) => Math.abs(value ?? 0)));
  const { signed: towards } = run.measures.find(({ name }) => name === found.measure) ?? {};
  fill($("audit"),
    h("p", { class: "quiet" }, "Visit after visit, the network disagreed with these training examples, most with the first. ", h("b", {}, "A ranking, not a verdict"), ": hard and rare examples are here too. ", explain(h("b", { class: "caution-text" }, "Leaving them out is a mask, not retraining"), NOT_RETRAINING), ": it takes away what they added to the weights and nothing else. Below each, what it does to this answer: ",
      h("b", {}, `${found.measure}${towards ? ` for or against “${visible(found.target_name)}”` : ""}, ${found.of} `), caution({ caution: found.caution, note: found.caution_note })),
    h("h3", {}, `The ${suspects.length} most suspicious`, h("span", { class: "links" }, run.no_masks ? null : h("button", { class: "more", id: "mask-suspects", onclick: () => leaveOut(suspects) }, "leave all of these out"), csv, more)),
    suspects.length ? h("div", { class: suspects[0].shown?.kind === "image" ? "suspects" : "suspects text" }, suspects.map((row) => suspect(row, least)))
      : h("p", { class: "empty" }, "No example has been visited yet."));
}

function suspect(row, least) {
  const facts = [`example ${row.example}`, `${row.visits} visits`, `suspicion ${shown(row.suspicion)}`];
  const use = () => run.training_queries && change({ q: `train:${row.example}`, at: "", target: "", view: "" });
  const line = (name, kind, value) => [h("span", { class: "quiet" }, name), h("b", { class: kind, title: value }, value)];
  const labels = row.label === undefined || row.label === null ? null : h("span", { class: "labels" }, line("label", "given", row.label_name), row.says === null ? null : line("network", "says", row.says_name));
  return h("div", { class: `card suspect ${isMasked("example", row.example) ? "masked" : ""}`, "data-example": row.example },
    h("button", { class: "thumb", title: `${facts.join(", ")}${run.training_queries ? "\nclick: make it the query" : ""}`, onclick: use }, datum(row.shown, { ink: run.ink, name: facts.join(", ") })),
    labels,
    row.value === null ? null : Math.abs(row.value) < least ? h("span", { class: "effect quiet" }, "≈ 0") : h("span", { class: `effect number ${row.value >= 0 ? "for" : "against"}`, title: "What it does to the chosen answer" }, signed(row.value)),
    run.no_masks ? null : h("button", { class: "out", title: "Leave this example out", "aria-label": `Leave out example ${row.example}`, onclick: () => toggleMasked("example", row.example) }, "✕"));
}

function leaveOut(suspects) {
  const parts = maskParts();
  const all = new Set([...(parts.example ?? []), ...suspects.map(({ example }) => String(example))]);
  change({ mask: maskText({ ...parts, example: [...all] }) });
}
