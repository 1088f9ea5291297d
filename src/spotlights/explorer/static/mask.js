// Step 3: leave some of the training out, and see the answer with and without it.

import { ask, latest, Replaced } from "./api.js";
import { $, datum, explain, fill, h, percent, problem, shown, signed, visible, waits } from "./dom.js";
import { formatSelections } from "./selections.js";
import { change, isMasked, maskParts, maskText, otherSelections, state, toggleMasked } from "./state.js";

const MOST = 12;
const FEW = 12;
export const NOT_RETRAINING = "A mask is not retraining. It takes away exactly what these training examples added to the weights; all other updates stay as they were, though without these they would have gone another way. What training again would do is estimated by the measure “influence”.";
let run;

export function setUpMasking(about) {
  run = about;
  showMaskControls();
}

export function showMaskControls() {
  const place = $("mask-controls");
  if (run.no_masks) return fill(place, h("p", { class: "quiet" }, run.no_masks));
  const [parts, others] = [maskParts(), otherSelections()];
  const groups = Object.entries(run.groups).filter(([, values]) => values.length > 1 && values.length <= 40);
  fill(place,
    h("p", { class: "quiet" }, "What would it answer had these never added to its weights? ", explain(h("span", { class: "caution" }, "not retraining"), NOT_RETRAINING)),
    groups.map(([column, values]) => chosen(`leave out ${column}`, values.length, (parts[column] ?? []).length > 0, values.map(({ value, name, colour }) =>
      h("button", { class: "chip", "aria-pressed": String(isMasked(column, value)), "data-column": column, "data-value": String(value), style: { "--c": colour }, onclick: () => toggleMasked(column, value) }, h("i"), name)))),
    run.edges.length > 1 ? slider(parts) : null,
    (parts.example ?? []).length ? h("fieldset", {}, h("legend", {}, `leave out ${parts.example.length} single example${parts.example.length > 1 ? "s" : ""}`),
      h("div", { class: "chips" }, parts.example.slice(0, 12).map((id) => h("button", { class: "chip", "aria-pressed": "true", onclick: () => toggleMasked("example", null, id) }, id)),
        parts.example.length > 12 ? h("span", { class: "quiet" }, `and ${parts.example.length - 12} more`) : null)) : null,
    others.length ? h("fieldset", {}, h("legend", {}, "leave out also"), h("div", { class: "chips" }, others.map((terms) =>
      h("button", { class: "chip", "aria-pressed": "true", onclick: () => change({ mask: maskText(parts, others.filter((each) => each !== terms)) }) }, formatSelections([terms]))))) : null,
    run.layers.length > 1 ? chosen("in layers", run.layers.length, Boolean(state.in), run.layers.map(({ name }) => {
      const on = inLayers().includes(name);
      return h("button", { class: "chip", "aria-pressed": "false", style: { opacity: on ? 1 : 0.45 }, title: on ? "Masked in this layer" : "Not masked in this layer", "data-layer": name, onclick: () => toggleLayer(name) }, on ? "✓ " : "", name);
    })) : null,
    h("div", { class: "chips" }, h("button", { id: "clear-mask", disabled: !state.mask, onclick: () => change({ mask: "", in: "" }) }, "Mask nothing")));
}

/** Some chips under a title; many of them stay folded up until somebody wants one. */
function chosen(title, count, open, buttons) {
  const chips = h("div", { class: "chips" }, buttons);
  return count <= FEW ? h("fieldset", {}, h("legend", {}, title), chips) : h("details", { open }, h("summary", {}, `${title} (${count})`), chips);
}

const inLayers = () => (state.in ? state.in.split(",") : run.layers.map(({ name }) => name));

function toggleLayer(name) {
  const on = inLayers();
  const now = run.layers.map((each) => each.name).filter((each) => (each === name ? !on.includes(each) : on.includes(each)));
  if (now.length) change({ in: now.length === run.layers.length ? "" : now.join(",") });
}

