// The page: starts everything, follows the address, the keys, and a memory that is still being recorded.

import { controls, layer, measure, setUpAnswer, showGroup, showLayer, showMasked, showQuery, theAnswer } from "./answer.js";
import { ask, given, offline } from "./api.js";
import { decide, moveOn, setUpAudit, showAudit } from "./audit.js";
import { markCurrent, random, setUpChoosing, step } from "./choose.js";
import { drawCompare, showCompare } from "./compare.js";
import { $, explain, fill, h, problem } from "./dom.js";
import { drawHistory, showHistory } from "./history.js";
import { drawMap, showMap } from "./map.js";
import { showComparison, showMaskControls, sliding } from "./mask.js";
import { begin, change, follow, onChange, readAddress, run, state } from "./state.js";
import { download, responsive } from "./svg.js";
import { setUpTour } from "./tour.js";

/** The views: name, title, what it shows, the functions that show it and draw it again. The first one is the answer itself. */
const VIEWS = [
  ["", "Answer", "What the answer is made of"],
  ["history", "History", "How the answer came about in training", showHistory, drawHistory],
  ["map", "Map", "Every training example as a point, lit by the input", showMap, drawMap],
  ["audit", "Audit", "Training examples whose labels may be wrong", showAudit],
  ["compare", "Compare", "The same input in another memory", showCompare, drawCompare],
];

async function start() {
  try {
    begin(await ask("run"));
  } catch (error) {
    return fill($("look"), problem(error, () => location.reload()));
  }
  readAddress(); // as it is now: it may have changed while the server answered
  document.title = `Spotlights: ${run.title}`;
  fill($("title"), run.title, run.observed ? " · observed after training" : ` · ${run.steps.toLocaleString("en")} steps of ${run.optimizer}`);
  if (!run.slots) {
    fill($("look"), h("p", { class: "empty" }, "This memory has no slots yet. They come with its first segment."));
    return follow_recording();
  }
  views();
  setUpAnswer();
  setUpAudit();
  showMaskControls();
  responsive($("view"), () => VIEWS.find(([view]) => view === state.view)?.[4]?.());
  onChange(changed);
  follow();
  if (given && !location.hash) Object.assign(state, given.state);
  $("choose").hidden = Boolean(offline); // a saved page has no other input to choose
  if (!offline) setUpChoosing();
  if (state.q) changed(["q"]);
  setUpTour();
  follow_recording();
}

function views() {
  const there = VIEWS.filter(([view]) => !view || (offline ? offline.views.includes(view) : view === "audit" ? run.audit : view === "compare" ? run.other : view === "history" ? run.history : view === "map" ? run.map : true));
  fill($("views"), there.map(([view, name, title]) => h("button", { "data-view": view, title, onclick: () => change({ view }) }, name)));
  $("views").hidden = there.length < 2;
}

let turn = 0;

/** Draws what a change of the state touches; then says that the page shows what its address names. */
async function changed(keys) {
  const mine = ++turn;
  if ((await draw(keys)) !== false && mine === turn) document.body.dataset.shown = location.hash;
}

async function draw(keys) {
  const some = (...wanted) => keys.some((key) => wanted.includes(key));
  markCurrent();
  if (![...$("views").children].some((each) => each.dataset.view === state.view)) state.view = ""; // of a bad link, or of another memory
  document.body.dataset.view = state.view;
  for (const each of $("views").children) each.setAttribute("aria-current", each.dataset.view === state.view ? "page" : "false");
  $("answer").hidden = Boolean(state.view);
  $("view").hidden = !state.view;
  $("leave").hidden = Boolean(state.view);
  if (some("mask", "in", "q", "at") && !sliding()) showMaskControls();
  if (some("q", "at") && !(await showQuery())) return false;
  if (some("q", "at")) showMaskControls();
  if (some("q", "at", "mask", "in")) showComparison();
  const show = VIEWS.find(([view]) => view === state.view)?.[3];
  if (show) {
    controls();
    return show(keys);
  }
  if (some("q", "at", "layer", "measure", "target", "by", "where", "view")) return showLayer();
  if (some("mask", "in", "per")) await showMasked();
  if (some("open", "per", "mask", "in")) await showGroup();
}

