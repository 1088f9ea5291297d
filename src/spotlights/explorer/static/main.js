// The page: starts everything, follows the address, the keys, and a memory that is still being recorded.

import { ask } from "./api.js";
import { setUpAudit, showAudit } from "./audit.js";
import { markCurrent, random, setUpChoosing, step } from "./choose.js";
import { $, explain, fill, h, problem } from "./dom.js";
import { layer, measure, setUpLooking, showLayer, showMasked, showQuery } from "./look.js";
import { setUpMasking, showComparison, showMaskControls, sliding } from "./mask.js";
import { setUpPlots } from "./plots.js";
import { change, follow, onChange, readAddress, state } from "./state.js";

let run;

async function start() {
  readAddress();
  try {
    run = await ask("run");
  } catch (error) {
    return fill($("look"), problem(error, () => location.reload()));
  }
  for (const [name, value] of Object.entries(run.colours)) if (typeof value === "string") document.documentElement.style.setProperty(`--${name}`, value);
  document.title = `Spotlights: ${run.title}`;
  fill($("title"), run.title, ` · ${run.slots.toLocaleString("en")} slots · ${run.steps.toLocaleString("en")} steps · ${run.optimizer}`);
  explain($("title"), `${run.slots.toLocaleString("en")} training slots: one for each ${run.visits ? "visit of a training example (or of a token, or of a position in an image)" : "training example (or token of a text), its visits added up"}, from ${run.steps.toLocaleString("en")} steps with ${run.optimizer}.`);
  if (!run.slots) {
    fill($("look"), h("p", { class: "empty" }, "This memory has no slots yet. They come with its first segment."));
    return follow_recording();
  }
  setUpPlots(run.colours);
  setUpLooking(run);
  setUpAudit(run);
  setUpMasking(run);
  onChange(changed);
  follow();
  setUpChoosing(run);
  if (state.q) changed(["q"]);
  follow_recording();
}

function changed(keys) {
  const some = (...wanted) => keys.some((key) => wanted.includes(key));
  if (some("q", "at")) showQuery();
  else if (some("layer", "measure", "target", "by", "per", "where", "view")) showLayer();
  if (some("q", "view")) showAudit();
  if (some("mask", "in")) {
    if (!sliding()) showMaskControls();
    showMasked();
  }
  if (some("q", "at", "mask", "in")) showComparison();
  markCurrent();
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
    fill($("badges"), explain(h("span", { class: "badge wait" }, "scores only"), run.no_masks));
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
  ArrowRight: ["next input", () => step(1)],
  ArrowLeft: ["previous input", () => step(-1)],
  r: ["random input", random],
  l: ["next layer", () => change({ layer: cycle(run.layers.map(({ name }) => name), layer()) })],
  a: ["audit: labels that look wrong", () => change({ view: state.view ? "" : "audit" })],
  m: ["next measure", () => change({ measure: cycle(run.measures.map(({ name }) => name), measure().name) })],
  e: ["examples or slots", () => change({ by: (state.by || "example") === "example" ? "slot" : "example" })],
  x: ["mask nothing", () => change({ mask: "", in: "" })],
  "/": ["find an input by its id", () => $("search")?.focus()],
  "?": ["this page", () => guide()],
};

addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey;
  if (typing || $("guide").open || !run?.slots || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key][1]();
});

function guide() {
  fill($("guide"),
    h("button", { class: "close", onclick: () => $("guide").close(), autofocus: true, "aria-label": "Close" }, "✕"),
    h("h2", {}, "Which training examples is an answer made of?"),
    h("p", {}, "A linear layer trained by gradient descent is nothing but its initial weights plus one small update for every training example at every step. So its answer to any input is a sum over everything it was trained on, and that sum can be taken apart."),
    h("ol", {},
      h("li", {}, h("b", {}, "Choose an input. "), "The network answers it."),
      h("li", {}, h("b", {}, "See the spotlights. "), "A ", h("b", {}, "slot"), " is one visit of a training example. Its ", h("b", {}, "score"), " says how similar the layer finds it to the input; its ", h("b", {}, "contribution"), " what it adds to an output: for it (+) or against it (−). In the last layer contributions are exact: they add up to the output. In hidden layers they are first order, and marked so. ", h("b", {}, "Influence"), " estimates another thing: what the output would be had the network been trained without the example."),
      h("li", {}, h("b", {}, "Leave some out. "), "The same sum without some classes, steps or examples is the network that never added them to its weights. ", h("b", {}, "A mask is not retraining"), ": what came after them stays as it was, though it would have gone another way. ", h("b", {}, "Influence"), " estimates that."),
      h("li", {}, h("b", {}, "Audit. "), "Training examples that the network kept disagreeing with: their labels may be wrong. Look at them, and leave them out with a click.")),
    h("p", {}, "The badges on top say whether the recorded sum really equals the trained network, layer by layer."),
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
if (document.readyState === "complete" || window.Plotly) start();
else addEventListener("DOMContentLoaded", start);
