// The first view: what an answer is made of. A sum by groups, the examples of a group, who speaks for and against, and when.

import { ask, Replaced } from "./api.js";
import { cumulative, line, mosaic, overSteps, waterfall } from "./charts.js";
import { $, attempt, caution, choose, datum, fill, h, percent, problem, shared, shown, signed, visible, waits } from "./dom.js";
import { showOutputs } from "./mask.js";
import { parseSelections, spell } from "./selections.js";
import { ask_about, change, ink, isMasked, run, state, toggleMasked } from "./state.js";
import { colour, responsive, takeAway } from "./svg.js";
import { table } from "./tables.js";
import { mostOf, shade, shadedText, told, writtenOn } from "./tokens.js";

const ESTIMATING = "Looking through all layers' inputs, once; then estimates are quick.";
const [MOST_ROWS, TILES, TOLD_TILES, STRETCHES, FEW_COLUMNS] = [14, 60, 24, 8, 6];
let answer = null;
let found = null;
let group = null;
let times = null;
let left = null;
let shades = null;
let refused = false;
let more = false;
const examples = new Map();

export function setUpAnswer() {
  responsive($("waterfall"), drawSum);
  responsive($("group"), () => group && drawGroup());
  responsive($("time"), drawTime);
}

export const measure = () => run.measures.find(({ name }) => name === state.measure) ?? run.measures[0];
export const layer = () => state.layer || answer?.layer || run.layers.at(-1).name;
export const theAnswer = () => answer;
const estimate = () => measure().estimate;
const columns = () => [...Object.keys(run.groups).filter((name) => run.groups[name].length > 1), ...(run.times ? ["step"] : [])];
export const column = () => (columns().includes(state.per) ? state.per : columns()[0] ?? "step");
export const look = (value, of = column()) => { const found = (run.groups[of] ?? []).find((each) => each.value === value) ?? { name: String(value ?? "none"), colour: "#888" }; return { ...found, name: visible(found.name) }; };
const outputName = (number) => visible(answer.outputs.find((each) => each.number === number)?.name ?? number);
export const targetName = (target = found?.target, versus = found?.versus) => `“${outputName(target)}”${versus === null || versus === undefined ? "" : ` rather than “${outputName(versus)}”`}`;

/** What the server is asked: the same words as in the address. */
export const asked = (more = {}) => ({ q: state.q, at: state.at, layer: layer(), measure: measure().name, target: measure().signed ? state.target : "", by: run.examples ? state.by || "example" : "slot", where: state.where, ...more });

// -- asking -----------------------------------------------------------------------------------

export async function showQuery() {
  if (!state.q) return;
  $("story").classList.add("busy");
  try {
    answer = await ask("query", { q: state.q, at: state.at }, "query");
    found = shades = null;
    tell();
    if (state.q.startsWith("train:")) factsOf(Number(state.q.slice(6))).then(() => answer && tell());
    return true;
  } catch (error) {
    if (error instanceof Replaced) return false;
    answer = found = group = null;
    fill($("story"), problem(error, () => location.reload()), h("p", { class: "quiet" }, "Choose another input."));
    fill($("controls"));
    $("answer").hidden = true;
    return false;
  } finally {
    $("story").classList.remove("busy");
  }
}

export async function showLayer() {
  if (!answer) return;
  const wanted = asked({ top: more ? 50 : measure().signed ? 10 : 20 });
  $("examples").classList.add("busy");
  try {
    found = await ask("layer", wanted, "layer", waits($("examples"), ESTIMATING));
    refused = false;
    times = run.times ? await ask("time", { ...wanted, where: "", top: "", by: "" }, "time") : null;
    await withoutMasked();
    $("answer").hidden = Boolean(state.view);
    $("when").hidden = !run.times;
    tell();
    controls();
    drawSum();
    drawTime();
    shades = null;
    cards();
    await Promise.all([showGroup(), showShades(wanted)]);
  } catch (error) {
    if (error instanceof Replaced) return;
    found = null;
    refused = true;
    tell();
    controls();
    $("answer").hidden = Boolean(state.view);
    for (const place of ["waterfall", "group-body", "time"]) fill($(place));
    for (const place of ["sum-title", "sum-note", "group-title", "time-title"]) fill($(place));
    fill($("examples"), problem(error, showLayer));
  } finally {
    $("examples").classList.remove("busy");
  }
}