function slider(parts) {
  const edges = run.edges;
  const last = edges.length - 1;
  const stretch = (parts.step ?? [])[0]?.split("-").map(Number) ?? [0, 0];
  const nearest = (step) => edges.reduce((best, edge, at) => (Math.abs(edge - step) < Math.abs(edges[best] - step) ? at : best), 0);
  const ends = stretch.map(nearest);
  const band = h("div", { class: "band" });
  const words = h("span", { class: "number", id: "masked-steps" });
  const show = () => {
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    band.style.left = `${(100 * low) / last}%`;
    band.style.width = `${(100 * (high - low)) / last}%`;
    words.textContent = high > low ? `${edges[low].toLocaleString("en")} to ${edges[high].toLocaleString("en")}` : "none";
  };
  const moved = (which) => (event) => {
    ends[which] = Number(event.target.value);
    show();
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    change({ mask: maskText({ ...maskParts(), step: high > low ? [`${edges[low]}-${edges[high]}`] : [] }) }, { quietly: true });
  };
  show();
  const end = (which, title) => h("input", { type: "range", min: "0", max: String(last), value: String(ends[which]), step: "1", "aria-label": title, id: `steps-${which}`, oninput: moved(which) });
  return h("fieldset", {}, h("legend", {}, "leave out steps", words), h("div", { class: "range" }, band, end(0, "First step left out"), end(1, "End of the steps left out")));
}

/** While a slider has the focus it must not be made anew: it would slip out of the hand. */
export const sliding = () => document.activeElement?.type === "range" && $("mask-controls").contains(document.activeElement);

// -- the comparison ---------------------------------------------------------------------------

export const showComparison = latest(async () => {
  if (!state.q || run.no_masks) return;
  const wanted = state.mask + state.in + state.q;
  try {
    const found = await ask("mask", { q: state.q, at: state.at, mask: state.mask, in: state.in }, "mask",
      waits($("verdict"), "Adding up the training by groups, once; then masks are instant."));
    compare(found);
    document.body.dataset.compared = wanted;
  } catch (error) {
    if (error instanceof Replaced) return;
    fill($("compare"));
    fill($("verdict"), h("p", { class: "empty" }, `Nothing to compare: ${error.message}`));
  }
});