// -- what goes on in the background -----------------------------------------------------------

async function follow_recording() {
  const now = await ask("status").catch(() => null);
  if (now) {
    badges(now);
    notice(now);
  }
  const waiting = !now || now.recording || (!now.outdated && now.masks !== null && (now.masks < 1 || !now.verified));
  if (waiting) setTimeout(follow_recording, 1500);
}

const SINGLE_BADGES = 4;
const off = ({ relative_error }) => relative_error.toExponential(1);

function badges({ masks, verified, recording, outdated }) {
  if (recording || outdated) {
    fill($("badges"), explain(h("span", { class: "badge wait" }, recording ? "verified when it is done" : "not verified: show the newest"), `The network that you see is what the memory ${recording ? "adds up to so far" : "added up to when it was opened"}. Whether that is the trained network can be told once recording has ended${recording ? "." : ", as it has by now."}`));
  } else if (verified) {
    const all = Object.entries(verified);
    const wrong = all.filter(([, { ok }]) => !ok);
    const said = (name, check) => `${name}: ${check.ok ? "the recorded training adds up to the trained weights" : "the recorded training does not add up to the network"}. Relative difference ${off(check)}, compared with ${check.compared_with}; up to ${check.tolerance.toExponential(0)} is rounding.`;
    const one = ([name, check]) => explain(h("span", { class: `badge ${check.ok ? "yes" : "no"}` }, `${check.ok ? "✓" : "✗"} ${name}${check.ok ? "" : ` off by ${off(check)}`}`), said(name, check));
    const together = () => explain(h("span", { class: "badge yes" }, `✓ ${wrong.length ? "the other" : "all"} ${all.length - wrong.length} layers`),
      `The recorded training adds up to the trained weights, up to rounding:\n${all.filter(([, { ok }]) => ok).map(([name, check]) => `${name} ${off(check)}`).join("\n")}`);
    const shown = all.length <= SINGLE_BADGES ? all.map(one) : [...wrong.slice(0, SINGLE_BADGES).map(one), wrong.length < all.length ? together() : null];
    fill($("badges"), explain(h("span", { class: "quiet" }, wrong.length ? "memory ≠ network" : "memory = network"), "Whether the sum of everything that was recorded is the trained network, layer by layer. Only then are contributions and masks what they claim to be."), shown);
  } else if (masks !== null) {
    fill($("badges"), explain(h("span", { class: "badge wait" }, `verifying … ${Math.round(100 * masks)} %`), "Adding up every slot, to compare the sum with the trained network."));
  } else {
    fill($("badges"), explain(h("span", { class: "badge wait" }, run.measures.some(({ signed }) => signed) ? "estimates" : "scores only"), run.no_masks));
  }
}

function notice({ recording, outdated, steps, steps_now }) {
  $("notice").hidden = !recording && !outdated;
  fill($("notice"), h("span", {}, recording ? "Still being recorded. " : "The recording has ended. ", `You see the network as of step ${steps.toLocaleString("en")}; `,
    steps_now > steps ? `${steps_now.toLocaleString("en")} steps are there now.` : recording ? "no newer steps yet." : "that was the last one."),
    outdated ? h("button", { id: "newest", onclick: newest }, "Show the newest") : "");
}

async function newest(event) {
  event.currentTarget.disabled = true;
  await ask("refresh", {}, null, null, "POST");
  location.reload();
}

// -- keys and dialogs -------------------------------------------------------------------------

const cycle = (values, now, by = 1) => values[(values.indexOf(now) + by + values.length) % values.length];

