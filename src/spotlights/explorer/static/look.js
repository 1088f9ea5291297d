// Step 2: what the answer is made of. One layer at a time: the examples, the sorted values, the totals, the time.

import { ask, Replaced } from "./api.js";
import { $, caution, datum, fill, h, percent, problem, shown, signed, visible, waits } from "./dom.js";
import { light, onLight } from "./link.js";
import { drawSorted, drawTime, drawTotals, markSorted, takeAway } from "./plots.js";
import { parseSelections } from "./selections.js";
import { change, isMasked, state, toggleMasked } from "./state.js";

const ESTIMATING = "Looking through all layers' inputs, once; then estimates are quick.";
let run;
let answer = null;
let found = null;
let times = [];
let more = false;
const examples = new Map();

export function setUpLooking(about) {
  run = about;
  onLight(lightUp);
}

export const measure = () => run.measures.find(({ name }) => name === state.measure) ?? run.measures[0];
export const layer = () => state.layer || answer?.layer || run.layers.at(-1).name;
/** Influence is the only estimate: of all layers together, and of examples, not of slots. */
const estimate = () => measure().estimate;
const column = () => (state.per in run.groups ? state.per : Object.keys(run.groups)[0]);

/** What the server is asked: the same words as in the address. */
const asked = () => ({ q: state.q, at: state.at, layer: layer(), measure: measure().name, target: measure().signed ? state.target : "",
  by: state.by || "example", per: column(), where: state.where, top: (measure().signed ? 10 : 20) * (more ? 5 : 1) });

const look = (group, number) => {
  const known = (run.groups[column()] ?? []).find(({ value }) => value === group);
  return known ?? { name: String(group ?? "all"), colour: run.colours.classes[number % run.colours.classes.length] };
};

// -- asking -----------------------------------------------------------------------------------

export async function showQuery() {
  if (!state.q) return;
  $("story").classList.add("busy");
  try {
    answer = await ask("query", { q: state.q, at: state.at }, "query");
    tell();
    if (state.q.startsWith("train:")) factsOf(Number(state.q.slice(6))).then(() => answer && tell());
    showLayer();
  } catch (error) {
    if (error instanceof Replaced) return;
    answer = found = null;
    fill($("story"), problem(error, showQuery));
    fill($("controls"));
    fill($("examples"), h("p", { class: "empty" }, "Choose another input."));
    $("made").classList.add("nothing");
  } finally {
    $("story").classList.remove("busy");
  }
}

export async function showLayer() {
  if (!answer) return;
  controls();
  if (state.view) return tell();
  $("examples").classList.add("busy");
  const wanted = asked();
  try {
    const waiting = waits($("examples"), ESTIMATING);
    found = await ask("layer", wanted, "layer", (progress) => { $("made").classList.add("nothing"); waiting(progress); });
    inOrder(found);
    $("made").classList.remove("nothing");
    tell();
    controls();
    cards();
    $("examples").classList.remove("busy");
    const [first] = await Promise.all([run.visits ? ask("time", { ...wanted, where: "" }, "time") : null, figures()]);
    times = first ? [first] : [];
    $("when").hidden = !run.visits;
    await time();
    document.body.dataset.shown = location.hash;
    await showOtherTimes(wanted);
    document.body.dataset.complete = location.hash;
  } catch (error) {
    if (error instanceof Replaced) return;
    found = null;
    fill($("examples"), problem(error, showLayer));
    $("made").classList.add("nothing");
  } finally {
    $("examples").classList.remove("busy");
  }
}

const FEW_LAYERS = 6;

/** Groups stand in the same order everywhere, whatever order training met them in. */
function inOrder(answer) {
  const place = (column, value) => (run.groups[column] ?? []).findIndex((group) => group.value === value);
  for (const [column, rows] of Object.entries(answer.totals)) rows.sort((a, b) => place(column, a.value) - place(column, b.value));
  const { groups, values, slots, examples } = answer.sorted;
  const order = groups.map((_, at) => at).sort((a, b) => place(answer.per, groups[a]) - place(answer.per, groups[b]));
  answer.sorted = Object.fromEntries(Object.entries({ groups, values, slots, examples }).map(([key, all]) => [key, order.map((at) => all[at])]));
}

/** The other layers come when the view is there: a hidden layer's contributions take longest. Of many, none: who could tell them apart? */
async function showOtherTimes(wanted) {
  if (estimate() || !run.visits || run.layers.length > FEW_LAYERS) return;
  for (const { name } of run.layers) {
    if (name === wanted.layer) continue;
    times.push(await ask("time", { ...wanted, where: "", layer: name }, "time"));
    await time();
  }
}

// -- telling ----------------------------------------------------------------------------------