/** Texts are shaded token by token, once that is known. */
async function showShades(wanted) {
  if (!run.texts || estimate()) return;
  const examples = [...new Set([...found.top, ...(found.bottom ?? [])].map(({ example }) => example))].filter((example) => example !== undefined).sort((a, b) => a - b);
  const of = found;
  shades = await ask("tokens", { ...wanted, by: "", top: "", examples: examples.join(",") }, "tokens").catch(() => null);
  if (found !== of || !shades) return;
  tell();
  cards();
}

/** The layers in which the mask leaves something out. */
export const maskedLayers = () => (state.in === "all" ? run.layers.map(({ name }) => name) : state.in ? state.in.split(",") : [answer?.layer]);

/** What the masked slots make up of the sum, group by group. */
async function withoutMasked() {
  const masks = state.mask && !estimate() && !state.where && maskedLayers().includes(layer());
  const parameters = asked({ where: state.mask, top: 1 });
  left = !masks ? null : column() === "step" ? await ask("time", { ...parameters, top: "", by: "" }, "left").catch(() => null) : await ask("layer", parameters, "left").catch(() => null);
}

export async function showMasked() {
  if (!found || state.view) return;
  await withoutMasked();
  drawSum();
  drawGroup();
  for (const each of document.querySelectorAll(".card")) each.classList.toggle("masked", each.dataset.example !== "" && isMasked("example", Number(each.dataset.example)));
}

// -- telling ----------------------------------------------------------------------------------

function tell() {
  if (!answer) return;
  const said = answer.outputs.find(({ number }) => number === answer.said);
  const verdict = answer.truth === null ? null : answer.truth === answer.said ? h("span", { class: "right" }, " right") : h("span", { class: "wrong-answer" }, ` wrong: it is ${answer.truth_name}`);
  const picture = answer.shown.kind === "image" ? datum(answer.shown, { ink: ink(), name: "the input" }) : null;
  picture?.classList.add("picture");
  const move = (by, text, title) => h("button", { title, "aria-label": title, disabled: answer.at + by < 0 || answer.at + by >= answer.tokens.length, onclick: () => change({ at: answer.at + by, target: "" }) }, text);
  const values = shades?.input?.values ?? [];
  const most = mostOf([{ values }]);
  const input = answer.tokens ? h("p", { class: "tokens", id: "tokens" }, answer.tokens.map((token, at) => h("button", { "aria-pressed": String(at === answer.at), ...shade(values[at], most), title: `Ask about token ${at}${values[at] ? `: through it training adds ${signed(values[at])}` : ""}`, onclick: () => change({ at, target: "" }) }, token.replace("\n", "↵\n"))))
    : answer.shown.kind === "text" ? h("p", { class: "query-text", id: "query-text" }, datum(answer.shown))
    : answer.shown.kind === "table" ? rowTold(answer.shown) : answer.shown.kind === "html" ? datum(answer.shown, { name: "the input" }) : null;
  fill($("story"), picture, h("div", { class: "told" },
    input,
    h("p", { class: "said" }, answer.tokens ? h("span", { class: "mover" }, move(-1, "‹", "The token before"), move(1, "›", "The token after"),
        run.prompt && !run.classes.length && !run.saved ? h("button", { id: "write-on", title: "Add to the text what the network says next, a few tokens", onclick: writeOn }, "write on") : null) : null,
      answer.tokens && !run.classes.length ? "After the marked token the network says " : "The network says ", h("strong", { id: "said" }, visible(answer.said_name)), said.share === null ? null : h("span", { class: "quiet" }, ` (${percent(said.share)})`), verdict),
    h("p", { class: "sentence", id: "sentence" }, sentence()),
    h("p", { class: "quiet", id: "which" }, which(), shades?.input ? `. ${told(shades.input, targetName())}` : null)), h("div", { class: "outputs", id: "outputs" }));
  showOutputs(answer);
}