function compare({ with: before, without: after }) {
  const changed = before.said !== after.said;
  const share = (answer) => (answer.outputs.length > 1 ? percent(answer.outputs.find(({ number }) => number === answer.said).share) : "");
  const known = new Map(after.outputs.map((output) => [output.number, output]));
  let rows = before.outputs.map((output) => ({ ...output, now: known.get(output.number)?.logit ?? null })).filter(({ now }) => now !== null);
  const moved = [...rows].sort((a, b) => Math.abs(b.now - b.logit) - Math.abs(a.now - a.logit));
  if (rows.length > MOST) rows = moved.slice(0, MOST);
  // A mask can take away far more than the answer is: then lengths are compressed, so that both stay visible.
  const far = Math.max(...rows.map(({ now }) => Math.abs(now))) > 5 * Math.max(...rows.map(({ logit }) => Math.abs(logit)));
  const scaled = far ? Math.asinh : (value) => value;
  const values = rows.flatMap(({ logit, now }) => [scaled(logit), scaled(now), 0]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const place = (value) => (100 * (scaled(value) - low)) / (high - low || 1);
  const bar = (value, kind) => h("span", { class: kind, style: { left: `${Math.min(place(value), place(0))}%`, width: `${Math.max(0.6, Math.abs(place(value) - place(0)))}%` } });
  const most = state.mask && moved[0];
  document.body.classList.toggle("masked", Boolean(state.mask)); // on a phone the verdict then stays in view
  fill($("verdict"), h("div", { class: `verdict ${changed ? "changed" : ""}` },
      h("div", { class: "before" }, h("span", { class: "quiet" }, "with everything"), h("strong", {}, visible(before.said_name)), h("span", { class: "quiet number" }, share(before))),
      h("span", { "aria-hidden": "true" }, "→"),
      h("div", { class: "after" }, h("span", { class: "quiet" }, state.mask ? "without these" : "nothing left out"), h("strong", { id: "masked-said" }, visible(after.said_name)), h("span", { class: "quiet number" }, share(after)))));
  fill($("compare"),
    most ? h("p", { class: "quiet" }, "Changed most: ", h("b", {}, most.name), ` ${shown(most.logit)} → ${shown(most.now)} (${signed(most.now - most.logit)})`) : h("p", { class: "quiet" }, "Leave out a class, some steps, or a training example by its ✕."),
    h("div", { class: "key" }, h("span", {}, h("i", { style: { background: "#b6bdc6" } }), "with"), state.mask ? [h("span", {}, h("i", { style: { background: "var(--for)" } }), "without: higher"), h("span", {}, h("i", { style: { background: "var(--against)" } }), "lower")] : h("span", {}, h("i", { style: { background: "var(--ink)" } }), "without"), far ? h("span", {}, "log scale") : null),
    far ? h("p", { class: "quiet" }, "Far outside what it ever said: what training examples add is large and cancels out, and the rest is not made up for.") : null,
    h("div", { class: "bars", role: "table", "aria-label": "Outputs with and without" }, rows.map(({ number, name, logit, now }) => [
      h("span", { class: `name ${number === after.said ? "most" : ""}`, title: name }, visible(name)),
      h("span", { class: "bar", title: `${shown(logit)} → ${shown(now)}` }, bar(logit, "before"), bar(now, `after ${state.mask && now > logit + 1e-3 ? "for" : state.mask && now < logit - 1e-3 ? "against" : ""}`), h("span", { class: "zero", style: { left: `${place(0)}%` } })),
      h("span", { class: "number", "data-logit": String(now), "data-number": String(number) }, shown(now))])),
    run.labelled ? h("div", { id: "accuracy" }, h("button", { onclick: accuracy, title: "Run all test inputs through the network without these" }, "… and on all test inputs?")) : null);
}

async function accuracy() {
  const place = $("accuracy");
  fill(place, h("span", { class: "quiet" }, "Asking all test inputs …"));
  try {
    const found = await ask("accuracy", { mask: state.mask, in: state.in }, "accuracy", waits(place, "Still preparing."));
    const worst = Object.entries(found.with.by_label).map(([label, share]) => [label, found.without.by_label[label] - share]).sort((a, b) => a[1] - b[1])[0];
    fill(place, `Right answers on all ${run.inputs.toLocaleString("en")} test inputs: `, h("b", {}, percent(found.with.all)), " → ", h("b", {}, percent(found.without.all)),
      worst[1] < -0.005 ? h("span", { class: "quiet" }, `; class ${run.classes[worst[0]] ?? worst[0]} loses most (${(100 * worst[1]).toFixed(0)} points)`) : "",
      touched("These get worse", found.worse, "against"), touched("These get better", found.better, "for"));
    place.scrollIntoView({ block: "nearest" });
  } catch (error) {
    if (!(error instanceof Replaced)) fill(place, problem(error, accuracy));
  }
}

/** The test inputs that a mask changes most; a click makes one the query. */
function touched(title, inputs, tone) {
  if (!inputs.length) return null;
  const name = (number) => run.classes[number] ?? number;
  const one = (input) => h("button", { class: "thumb", title: `input ${input.id}, which is ${name(input.label)}: the network finds that ${percent(input.right)} likely, without these ${percent(input.right_now)}`,
    onclick: () => change({ q: `test:${input.id}`, at: "", target: "" }) },
    datum(input.shown, { ink: Boolean(run.drawing), name: `input ${input.id}` }), h("span", { class: "tag" }, input.said === input.now ? `${name(input.now)}` : `${name(input.said)} → ${name(input.now)}`));
  return h("div", { class: "touched" }, h("h3", { class: tone }, title), h("div", { class: inputs[0].shown.kind === "image" ? "grid six" : "grid rows" }, inputs.map(one)));
}