function tell() {
  const said = answer.outputs.find(({ number }) => number === answer.said);
  const verdict = answer.truth === null ? null : answer.truth === answer.said ? h("span", { class: "right" }, " right") : h("span", { class: "wrong-answer" }, ` wrong: it is ${answer.truth_name}`);
  const picture = answer.shown.kind === "image" ? datum(answer.shown, { ink: Boolean(run.drawing), name: "the input" }) : null;
  picture?.classList.add("picture");
  const facts = answer.shown.kind === "table" ? h("p", { class: "facts" }, datum(answer.shown)) : null;
  const move = (by, text, title) => h("button", { class: "move", title, "aria-label": title, disabled: answer.at + by < 0 || answer.at + by >= answer.tokens.length, onclick: () => change({ at: answer.at + by, target: "" }) }, text);
  const mover = answer.tokens && h("span", { class: "mover" }, move(-1, "‹", "The token before"), move(1, "›", "The token after"));
  const tokens = answer.tokens && h("p", { class: "tokens", id: "tokens" }, answer.tokens.map((token, at) =>
    h("button", { "aria-pressed": String(at === answer.at), title: `Ask about token ${at}`, onclick: () => change({ at, target: "" }) }, token.replace("\n", "↵\n"))));
  const kind = answer.tokens ? "After the marked token the network says " : "The network says ";
  fill($("story"), picture, h("div", {},
    tokens, facts,
    h("p", { class: "said" }, h("span", {}, mover, kind, h("strong", { id: "said" }, visible(answer.said_name)), said.share === null ? null : h("span", { class: "quiet" }, ` (${percent(said.share)})`), verdict), h("span", { class: "quiet", id: "which" }, which())),
    h("p", { class: "sum" }, sentence())));
}

/** Which input this is; of a training example also when the network met it. */
function which() {
  const [way, id] = answer.query.split(":", 2);
  const { steps, columns } = (way === "train" && examples.get(Number(id))) || { steps: [], columns: {} };
  const label = columns.label === undefined ? "" : `, labelled ${(run.groups.label ?? []).find(({ value }) => value === columns.label)?.name ?? columns.label}`;
  const met = steps.length ? `, visited ${steps.length === 1 ? "once, in" : `${steps.length} times, first in`} step ${steps[0].toLocaleString("en")}` : "";
  return { test: `test input ${id}`, train: `training example ${id}${label}${met}`, pixels: "your image", text: "your prompt" }[way];
}

function sentence() {
  if (state.view) return "Which training examples may have taught it something wrong?";
  if (!found || found.measure !== measure().name || (found.layer !== layer() && !estimate())) return "Asking …";
  const count = found.slots.toLocaleString("en");
  const slots = run.visits ? `${count} training slots` : `${run.slots.toLocaleString("en")} training slots, sums of ${count} visits,`;
  const like = answer.tokens ? "what the network had read up to the marked token" : found.rows > 1 ? `the input, its ${found.rows.toLocaleString("en")} positions added up` : "the input";
  if (!found.signed) return `Each of the ${slots} has a ${measure().title} in ${found.layer}: how similar this layer finds it to ${like}.`;
  const target = answer.outputs.find(({ number }) => number === found.target);
  const name = visible(target?.name ?? found.target);
  if (estimate()) return [`Had a training example been left out, would the output for “${name}” be lower or higher? `, h("b", {}, "An estimate"), ": order and sign count, the size has no unit."];
  if (found.where) return `${range() ? `Steps ${range().map((step) => step.toLocaleString("en")).join(" to ")}` : found.where} alone add ${signed(found.total)} to its output for “${name}”.`;
  if (found.exact && target) return [`Its output for “${name}” is a plain sum: `, h("b", {}, shown(target.logit)), ` = ${shown(found.initial)} from the initial weights ${found.rounding ? `${signed(found.rounding)} from rounding ` : ""}`,
    h("b", { class: found.total >= 0 ? "for" : "against" }, signed(found.total)), ` from ${slots}. Who added most?`];
  const whole = found.rows > 1 ? ` The layer sees this input at ${found.rows.toLocaleString("en")} positions: all of them are added up.` : "";
  return `Through ${found.layer}, the ${slots} speak for or against “${name}” by about ${signed(found.total)} (${found.caution ?? "first order"}).${whole}`;
}

