// The audit: training examples whose labels look wrong, and the click that leaves them out.

import { ask, Replaced } from "./api.js";
import { $, datum, explain, fill, h, problem, shown } from "./dom.js";
import { NOT_RETRAINING } from "./mask.js";
import { spell } from "./selections.js";
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
  if (!state.view) return;
  $("audit").classList.add("busy");
  try {
    show(await ask("audit", { top: count }, "audit"));
    document.body.dataset.audited = location.hash;
  } catch (error) {
    if (!(error instanceof Replaced)) fill($("audit"), problem(error, showAudit));
  } finally {
    $("audit").classList.remove("busy");
  }
}

function show({ suspects }) {
  const more = h("button", { class: "more", onclick: () => { count = count === SHOWN ? 5 * SHOWN : SHOWN; showAudit(); } }, count === SHOWN ? "more" : "fewer");
  fill($("audit"),
    h("p", { class: "quiet" }, "Visit after visit, the network disagreed with these training examples, most with the first. ", h("b", {}, "A ranking, not a verdict"), ": hard and rare examples are here too. ", explain(h("b", { class: "caution-text" }, "Leaving them out is a mask, not retraining"), NOT_RETRAINING), ": it takes away what they added to the weights and nothing else."),
    h("h3", {}, `The ${suspects.length} most suspicious`, h("span", { class: "links" }, run.no_masks ? null : h("button", { class: "more", id: "mask-suspects", onclick: () => leaveOut(suspects) }, "leave all of these out"), more)),
    suspects.length ? h("div", { class: suspects[0].shown?.kind === "image" ? "suspects" : "suspects text" }, suspects.map(suspect))
      : h("p", { class: "empty" }, "No example has been visited yet."));
}

function suspect(row) {
  const facts = [`example ${row.example}`, `${row.visits} visits`, `suspicion ${shown(row.suspicion)}`];
  const use = () => run.training_queries && change({ q: `train:${row.example}`, at: "", target: "", view: "" });
  const line = (name, kind, value) => [h("span", { class: "quiet" }, name), h("b", { class: kind, title: value }, value)];
  const labels = row.label === undefined || row.label === null ? null : h("span", { class: "labels" }, line("label", "given", row.label_name), row.says === null ? null : line("network", "says", row.says_name));
  return h("div", { class: `card suspect ${isMasked("example", row.example) ? "masked" : ""}`, "data-example": row.example },
    h("button", { class: "thumb", title: `${facts.join(", ")}${run.training_queries ? "\nclick: make it the query" : ""}`, onclick: use }, datum(row.shown, { ink: Boolean(run.drawing), name: facts.join(", ") })),
    labels,
    run.no_masks ? null : h("button", { class: "out", title: "Leave this example out", "aria-label": `Leave out example ${row.example}`, onclick: () => toggleMasked("example", row.example) }, "✕"));
}

function leaveOut(suspects) {
  const parts = maskParts();
  const all = new Set([...(parts.example ?? []), ...suspects.map(({ example }) => spell(example))]);
  change({ mask: maskText({ ...parts, example: [...all] }) });
}