async function writeOn(event) {
  event.target.disabled = true;
  try {
    ask_about(`text:${await writtenOn(answer.tokens)}`);
  } catch (error) {
    if (!(error instanceof Replaced)) event.target.replaceWith(problem(error));
  }
}

/** A row of a table: its first columns, the others behind a click. */
function rowTold(shownAs) {
  const some = { ...shownAs, rows: shownAs.rows.slice(0, FEW_COLUMNS) };
  if (shownAs.rows.length <= FEW_COLUMNS) return h("p", { class: "quiet" }, datum(shownAs));
  return h("details", { class: "row-told" }, h("summary", {}, datum(some), ` … all ${shownAs.rows.length} columns`), datum(shownAs));
}

/** Which input this is; of a training example also when the network met it. */
function which() {
  const [way, id] = answer.query.split(":", 2);
  const { steps, columns: facts } = (way === "train" && examples.get(Number(id))) || { steps: [], columns: {} };
  const label = facts.label === undefined ? "" : `, labelled ${look(facts.label, "label").name}`;
  const met = steps.length ? `, visited ${steps.length === 1 ? "once, in" : `${steps.length} times, first in`} step ${steps[0].toLocaleString("en")}` : "";
  return { test: `test input ${id}`, train: `training example ${id}${label}${met}`, pixels: "your image", text: "your prompt" }[way];
}

function sentence() {
  if (state.view === "audit") return "Which training examples may have taught it something wrong?";
  if (!found || found.measure !== measure().name) return state.view || refused ? "" : "…";
  const count = found.slots.toLocaleString("en");
  const visits = `${count} ${run.visits ? "visits of training examples" : "visits of training examples (added up for each)"}`;
  const like = answer.tokens ? "what the network had read up to the marked token" : found.rows > 1 ? `the input (its ${found.rows.toLocaleString("en")} positions added up)` : "the input";
  if (!found.signed) return `How similar the layer ${found.layer} finds ${like} and each of ${visits}.`;
  const name = targetName();
  if (estimate()) return [`Had a training example been left out, would the logit for ${name} be lower or higher? `, h("b", {}, "An estimate"), ": order and sign count, the size has no unit."];
  if (found.where) return `${range() ? `Steps ${range().map((step) => step.toLocaleString("en")).join(" to ")}` : found.where} alone add ${signed(found.total)} to the logit for ${name}.`;
  if (!found.exact && found.caution === "first order") return `Through ${found.layer}, ${visits} speak for or against ${name} by about ${signed(found.total)} (first order: the layers after it are not linear).`;
  if (found.caution === "estimate") return ["Estimated from a sample of the visits: training adds about ", h("b", {}, signed(found.total)), ` to the logit for ${name}, which is ${shown(found.value)}.`];
  const parts = [...(found.totals[column()] ?? [])].sort((a, b) => Math.abs(b.total) - Math.abs(a.total)).slice(0, 2);
  const largest = column() !== "step" && parts.length > 1 ? parts.map((part) => [h("b", { class: part.total >= 0 ? "for" : "against" }, signed(part.total)), ` from examples ${column() === "label" ? "labelled" : `of ${column()}`} “${look(part.value).name}”, `]) : null;
  return [`The logit for ${name} is `, h("b", {}, shown(found.value)), `, a sum: ${shown(found.initial)} from the initial weights, `, largest, largest ? "… " : null, h("b", {}, signed(found.total)), ` in all from ${visits}.`];
}

