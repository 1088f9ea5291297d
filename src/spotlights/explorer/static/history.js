// The history of an answer: the number after every step of training, who made it, and who erased it.

import { column, controls, look, rowsOf, theAnswer } from "./answer.js";
import { ask } from "./api.js";
import { line, overSteps } from "./charts.js";
import { $, attempt, choose, fill, h, percent, shown, signed, visible, waits } from "./dom.js";
import { change, looking, run, state } from "./state.js";
import { colour, s, takeAway, text } from "./svg.js";

const [WINDOW, TICK, SAID] = [40, 90, 208];
let found = null;
let playing = null;
let marks = [];

const asked = (more = {}) => ({ q: state.q, at: state.at, target: state.target, per: column() === "step" ? "" : column(), ...more });
const groups = () => Object.keys(run.groups).filter((name) => run.groups[name].length > 1);

export async function showHistory(keys) {
  if (found && !keys.some((key) => ["q", "at", "target", "per", "view"].includes(key))) return keys.includes("step") && moved();
  stop();
  found = null;
  const place = h("div", { class: "panel wide" });
  fill($("view"), place);
  await attempt(place, async () => {
    found = await ask("history", asked(), "history", waits(place, "Going back over all of training, once for this answer: about as long as the training took."));
    if (!looking("history")) return;
    controls();
    lay();
    drawHistory();
    moved();
  }, () => showHistory(["view"]));
}

const now = () => Math.max(0, Math.min(found.steps, state.step === "" ? found.steps : Number(state.step) || 0));
const value = (step) => { const at = found.at.findIndex((each) => each >= step); if (at <= 0) return found.curve[Math.max(0, at)]; const [a, b] = [found.at[at - 1], found.at[at]]; return found.curve[at - 1] + ((found.curve[at] - found.curve[at - 1]) * (step - a)) / (b - a); };
const said = (step) => found.says.filter(({ since }) => since <= step).at(-1);
const numbers = (step) => step.toLocaleString("en");

function lay() {
  const name = found.versus === null ? `the logit for “${visible(found.name)}”` : `“${visible(found.name)}”`;
  const by = groups().length > 1 ? choose("by", "history-per", found.per, groups().map((each) => [each, each]), (per) => change({ per })) : null;
  fill($("view"),
    h("section", { class: "panel wide" }, h("h2", {}, `How ${name} came about`, found.exact ? null : h("span", { class: "caution", title: found.note ?? "" }, found.note ? "weights at some steps" : `off by ${percent(found.error)}`), takeAway("curve", "spotlights-history")),
      h("p", { class: "quiet", id: "became" }, became()),
      h("div", { id: "curve", class: "chart" }),
      h("div", { class: "player" }, h("button", { id: "play", onclick: play, "aria-label": "Play" }, "▶ Play"), h("input", { type: "range", class: "scrub", id: "scrub", min: 0, max: found.steps, value: now(), "aria-label": "Step of training", oninput: (event) => { stop(); change({ step: event.target.value }, { quietly: true }); } })),
      h("p", { id: "at-step", "aria-live": "polite" })),
    found.areas.length ? h("section", { class: "panel wide" }, h("h2", {}, `What each ${found.per} had added up to each step, through all layers`, by, takeAway("areas", "spotlights-areas")),
      h("div", { class: "key" }, found.groups.map((group, at) => h("span", {}, h("i", { style: { background: look(group, found.per).colour } }), `${look(group, found.per).name} ${signed(found.areas[at].at(-1))}`))),
      h("div", { id: "areas", class: "chart" })) : h("section", { class: "panel wide" }, h("p", { class: "quiet" }, found.note)),
    found.lost.length ? h("section", { class: "panel wide", id: "erased" }, h("h2", {}, "Who erased it?"), h("div", { class: "losses" }, found.lost.map(erased))) : null,
    found.areas.length && run.examples && !run.saved ? h("section", { class: "panel wide", id: "during" }) : null);
}

