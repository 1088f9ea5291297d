// Leaving some of the training out: the choice, the answer with and without, and what happens to all test inputs.

import { ask, latest, Replaced } from "./api.js";
import { maskedLayers, theAnswer } from "./answer.js";
import { $, attempt, datum, explain, fill, h, percent, shown, signed, visible, waits } from "./dom.js";
import { formatSelections } from "./selections.js";
import { ask_about, change, ink, isMasked, maskParts, maskText, otherSelections, run, state, toggleMasked } from "./state.js";

const [MOST_OUTPUTS, FEW, MOST_CHIPS] = [12, 12, 40];
export const NOT_RETRAINING = "A mask is not retraining. It takes away exactly what these training examples added to the weights; all other updates stay as they were, though without these they would have gone another way. What training again would do is estimated by the measure “influence”.";
const HIDDEN = "Hidden layers add up large numbers that cancel. Without some of them the rest is no network that ever was, and its answer says little. What training without these would do is estimated by “influence”.";
let without = null;

// -- the choice -------------------------------------------------------------------------------

export function showMaskControls() {
  const place = $("mask-controls");
  if (run.no_masks) return $("leave").classList.add("wide"), fill(place, h("p", { class: "quiet" }, run.no_masks));
  const parts = maskParts();
  const groups = Object.entries(run.groups).filter(([, values]) => values.length > 1 && values.length <= MOST_CHIPS);
  const stretch = run.edges.length > 1 && (parts.step ?? []).length < 2;
  const elsewhere = (column) => column === "example" || groups.some(([name]) => name === column) || (column === "step" && stretch);
  const others = [...Object.entries(parts).filter(([column]) => !elsewhere(column)).map(([column, values]) => ({ [column]: values })), ...otherSelections()];
  const putBack = (terms) => { const [[column], ...more] = Object.entries(terms); change({ mask: more.length ? maskText(parts, otherSelections().filter((each) => formatSelections([each]) !== formatSelections([terms]))) : maskText({ ...parts, [column]: [] }) }); };
  fill(place,
    h("p", { class: "quiet" }, "The same sum without some of its parts. ", explain(h("span", { class: "caution" }, "not retraining"), NOT_RETRAINING)),
    groups.map(([column, values]) => chosen(`without ${column}`, values.length, (parts[column] ?? []).length > 0, values.map(({ value, name, colour }) =>
      h("button", { class: "chip", "aria-pressed": String(isMasked(column, value)), "data-column": column, "data-value": String(value), style: { "--c": colour }, onclick: () => toggleMasked(column, value) }, h("i"), visible(name))))),
    stretch ? slider(parts) : null,
    (parts.example ?? []).length ? h("fieldset", {}, h("legend", {}, `without ${parts.example.length} single example${parts.example.length > 1 ? "s" : ""}`),
      h("div", { class: "chips" }, parts.example.slice(0, FEW).map((id) => h("button", { class: "chip", "aria-pressed": "true", onclick: () => toggleMasked("example", null, id) }, id)),
        parts.example.length > FEW ? h("span", { class: "quiet" }, `and ${parts.example.length - FEW} more`) : null)) : null,
    others.length ? h("fieldset", {}, h("legend", {}, "without also"), h("div", { class: "chips" }, others.map((terms) => h("button", { class: "chip", "aria-pressed": "true", onclick: () => putBack(terms) }, formatSelections([terms]))))) : null,
    run.layers.length > 1 ? chosen("in layers", run.layers.length, Boolean(state.in), run.layers.map(({ name }) =>
      h("button", { class: "chip layer", "aria-pressed": String(maskedLayers().includes(name)), title: "Leave it out of this layer too, or not", "data-layer": name, onclick: () => toggleLayer(name) }, name))) : null,
    h("div", { class: "chips" }, h("button", { id: "clear-mask", disabled: !state.mask, onclick: () => change({ mask: "", in: "" }) }, "Leave nothing out")));
}

/** Some chips under a title; many of them stay folded up until somebody wants one. */
function chosen(title, count, open, buttons) {
  const chips = h("div", { class: "chips" }, buttons);
  return count <= FEW ? h("fieldset", {}, h("legend", {}, title), chips) : h("details", { open }, h("summary", {}, `${title} (${count})`), chips);
}

function toggleLayer(name) {
  const on = maskedLayers();
  const now = run.layers.map((each) => each.name).filter((each) => (each === name ? !on.includes(each) : on.includes(each)));
  if (now.length) change({ in: now.length === run.layers.length ? "all" : now.join() === theAnswer()?.layer ? "" : now.join() });
}