export function controls() {
  if (!answer || run.saved) return fill($("controls"));
  const now = measure();
  const [target, versus] = (state.target || String(answer.said)).split("-");
  const outputs = answer.outputs.map(({ number, name }) => [number, visible(name)]);
  const pair = (first, second) => change({ target: second === "" ? first : `${first}-${second}`, open: "" });
  const history = state.view === "history";
  const [here, map] = [!state.view || state.view === "compare", state.view === "map"];
  const only = range() ? `steps ${range().join("–")}` : state.where;
  fill($("controls"),
    (now.signed || history) && state.view !== "audit" && outputs.length > 1 ? [choose("why", "target", target, outputs, (value) => pair(value, versus === value ? "" : versus ?? "")),
      choose("and not", "versus", versus ?? "", [["", "–"], ...outputs.filter(([number]) => String(number) !== target)], (value) => pair(target, value))] : null,
    here || map ? choose("measure", "pick-measure", now.name, run.measures.map(({ name, title, help }) => [name, title, help]), (value) => change({ measure: value, open: "" })) : null,
    here && found && found.measure === now.name ? caution(found) : null,
    (here || map) && !estimate() && run.layers.length > 1 ? choose("in layer", "pick-layer", layer(), run.layers.map(({ name, in: into, out }) => [name, name, `${into} → ${out}`]), (value) => change({ layer: value, open: "" })) : null,
    here && !estimate() && run.visits && run.examples ? choose("one per", "pick-by", state.by || "example", [["example", "example", "An example's visits are added up"], ["slot", "visit", "Each time that training met an example"]], (value) => change({ by: value })) : null,
    state.where && here ? h("button", { class: "chip", id: "steps-chip", title: "Look at all of training again", onclick: () => change({ where: "" }) }, `only ${only} ✕`) : null);
}

// -- the sum ----------------------------------------------------------------------------------

/** The parts of the sum: groups of a column, or stretches of training; each with what a mask leaves of it. */
function parts() {
  if (column() === "step") {
    if (!times) return [];
    const size = Math.ceil(times.totals.length / STRETCHES);
    const sum = (all, at) => all.slice(at * size, (at + 1) * size).reduce((total, value) => total + value, 0);
    const edge = (at) => Math.round(at * size >= times.starts.length ? times.steps : times.starts[at * size]);
    return Array.from({ length: Math.ceil(times.totals.length / size) }, (_, at) => ({ key: `step=${edge(at)}-${edge(at + 1)}`, name: `${edge(at).toLocaleString("en")}–${edge(at + 1).toLocaleString("en")}`, value: sum(times.totals, at), lost: left?.totals ? sum(left.totals, at) : 0, count: null, dot: null }));
  }
  return sumParts(found, new Map((left?.totals?.[column()] ?? []).map((row) => [row.value, row.total])));
}

/** The groups of a sum, the largest first. */
export const sumParts = (found, lost = new Map()) => (found.totals[column()] ?? []).map((row) => ({ key: `${column()}=${spell(row.value)}`, column: column(), of: row.value, name: look(row.value).name, dot: look(row.value).colour, value: row.total, lost: lost.get(row.value) ?? 0, count: row.slots }))
    .sort((a, b) => Math.abs(b.value) - Math.abs(a.value));

export function sumRows(found, parts, { act, out = null } = {}) {
  const adds = found.signed && found.initial !== null && !found.where && (found.exact || found.caution === "approximate");
  const rows = parts.slice(0, MOST_ROWS).map((part) => {
    const kept = Math.abs(part.value - part.lost) < 1e-9 * Math.abs(part.value) ? 0 : part.value - part.lost;
    return { ...part, kept, title: `${part.name}: ${signed(part.value)}${part.count ? `, ${part.count.toLocaleString("en")} visits` : ""}${part.lost ? `; without what is left out ${signed(kept)}` : ""}${act ? ". Enter: its examples; x: leave it out" : ""}`, act: act && (() => act(part)), out: out && (() => out(part)) };
  });
  const others = parts.slice(MOST_ROWS);
  const add = (name, value, kept = value) => Math.abs(value) > 1e-6 * Math.abs(found.value ?? 1) && rows.push({ key: name, name, value, kept, title: `${name}: ${signed(value)}` });
  const sum = (list, key) => list.reduce((total, each) => total + each[key], 0);
  if (others.length) add(`${others.length} others`, sum(others, "value"), sum(others, "value") - sum(others, "lost"));
  if (!adds) return { rows, adds };
  const rest = found.value - found.initial - sum(parts, "value") - (found.rounding ?? 0);
  if (found.rounding) add("rounding", found.rounding);
  if (Math.abs(rest) > 5e-4 * Math.max(1, Math.abs(found.value))) add("stored approximately", rest);
  const total = found.value - sum(parts, "lost");
  rows.unshift({ key: "initial", name: "initial weights", absolute: true, value: found.initial, kept: found.initial, title: `From the initial weights: ${shown(found.initial)}` });
  rows.push({ key: "answer", name: sum(parts, "lost") ? "without these" : "logit", absolute: true, value: total, kept: total, title: `The logit: ${shown(found.value)}${sum(parts, "lost") ? `, without what is left out ${shown(total)}` : ""}` });
  return { rows, adds, total };
}