/** One loss of the answer: when, how much, and the examples that took most. */
function erased(loss) {
  const to = (step) => h("button", { class: "more", onclick: () => change({ step }) }, `step ${numbers(step)}`);
  const told = h("p", {}, "It fell since ", to(loss["falls since step"]), ` and was lost at `, to(loss["lost at step"]), `: ${shown(loss.from)} → ${shown(loss.to)}`, loss.says_name ? [". Then the network said ", h("b", {}, `“${visible(loss.says_name)}”`)] : null, loss.regained === null ? ", to the end." : `, until step ${numbers(loss.regained)}.`);
  return h("div", { class: "loss" }, told, loss.takers.length ? rowsOf("They took most of it", loss.takers, "against", { signed: true }, "history") : null);
}

/** When the answer became right, in a sentence. */
function became() {
  const truth = theAnswer()?.truth;
  const wanted = found.versus === null ? found.target : null;
  if (wanted === null || !found.says.length) return `It began at ${shown(found.curve[0])} and ended at ${shown(found.curve.at(-1))}.`;
  const name = visible(found.name);
  const last = found.says.at(-1);
  const times = found.says.filter(({ said: each }) => each === wanted);
  if (!times.length) return `The network never said “${name}”.`;
  const lost = times.length - (last.said === wanted ? 1 : 0);
  return [`The network first said “${name}” ${times[0].since ? `after step ${numbers(times[0].since)}` : "before training"}`, lost ? `, lost it ${lost === 1 ? "once" : `${lost} times`}` : "", last.said === wanted ? `, and for good since ${last.since ? `step ${numbers(last.since)}` : "the beginning"}.` : `, and ended with “${visible(last.name)}”.`, truth === null || truth === undefined ? "" : wanted === truth ? " That is the right answer." : ` The right answer is “${theAnswer().truth_name}”.`];
}

export function drawHistory() {
  if (!found || !$("curve")) return;
  const points = found.at.map((step, at) => [step, found.curve[at]]);
  const [low, high] = [Math.min(0, ...found.curve), Math.max(0, ...found.curve)];
  marks = [];
  const mark = (x, top, bottom) => { const each = s("line", { x1: x(now()), x2: x(now()), y1: top, y2: bottom, stroke: colour("lamp"), "stroke-width": 3, "pointer-events": "none" }); marks.push([each, x]); return each; };
  const told = (step) => `step ${numbers(Math.round(step))}: ${shown(value(step))}`;
  const to = (_, step) => { stop(); change({ step: Math.round(step) }, { quietly: true }); };
  overSteps($("curve"), { steps: found.steps, low, high, height: 250, foot: found.says.length ? 44 : 22, label: `The logit over training: ${shown(found.curve[0])} before, ${shown(found.curve.at(-1))} after`, brushed: to, hovered: (step) => { $("curve").title = step === null ? "" : told(step); },
    draw: (x, y) => [
      found.says.map(({ since, said: each, name }, at) => { const end = found.says[at + 1]?.since ?? found.steps; const right = each === (found.versus === null ? found.target : -1); return x(end) - x(since) < 0.5 ? null : s("rect", { x: x(since), width: x(end) - x(since), y: SAID, height: 18, fill: right ? colour("for") : colour("ghost"), "fill-opacity": right ? 0.28 : 0.22 }, s("title", {}, `said ${name} since step ${since}`)); }),
      found.says.map(({ since, name }, at) => { const end = found.says[at + 1]?.since ?? found.steps; return 7.5 * String(name).length + 8 > x(end) - x(since) ? null : text((x(end) + x(since)) / 2, SAID + 9.5, visible(name), { "text-anchor": "middle", "font-size": 12, "pointer-events": "none" }); }),
      line(points, x, y, { stroke: colour("ink") }), mark(x, 8, SAID + 18)] });
  if (!found.areas.length) return;
  const width = found.edges.length;
  const [up, down] = [Array(width).fill(0), Array(width).fill(0)];
  const order = found.groups.map((group, at) => ({ group, areas: found.areas[at] })).sort((a, b) => Math.abs(b.areas.at(-1)) - Math.abs(a.areas.at(-1)));
  const bands = order.flatMap(({ group, areas }) => [up, down].map((stack, sign) => {
    const base = [...stack];
    areas.forEach((each, at) => { if (sign ? each < 0 : each > 0) stack[at] += each; });
    return { group, base, top: [...stack] };
  }));
  overSteps($("areas"), { steps: found.steps, low: Math.min(0, ...down), high: Math.max(0, ...up), height: 300, label: `What each ${found.per} had added up to each step`, brushed: to,
    draw: (x, y) => [bands.map(({ group, base, top }) => line(top.map((each, at) => [found.edges[at], each]), x, y, { fill: look(group, found.per).colour, base: base.map((each, at) => [found.edges[at], each]), stroke: colour("paper"), width: 0.7 })), names(bands, x, y), line(points.map(([step, each]) => [step, each]), x, y, { stroke: colour("paper"), width: 4 }), line(points, x, y, { stroke: colour("ink"), width: 2 }), mark(x, 8, 278)] });
}