const KEYS = {
  ArrowRight: ["next input, or next suspect", () => (state.view === "audit" ? moveOn(1) : step(1))],
  ArrowLeft: ["previous input, or suspect", () => (state.view === "audit" ? moveOn(-1) : step(-1))],
  r: ["random input", random],
  v: ["next view", () => change({ view: cycle([...$("views").children].map((each) => each.dataset.view), state.view) })],
  l: ["next layer", () => change({ layer: cycle(run.layers.map(({ name }) => name), layer()), open: "" })],
  m: ["next measure", () => change({ measure: cycle(run.measures.map(({ name }) => name), measure().name), open: "" })],
  e: ["add up examples, or visits", () => change({ by: (state.by || "example") === "example" ? "slot" : "example" })],
  c: ["leave nothing out", () => change({ mask: "", in: "" })],
  k: ["audit: keep", () => decide("keep")],
  b: ["audit: relabel", () => decide("relabel")],
  d: ["audit: drop", () => decide("drop")],
  "/": ["find an input by its id", () => $("search")?.focus()],
  "?": ["this page", () => guide()],
};

addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input:not([type=range]), textarea, select") || event.ctrlKey || event.metaKey || event.altKey || (event.target.type === "range" && event.key.startsWith("Arrow"));
  if (typing || $("guide").open || !run?.slots || offline || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key][1]();
});

function guide() {
  fill($("guide"),
    h("button", { class: "close", onclick: () => $("guide").close(), autofocus: true, "aria-label": "Close" }, "✕"),
    h("h2", {}, "Which training examples is an answer made of?"),
    h("p", {}, "A linear layer trained by gradient descent is its initial weights plus one small update for every training example at every step. So its answer to any input is a sum over everything the layer was trained on. This page takes that sum apart."),
    h("ul", {},
      h("li", {}, h("b", {}, "Answer. "), "The waterfall leads from the initial weights to the logit. Click a bar to see its examples, each tile as large as its contribution. “And not” asks why one output and not another."),
      h("li", {}, h("b", {}, "Contribution"), " is what a training example adds to an output: for it (+) or against it (−). In the last layer contributions are exact. In hidden layers they are first order, and marked so. ", h("b", {}, "Score"), " says how similar a layer finds two inputs. ", h("b", {}, "Influence"), " estimates another thing: the output had the network been trained without the example."),
      h("li", {}, h("b", {}, "Leave some of it out. "), "The same sum without some labels, steps or examples. ", h("b", {}, "A mask is not retraining"), ": what came after stays as it was, though it would have gone another way."),
      h("li", {}, h("b", {}, "History. "), "The output after every step of training, through all layers: who taught it, and who erased it."),
      h("li", {}, h("b", {}, "Map. "), "One point for each training example; the input is the lamp."),
      h("li", {}, h("b", {}, "Audit. "), "Training examples that the network kept disagreeing with. Keep, relabel or drop each, and export your decisions.")),
    h("p", {}, "The badges on top say whether the recorded sum equals the trained network, layer by layer."),
    h("div", { class: "keys" }, Object.entries(KEYS).map(([key, [what]]) => h("span", {}, h("kbd", {}, { ArrowRight: "→", ArrowLeft: "←" }[key] ?? key), ` ${what}`))),
    h("p", { class: "quiet" }, `Spotlights ${run.version}. After Irie, Csordás, Schmidhuber: The Dual Form of Neural Networks Revisited, ICML 2022.`));
  $("guide").showModal();
}

$("help").addEventListener("click", guide);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address holds the state of the page, not a place in it
  $("look").focus();
});
$("share").addEventListener("click", async () => {
  await navigator.clipboard?.writeText(location.href).catch(() => null);
  $("share").textContent = "Copied";
  setTimeout(() => { $("share").textContent = "Copy link"; }, 1500);
});
$("save").hidden = $("share").hidden = Boolean(given);
$("save").addEventListener("click", async () => {
  if (!theAnswer()) return;
  const kept = Object.entries({ ...state, layer: layer() }).filter(([key, value]) => value && ["q", "at", "view", "layer", "measure", "target", "per"].includes(key));
  for (;;) {
    $("save").textContent = "Saving …";
    const answer = await fetch(`api/page?${new URLSearchParams(kept)}`);
    if (answer.status === 202) { await new Promise((wake) => setTimeout(wake, 700)); continue; }
    $("save").textContent = answer.ok ? "Saved" : "Not saved";
    setTimeout(() => { $("save").textContent = "Save page"; }, 1500);
    if (answer.ok) download(await answer.blob(), `spotlights-${state.q.replace(/\W+/g, "-").slice(0, 40)}.html`);
    return;
  }
});
start();