function controls() {
  const pick = (title, current, choices, key) => choices.length > FEW_LAYERS ? h("label", { class: "switch" }, h("span", {}, title),
    h("select", { id: `pick-${key}`, onchange: (event) => change({ [key]: event.target.value }) }, choices.map(([value, text]) => h("option", { value, selected: value === current }, text))))
    : h("span", { class: "switch", role: "group", "aria-label": title }, h("span", {}, title),
    choices.map(([value, text, help]) => h("button", { "aria-pressed": String(value === current), title: help, onclick: () => change({ [key]: value }) }, text)));
  const now = measure();
  const target = now.signed && h("label", { class: "switch" }, h("span", {}, "for or against"),
    h("select", { id: "target", onchange: (event) => change({ target: event.target.value }) },
      answer.outputs.map(({ number, name }) => h("option", { value: number, selected: String(number) === (state.target || String(answer.said)) }, visible(name)))));
  const columns = Object.keys(run.groups).filter((name) => run.groups[name].length > 1);
  const only = range() ? `steps ${range().join("–")}` : state.where;
  const steps = state.where && h("button", { class: "chip", id: "steps-chip", title: "Look at all of training again", onclick: () => change({ where: "" }) }, `only ${only} ✕`);
  fill($("controls"),
    pick("measure", now.name, run.measures.map(({ name, title, help }) => [name, title, help]), "measure"),
    found && !state.view && found.measure === now.name ? caution(found) : null,
    target,
    estimate() ? pick("layer", "all", [["all", "all layers", "Influence adds up all layers: one alone says less"]], "nothing")
      : pick("layer", layer(), run.layers.map(({ name, in: into, out }) => [name, name, `${into} → ${out}`]), "layer"),
    state.view || estimate() || !run.visits ? null : run.examples ? pick("add up", state.by || "example", [["example", "examples", "An example's visits are added up"], ["slot", "slots", "Each visit on its own"]], "by") : null,
    columns.length > 1 && !state.view ? pick("by", column(), columns.map((name) => [name, name]), "per") : null,
    state.view ? null : steps);
}

function cards() {
  const side = (title, rows, tone) => h("div", {}, h("h3", { class: tone }, title), rows.length ? h("div", { class: `cards ${rows[0].shown?.kind === "image" ? "" : "text"}` }, rows.map((row) => card(row, tone)))
    : h("p", { class: "empty" }, "Nothing here."));
  const target = found.signed && visible(answer.outputs.find(({ number }) => number === found.target)?.name ?? found.target);
  const fewer = h("button", { class: "more", onclick: () => { more = !more; showLayer(); } }, more ? "fewer" : "more");
  const top = found.signed ? found.top.filter(({ value }) => value > 0) : found.top;
  const bottom = found.signed && found.bottom.filter(({ value }) => value < 0);
  fill($("examples"), found.signed
    ? h("div", { class: "sides" }, side(estimate() ? `Without these, “${target}” would be lower` : `Speak for “${target}”`, top, "for"), side([estimate() ? "Without these, higher " : "Speak against it ", h("span", { class: "links" }, fewer)], bottom, "against"))
    : h("div", { class: "sides one" }, side([`${top[0]?.shown?.kind === "text" ? "Where the training text has" : found.by === "slot" ? "Training slots with" : "Training examples with"} the largest ${measure().title} `, h("span", { class: "links" }, fewer)], top, "")));
}

function card(row, tone) {
  const name = row.label !== undefined && row.label !== null ? look(row.label, row.label).name : "";
  const known = Object.entries(row).filter(([key, value]) => !["shown", "value", "rank"].includes(key) && value !== null);
  const facts = known.map(([key, value]) => `${key} ${value}`);
  const title = `${facts.join(", ")}\n${measure().title} ${shown(row.value)}${run.training_queries ? "\nclick: make it the query" : ""}`;
  const use = () => run.training_queries && row.example !== undefined && change({ q: `train:${row.example}`, at: "", target: "" });
  const view = row.shown ?? { kind: "table", rows: known.filter(([key]) => key !== "label") };
  const at = { example: row.example, slot: row.slot };
  return h("div", { class: `card ${row.example !== undefined && isMasked("example", row.example) ? "masked" : ""}`, "data-example": row.example ?? "", "data-slot": row.slot ?? "",
    onpointerenter: () => light(at), onpointerleave: () => light(null) },
    h("button", { class: "thumb", title, onclick: use, onfocus: () => light(at), onblur: () => light(null) }, datum(view, { ink: Boolean(run.drawing), name: facts.join(", ") }),
      h("span", { class: "tag number" }, name ? h("b", {}, name) : null, h("span", { class: tone }, found.signed ? signed(row.value) : shown(row.value)))),
    row.example !== undefined && !run.no_masks ? h("button", { class: "out", title: "Leave this example out", "aria-label": `Leave out example ${row.example}`, onclick: () => toggleMasked("example", row.example) }, "✕") : null);
}