function leaveOut(part) {
  if (run.no_masks) return;
  if (part.column) toggleMasked(part.column, part.of);
  else change({ mask: state.mask === part.key ? "" : [run.saved ? "" : state.mask, part.key].filter(Boolean).join("; ") });
}

function drawSum() {
  if (!found || !$("waterfall").clientWidth) return;
  const all = parts();
  const { rows, adds, total } = sumRows(found, all, { act: (part) => change({ open: part.key }), out: leaveOut });
  const by = columns().length > 1 ? choose("by", "pick-per", column(), columns().map((name) => [name, name === "step" ? "time" : name]), (value) => change({ per: value, open: "" })) : null;
  const title = !found.signed ? `Total ${measure().title}${by ? "" : ` by ${column()}`}` : estimate() ? `Influence on ${targetName()}` : adds ? `Why ${targetName()}: the logit is a sum` : `What speaks for and against ${targetName()}`;
  $("sum").hidden = !rows.length; // such as a folded memory without a label: neither groups nor visits
  fill($("sum-title"), title, by, takeAway("waterfall", "spotlights-waterfall"));
  if (!rows.length) return;
  waterfall($("waterfall"), rows, { sum: adds, label: title, open: opened(all), whole: adds && left ? found.value : null, plain: !found.signed });
  const [pro, con] = [all.filter(({ value }) => value > 0), all.filter(({ value }) => value < 0)].map((side) => side.reduce((sum, { value }) => sum + value, 0));
  fill($("sum-note"), found.signed && !estimate() ? [h("b", { class: "for" }, signed(pro)), " speaks for it and ", h("b", { class: "against" }, signed(con)), ` against it; what is left is ${signed(pro + con)}. `] : null,
    adds && left ? [h("b", { class: "caution-text" }, `Without what is left out: ${shown(total)}`), ", the dashed line is the answer with everything. "] : "Click a bar to see its examples.");
}

const opened = (all) => (all.some(({ key }) => key === state.open) ? state.open : all.reduce((best, part) => (Math.abs(part.value) > Math.abs(best?.value ?? 0) ? part : best), null)?.key ?? "");

// -- the examples of a group ------------------------------------------------------------------

export async function showGroup() {
  if (!found || state.view) return;
  const all = parts();
  const key = opened(all);
  const [terms, ...others] = parseSelections(state.where);
  const where = [key, others.length || (terms && Object.keys(terms).some((name) => key.startsWith(`${name}=`))) ? "" : state.where].filter(Boolean).join(" ");
  await attempt($("group-body"), async () => {
    group = { part: all.find((part) => part.key === key), found: await ask("layer", asked({ where, top: TILES, by: run.examples ? "example" : "slot" }), "group") };
    drawSum();
    drawGroup();
  }, showGroup);
}