/** The names of the groups, in their bands where these are thick. */
function names(bands, x, y) {
  const at = Math.round(0.9 * (found.edges.length - 1));
  return bands.map(({ group, base, top }) => {
    const high = Math.abs(y(base[at]) - y(top[at]));
    return high < 17 ? null : text(x(found.steps) - 10, (y(base[at]) + y(top[at])) / 2, look(group, found.per).name, { "text-anchor": "end", "font-weight": 650, "font-size": 13, fill: "#fff", stroke: "#0009", "stroke-width": 3, "paint-order": "stroke", "pointer-events": "none" });
  });
}

// -- one step ---------------------------------------------------------------------------------

let waiting = null;

function moved() {
  if (!found || !$("at-step")) return;
  const step = now();
  if (document.activeElement !== $("scrub")) $("scrub").value = step;
  for (const [each, x] of marks) for (const end of ["x1", "x2"]) each.setAttribute(end, x(step));
  const then = said(step);
  fill($("at-step"), `After step ${numbers(step)} of ${numbers(found.steps)}: ${found.versus === null ? `the logit for “${visible(found.name)}”` : "the difference"} is `, h("b", { id: "number-at-step" }, shown(value(step))), then ? [", the network says ", h("b", {}, `“${visible(then.name)}”`)] : null, ".");
  clearTimeout(waiting);
  if ($("during") && !playing && !run.saved) waiting = setTimeout(() => examplesAround(step), 150);
}

async function examplesAround(step) {
  const half = Math.max(1, Math.round(found.steps / WINDOW));
  const [from, to] = [Math.max(0, Math.min(step, found.steps) - half), Math.min(found.steps, step + half)];
  const place = $("during");
  await attempt(place, async () => {
    const rows = await ask("history", asked({ per: "", during: `${from}-${to}`, top: 8 }), "during");
    const title = `steps ${numbers(from)} to ${numbers(to)}`;
    fill(place, h("h2", {}, `Who taught and who erased, in ${title}`), h("div", { class: "sides" }, rowsOf("They added most", rows.top.filter((row) => row.value > 0), "for", { signed: true }, "history"), rowsOf("They took most", rows.bottom.filter((row) => row.value < 0), "against", { signed: true }, "history")));
    document.body.dataset.during = String(step);
  });
}

function play() {
  if (playing) return stop();
  const by = Math.max(1, Math.round(found.steps / 120));
  if (now() >= found.steps) change({ step: 0 }, { quietly: true });
  playing = setInterval(() => {
    if (state.view !== "history" || !found || now() >= found.steps) return stop();
    change({ step: Math.min(found.steps, now() + by) }, { quietly: true });
  }, TICK);
  fill($("play"), "❚❚ Pause");
}

function stop() {
  clearInterval(playing);
  playing = null;
  if ($("play")) fill($("play"), "▶ Play");
  if (found && $("at-step") && state.view === "history") moved();
}