async function figures() {
  const what = measure().title;
  const of = found.by === "slot" ? "slots" : "examples";
  $("totals").parentElement.hidden = !column();
  $("sorted").closest(".figures").classList.toggle("one", !column());
  const plural = `${what}${estimate() ? "" : "s"}`;
  fill($("sorted-title"), column() ? `${plural[0].toUpperCase()}${plural.slice(1)} by ${column()}` : `The largest ${plural}`, h("span", { class: "quiet" }, `${found.sorted.values.reduce((sum, each) => sum + each.length, 0).toLocaleString("en")} ${of}`), takeAway($("sorted"), "spotlights-sorted"));
  fill($("totals-title"), `Total by ${column() ?? ""}`, takeAway($("totals"), "spotlights-totals"));
  await drawSorted($("sorted"), found, look);
  if (column()) await drawTotals($("totals"), found, column(), look, (value) => isMasked(column(), value));
  once($("sorted"), "plotly_hover", ({ points, event }) => { const [example, slot] = points[0].customdata ?? []; if (example !== undefined) light({ example, slot, at: event }); });
  once($("sorted"), "plotly_unhover", () => light(null));
  once($("sorted"), "plotly_click", ({ points }) => points[0].customdata && run.training_queries && change({ q: `train:${points[0].customdata[0]}`, at: "", target: "" }));
  if (column()) once($("totals"), "plotly_click", ({ points }) => !run.no_masks && toggleMasked(column(), points[0].customdata));
}

function once(place, event, act) {
  place.removeAllListeners(event);
  place.on(event, act);
}

/** The stretch of steps that is looked at, if nothing else is asked for. */
export function range() {
  const [terms, ...more] = parseSelections(state.where);
  const [step] = more.length || !terms || Object.keys(terms).join() !== "step" ? [] : terms.step;
  return step?.match(/^\d+-\d+$/) ? step.split("-").map(Number) : null;
}

async function time(visits = null) {
  if (!times.length) return;
  const clear = state.where && !run.no_masks && h("button", { title: "Mask these", onclick: leaveOut }, range() ? "leave these steps out" : "leave these out");
  fill($("time-title"), "When in training?", h("span", { class: "quiet" }, state.where ? "" : `share of ${estimate() ? "the" : "each layer's"} total; drag to look at a stretch`), clear || "", takeAway($("time"), "spotlights-time"));
  await drawTime($("time"), times, times[0].layer, range(), visits);
  once($("time"), "plotly_selected", (event) => {
    if (!event?.range?.x) return;
    const [first, end] = event.range.x.map((step) => snapped(step));
    change({ where: end > first ? `step=${first}-${end}` : "" });
  });
}

/** The nearest edge that masks know too, so that a stretch can be left out at once. */
function snapped(step) {
  if (!run.edges.length) return Math.max(0, Math.min(run.steps, Math.round(step)));
  return run.edges.reduce((best, edge) => (Math.abs(edge - step) < Math.abs(best - step) ? edge : best));
}

function leaveOut() {
  change({ mask: [state.mask, state.where].filter(Boolean).join("; "), where: "" });
}

/** After the mask changed: what is left out looks so, everywhere. */
export function showMasked() {
  if (!found) return;
  for (const each of document.querySelectorAll(".card")) each.classList.toggle("masked", each.dataset.example !== "" && isMasked("example", Number(each.dataset.example)));
  if ($("totals").data) drawTotals($("totals"), found, column(), look, (value) => isMasked(column(), value));
}

// -- lighting up ------------------------------------------------------------------------------

let waiting = null;

function lightUp(what) {
  for (const each of document.querySelectorAll(".card"))
    each.classList.toggle("lit", Boolean(what) && (what.slot !== undefined && each.dataset.slot !== "" ? each.dataset.slot === String(what.slot) : each.dataset.example === String(what.example)));
  if (found) markSorted($("sorted"), found, what);
  clearTimeout(waiting);
  $("peek").hidden = true;
  waiting = setTimeout(() => peek(what), what ? 60 : 0);
}

/** What is known of a training example, asked once. */
async function factsOf(example) {
  if (!examples.has(example)) examples.set(example, await ask(`examples/${example}`).catch(() => null));
  return examples.get(example);
}

/** When the example was visited; and, beside a point of a plot, how it looks. */
async function peek(what) {
  if (!what || !run.examples || what.example === undefined) { if (times.length && $("time").layout?.shapes?.length) time(); return; }
  const example = await factsOf(what.example);
  if (!example) return;
  time(example.steps);
  if (!what.at) return;
  fill($("peek"), datum(example.shown, { ink: Boolean(run.drawing) }), Object.entries(example.columns).map(([key, value]) => h("div", {}, `${key} ${value}`)), h("div", { class: "quiet" }, `example ${what.example}, ${example.steps.length} visits`));
  $("peek").style.left = `${Math.min(what.at.clientX + 14, innerWidth - 150)}px`;
  $("peek").style.top = `${Math.max(8, what.at.clientY - 130)}px`;
  $("peek").hidden = false;
}