function drawGroup() {
  if (!group || state.view) return;
  const { part, found: answered } = group;
  const { shares } = answered;
  const number = answered.signed ? signed : shown;
  const sideName = (sign) => (answered.signed ? ` that speak ${sign > 0 ? "for" : "against"} it` : "");
  const rows = [...answered.top.filter(({ value }) => value > 0), ...(answered.bottom ?? []).filter(({ value }) => value < 0)].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, answered.top[0]?.shown?.kind === "image" ? TILES : TOLD_TILES);
  const sum = (sign) => rows.filter(({ value }) => sign * value > 0).reduce((total, { value }) => total + value, 0);
  const tiles = rows.map((row) => ({ value: row.value, example: row.example, image: row.shown?.image, smooth: row.shown?.smooth, text: (row.shown?.kind === "text" && row.shown.text) || `example ${row.example ?? row.slot}`, masked: row.example !== undefined && isMasked("example", row.example),
    title: `training example ${row.example ?? row.slot}: ${number(row.value)}${row.label === undefined ? "" : `, label ${look(row.label, "label").name}`}`, act: run.training_queries && row.example !== undefined ? () => ask_about(`train:${row.example}`) : () => leaveOutExample(row), enter: (event) => peek(row.example, event), leave: () => peek(null) }));
  if (shares) for (const [sign, whole, count] of [[1, shares.for], [-1, shares.against]]) {
    const rest = whole - sum(sign);
    if (sign * rest > 1e-6 * Math.abs(whole)) tiles.push({ value: rest, rest: `all others${answered.signed ? (sign > 0 ? " for" : " against") : ""}`, title: `All other examples of this group${sideName(sign)}: ${number(rest)}` });
  }
  const side = shares && (shares.for >= -shares.against ? shares.for : shares.against);
  const seen = shares && sum(Math.sign(side || 1)) / (side || 1);
  const name = part ? (part.column ? `${part.column} ${part.name}` : `steps ${part.name}`) : "everything";
  const mask = run.no_masks || !part ? null : h("button", { id: "mask-group", onclick: () => leaveOut(part) }, part.column && isMasked(part.column, part.of) ? "put back" : "leave out");
  fill($("group-title"), h("span", {}, `${name}: ${answered.signed ? signed(answered.total) : shown(answered.total)}`), mask, takeAway("group-body", "spotlights-mosaic"));
  const place = h("div", { class: "chart", id: "mosaic" });
  const curve = h("div", { class: "chart", id: "cumulative" });
  fill($("group-body"), place, shares && shares.side ? h("p", { class: "quiet", id: "half" }, h("b", {}, shares.half.toLocaleString("en")), ` of its ${shares.side.toLocaleString("en")} examples${sideName(side)} make half of ${number(side)}. The tiles are the ${rows.length} largest${seen > 0 && seen < 1.01 ? `, ${percent(seen)} of it` : ""}: as large as what each adds.`) : null, curve);
  if (!tiles.length) return fill(place, h("p", { class: "empty" }, "Nothing here."));
  mosaic(place, tiles, { number, plain: !answered.signed, label: `Examples of ${name}`, height: Math.max(240, Math.min(480, 0.5 * place.clientWidth)), ink: ink() && !matchMedia("(prefers-color-scheme: dark)").matches });
  if (shares && shares.side > 1) cumulative(curve, shares);
}

const leaveOutExample = (row) => !run.no_masks && !run.saved && row.example !== undefined && toggleMasked("example", row.example);

// -- who speaks for and against ---------------------------------------------------------------