function slider(parts) {
  const edges = run.edges;
  const last = edges.length - 1;
  const stretch = (parts.step ?? [])[0]?.split("-").map(Number) ?? [0, 0];
  const nearest = (step) => edges.reduce((best, edge, at) => (Math.abs(edge - step) < Math.abs(edges[best] - step) ? at : best), 0);
  const ends = stretch.map(nearest);
  const band = h("div", { class: "band" });
  const words = h("span", { class: "number", id: "masked-steps" });
  const said = ([low, high]) => (high > low ? `${low.toLocaleString("en")} to ${high.toLocaleString("en")}` : "none");
  const show = (exactly = null) => {
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    band.style.left = `${(100 * low) / last}%`;
    band.style.width = `${(100 * (high - low)) / last}%`;
    words.textContent = said(exactly ?? [edges[low], edges[high]]);
  };
  const moved = (which) => (event) => {
    ends[which] = Number(event.target.value);
    show();
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    change({ mask: maskText({ ...maskParts(), step: high > low ? [`${edges[low]}-${edges[high]}`] : [] }) }, { quietly: true });
  };
  show(stretch);
  const end = (which, title) => h("input", { type: "range", min: "0", max: String(last), value: String(ends[which]), step: "1", "aria-label": title, id: `steps-${which}`, oninput: moved(which) });
  return h("fieldset", {}, h("legend", {}, "without steps", words), h("div", { class: "range" }, band, end(0, "First step left out"), end(1, "End of the steps left out")));
}

/** While a slider has the focus it must not be made anew: it would slip out of the hand. */
export const sliding = () => document.activeElement?.type === "range" && $("mask-controls").contains(document.activeElement);

// -- the comparison ---------------------------------------------------------------------------

export const showComparison = latest(async () => {
  if (!state.q || run.no_masks) return;
  const wanted = state.mask + state.in + state.q;
  without = null;
  fill($("accuracy"));
  try {
    if (state.mask) {
      const found = await ask("mask", { q: state.q, at: state.at, mask: state.mask, in: state.in }, "mask", waits($("verdict"), "Adding up the training by groups, once; then masks are instant."));
      without = { of: state.q + state.at, ...found.without };
      verdict(found);
    } else {
      fill($("verdict"), h("p", { class: "quiet" }, "Click a label, move the steps, or take the ✕ of an example."));
    }
    if (theAnswer()) showOutputs(theAnswer());
    document.body.dataset.compared = wanted;
  } catch (error) {
    if (error instanceof Replaced) return;
    if (theAnswer()) showOutputs(theAnswer());
    fill($("verdict"), h("p", { class: "empty" }, `Nothing to compare: ${error.message}`));
  }
});

function verdict({ with: before, without: after }) {
  const share = (answer) => (answer.outputs.length > 1 ? percent(answer.outputs.find(({ number }) => number === answer.said).share) : "");
  const now = new Map(after.outputs.map(({ number, logit }) => [number, logit]));
  const moved = before.outputs.filter(({ number }) => now.has(number)).sort((a, b) => Math.abs(now.get(b.number) - b.logit) - Math.abs(now.get(a.number) - a.logit))[0];
  const hidden = maskedLayers().some((name) => name !== theAnswer()?.layer);
  fill($("verdict"), h("div", { class: `verdict ${before.said !== after.said ? "changed" : ""}` },
      h("div", { class: "before" }, h("span", { class: "quiet" }, "with everything"), h("strong", {}, visible(before.said_name)), h("span", { class: "quiet number" }, share(before))),
      h("span", { "aria-hidden": "true" }, "→"),
      h("div", { class: "after" }, h("span", { class: "quiet" }, "without these"), h("strong", { id: "masked-said" }, visible(after.said_name)), h("span", { class: "quiet number" }, share(after)))),
    moved ? h("p", { class: "quiet" }, "Changes most: the logit for ", h("b", {}, visible(moved.name)), `, ${shown(moved.logit)} → ${shown(now.get(moved.number))} (${signed(now.get(moved.number) - moved.logit)}).`) : null,
    hidden ? h("div", { class: "warning" }, HIDDEN, " ", run.measures.some(({ name }) => name === "influence") ? h("button", { onclick: () => change({ measure: "influence", mask: "", in: "" }) }, "Estimate instead") : null) : null,
    run.labelled && !run.saved ? h("p", {}, h("button", { id: "ask-accuracy", onclick: accuracy, title: "Run all test inputs through the network without these" }, "… and for all test inputs?")) : null);
}