function cards() {
  const top = found.signed ? found.top.filter(({ value }) => value > 0) : found.top;
  const bottom = found.signed ? (found.bottom ?? []).filter(({ value }) => value < 0) : [];
  const button = run.saved ? null : h("button", { class: "more", onclick: () => { more = !more; showLayer(); } }, more ? "fewer" : "more");
  const share = (rows, whole) => found.shares && rows.length && found.signed ? h("span", { class: "quiet" }, ` these ${rows.length} add ${signed(rows.reduce((sum, { value }) => sum + value, 0))}, ${percent(rows.reduce((sum, { value }) => sum + value, 0) / (whole || 1))} of ${signed(whole)}`) : null;
  const what = found.by === "slot" ? "visits" : "examples";
  const titles = estimate() ? ["Without these it would be lower", "Without these, higher"] : [`${what[0].toUpperCase()}${what.slice(1)} that speak most for ${targetName()}`, "… and most against"];
  fill($("examples"), found.signed
    ? h("div", { class: "sides" }, rowsOf([titles[0], share(top, found.shares?.for), h("span", { class: "links" }, button)], top, "for", found, measure().title), rowsOf([titles[1], share(bottom, found.shares?.against)], bottom, "against", found, measure().title))
    : rowsOf([`The most similar ${what}, by ${measure().title}`, h("span", { class: "links" }, button)], top, "", found, measure().title),
  Object.keys(shades?.examples ?? {}).length ? h("p", { class: "quiet", id: "shaded" }, "Each token is shaded by what it adds: ", h("span", { class: "shaded pro", style: { "--share": "1" } }, "for"), " or ", h("span", { class: "shaded con", style: { "--share": "1" } }, "against"), `, at most ${shown(mostOf(Object.values(shades.examples)))}.`) : null);
}

/** A row of training examples, as pictures, texts, or rows of one table under the query's. */
export function rowsOf(title, rows, tone, { signed: hasSign }, what, own = answer?.shown) {
  const number = (row) => (hasSign ? signed(row.value) : shown(row.value));
  const kind = rows[0]?.shown?.kind;
  const use = (row) => () => run.training_queries && row.example !== undefined && ask_about(`train:${row.example}`);
  const facts = (row) => Object.entries(row).filter(([key, value]) => !["shown", "value", "rank"].includes(key) && value !== null).map(([key, value]) => `${key} ${key === "label" ? look(value, "label").name : value}`);
  const out = (row) => row.example !== undefined && !run.no_masks && !run.saved ? h("button", { class: "out", title: "Leave this example out", "aria-label": `Leave out example ${row.example}`, onclick: () => toggleMasked("example", row.example) }, "✕") : null;
  const known = Object.values(shades?.examples ?? {});
  const most = known.length ? mostOf(known) : 0;
  const long = rows.some((row) => row.label !== undefined && look(row.label, "label").name.length > 4);
  const card = (row) => h("div", { class: `card ${row.example !== undefined && isMasked("example", row.example) ? "masked" : ""}`, "data-example": row.example ?? "", "data-slot": row.slot ?? "" },
    h("button", { class: "thumb", title: `${facts(row).join(", ")}\n${what} ${number(row)}${run.training_queries ? "\nclick: make it the query" : ""}`, onclick: use(row), onpointerenter: () => lightVisits(row.example), onpointerleave: () => lightVisits(null), onfocus: () => lightVisits(row.example), onblur: () => lightVisits(null) },
      shades?.examples?.[row.example] ? shadedText(shades.examples[row.example], most, number)
        : kind === "text" && answer.shown.kind === "text" && !answer.tokens ? shared(row.shown.text, answer.shown.text) : row.shown ? datum(row.shown, { ink: ink(), name: facts(row).join(", ") }) : h("span", { class: "quiet" }, facts(row).join(", ")),
      h("span", { class: "tag number" }, row.label === undefined || row.label === null ? null : h("b", { title: look(row.label, "label").name }, look(row.label, "label").name), h("span", { class: tone }, number(row)))), out(row));
  return h("div", {}, title ? h("h3", { class: tone }, title) : null, !rows.length ? h("p", { class: "empty" }, "Nothing here.")
    : kind === "table" ? table(rows, { own, label: `Training examples ${tone}`.trim(), mark: (row) => ({ class: "card", "data-example": row.example ?? "" }), facts: tableFacts(rows, what, number, (row) => tone || (!hasSign ? "" : row.value < 0 ? "against" : "for"), out) }) : h("div", { class: `cards ${kind === "image" ? "" : "text"} ${long && kind === "image" ? "named" : ""}` }, rows.map(card)));
}