/** The network's outputs as bars; under a mask, dashed, what they were. A click asks why this one. */
export function showOutputs(answer) {
  const place = $("outputs");
  if (!place) return;
  const now = without?.of === state.q + state.at && state.mask ? new Map(without.outputs.map((output) => [output.number, output.logit])) : null;
  const value = ({ number, logit }) => now?.get(number) ?? logit;
  let rows = [...answer.outputs];
  if (rows.length > MOST_OUTPUTS) rows = rows.sort((a, b) => value(b) - value(a)).slice(0, MOST_OUTPUTS);
  // A mask can take away far more than the answer is: then lengths are compressed, so that both stay visible.
  const far = now && Math.max(...rows.map((row) => Math.abs(value(row)))) > 5 * Math.max(...rows.map(({ logit }) => Math.abs(logit)));
  const scaled = far ? Math.asinh : (each) => each;
  const all = rows.flatMap((row) => [scaled(row.logit), scaled(value(row)), 0]);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const at = (each) => (100 * (scaled(each) - low)) / (high - low || 1);
  const bar = (each, kind) => h("span", { class: kind, style: { left: `${Math.min(at(each), at(0))}%`, width: `${Math.max(0.6, Math.abs(at(each) - at(0)))}%` } });
  const said = now ? without.said : answer.said;
  const target = Number((state.target || String(answer.said)).split("-")[0]);
  fill(place, h("div", { class: "quiet caption" }, now ? "logits without what is left out; dashed: with everything" : "logits: what the network says of each output", far ? " (log scale)" : ""),
    rows.map((row) => [
      h("button", { class: row.number === said ? "most" : "", title: `${visible(row.name)}: ${shown(row.logit)}. ${run.saved ? "" : " Click: why this one?"}`, disabled: Boolean(run.saved), onclick: () => change({ target: row.number === answer.said ? "" : row.number, open: "" }) }, visible(row.name)),
      h("span", { class: "bar", role: "img", "aria-label": `${visible(row.name)} ${shown(value(row))}` }, now ? bar(row.logit, "old") : null, bar(value(row), `now ${row.number === target ? "target" : ""}`), h("span", { class: "zero", style: { left: `${at(0)}%` } })),
      h("span", { class: "number", "data-logit": String(value(row)), "data-number": String(row.number) }, shown(value(row)))]));
}

async function accuracy() {
  const place = $("accuracy");
  fill(place, h("span", { class: "quiet" }, "Asking all test inputs …"));
  await attempt(place, async () => {
    const found = await ask("accuracy", { mask: state.mask, in: state.in }, "accuracy", waits(place, "Still preparing."));
    const worst = Object.entries(found.with.by_label).map(([label, share]) => [label, found.without.by_label[label] - share]).sort((a, b) => a[1] - b[1])[0];
    fill(place, `Right answers on all ${run.inputs.toLocaleString("en")} test inputs: `, h("b", {}, percent(found.with.all)), " → ", h("b", {}, percent(found.without.all)),
      worst[1] < -0.005 ? h("span", { class: "quiet" }, `; class ${run.classes[worst[0]] ?? worst[0]} loses most (${(100 * worst[1]).toFixed(0)} points)`) : "",
      touched("These get worse", found.worse, "against"), touched("These get better", found.better, "for"));
  }, accuracy);
}

/** The test inputs that a mask changes most; a click makes one the query. */
export function touched(title, inputs, tone) {
  if (!inputs.length) return null;
  const name = (number) => run.classes[number] ?? number;
  const one = (input) => h("button", { class: "thumb", title: `input ${input.id}, which is ${name(input.label)}: the network finds that ${percent(input.right)} likely, without these ${percent(input.right_now)}`, onclick: () => ask_about(`test:${input.id}`, { view: "" }) },
    datum(input.shown, { ink: ink(), name: `input ${input.id}` }), h("span", { class: "tag" }, input.said === input.now ? `still ${name(input.now)}` : `${name(input.said)}, now ${name(input.now)}`));
  return h("div", { class: "touched" }, h("h3", { class: tone }, title), h("div", { class: inputs[0].shown.kind === "image" ? "grid named" : "grid rows" }, inputs.map(one)));
}