/** What stands before an example's own columns: who it is, its label, its value, and the button that leaves it out. */
const tableFacts = (rows, what, number, tone, out) => [
  ["example", (row) => row.example ?? row.slot],
  ...(rows.some(({ label }) => label !== undefined && label !== null) ? [["label", (row) => look(row.label, "label").name]] : []),
  [what, (row) => h("b", { class: tone(row) }, number(row))],
  ...(run.no_masks || run.saved ? [] : [["", out]]),
];

// -- when in training -------------------------------------------------------------------------

/** The stretch of steps that is looked at, if nothing else is asked for. */
export function range() {
  const [terms, ...others] = parseSelections(state.where);
  const [step] = others.length || !terms || Object.keys(terms).join() !== "step" ? [] : terms.step;
  return step?.match(/^\d+-\d+$/) ? step.split("-").map(Number) : null;
}

let visits = [];

function drawTime() {
  if (!times || !found || !$("time").clientWidth) return;
  const out = state.where && !run.no_masks && !run.saved ? h("button", { onclick: () => change({ mask: [state.mask, state.where].filter(Boolean).join("; "), where: "" }) }, range() ? "leave these steps out" : "leave these out") : null;
  fill($("time-title"), "When in training?", h("span", { class: "quiet" }, `by stretches of steps${estimate() ? " (estimate)" : ""}${run.saved ? "" : "; drag to choose one"}`), out, takeAway("time", "spotlights-time"));
  const width = times.steps / times.totals.length;
  const points = times.totals.flatMap((value, at) => [[times.starts[at], value], [times.starts[at] + width, value]]);
  overSteps($("time"), { steps: times.steps, low: Math.min(0, ...times.totals), high: Math.max(0, ...times.totals), height: 190, label: "What was added over training time", range: range(),
    brushed: run.saved ? null : (stretch) => change({ where: stretch ? `step=${snapped(stretch[0])}-${snapped(stretch[1])}` : "" }),
    draw: (x, y) => [line(points, x, y, { fill: `${colour("accent")}44`, stroke: colour("accent"), base: [[0, 0], [times.steps, 0]] }), visits.map((step) => line([[step, y.low ?? Math.min(0, ...times.totals)], [step, Math.max(0, ...times.totals)]], x, y, { stroke: colour("lamp") }))] });
}

/** The nearest edge that masks know too, so that a stretch can be left out at once. */
function snapped(step) {
  if (!run.edges.length) return Math.max(0, Math.min(run.steps, Math.round(step)));
  return run.edges.reduce((best, edge) => (Math.abs(edge - step) < Math.abs(best - step) ? edge : best));
}

// -- one training example ---------------------------------------------------------------------

let looked = null;

/** What is known of a training example, asked once. */
export async function factsOf(example) {
  if (!examples.has(example)) examples.set(example, await ask(`examples/${example}`).catch(() => null));
  return examples.get(example);
}

async function lightVisits(example) {
  looked = example ?? null;
  const facts = looked === null ? null : await factsOf(example);
  if (looked !== (example ?? null)) return; // the pointer has gone on meanwhile
  visits = facts?.steps ?? [];
  drawTime();
}

/** How an example looks, beside the pointer. */
export async function peek(example, event) {
  lightVisits(example);
  $("peek").hidden = true;
  if (example === null || example === undefined) return;
  const box = event.target.getBoundingClientRect();
  const [x, y] = event.clientX === undefined ? [box.right, box.top] : [event.clientX, event.clientY];
  const facts = await factsOf(example);
  if (looked !== example || !facts) return;
  fill($("peek"), datum(facts.shown, { ink: ink(), name: `training example ${example}` }), Object.entries(facts.columns).map(([key, value]) => h("div", {}, `${key} ${key === "label" ? look(value, "label").name : value}`)), h("div", { class: "quiet" }, `training example ${example}, ${facts.steps.length} visits`));
  $("peek").hidden = false;
  $("peek").style.left = `${Math.max(8, Math.min(x + 16, innerWidth - $("peek").offsetWidth - 8))}px`;
  $("peek").style.top = `${Math.max(8, Math.min(y - 60, innerHeight - $("peek").offsetHeight - 8))}px`;
}

