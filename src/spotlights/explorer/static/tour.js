// A tour of three steps, for whoever opens the page for the first time.

import { $, fill, h } from "./dom.js";
import { run } from "./state.js";

const STEPS = [
  ["sum", "An answer is a sum", "The waterfall begins with what the untrained network would say, adds what each group of training examples added, and ends at the network's logit. Teal speaks for the answer, orange against it."],
  ["group", "Open a bar", "Click a bar: these are its training examples, each as large as what it added. The curve below says how many of them make half of it."],
  ["leave", "Leave some of it out", "Click a label here, or press x on a bar: the waterfall moves to the answer without these examples. The tabs above show the history of the answer, a map of all examples, and labels that look wrong."],
];
const SEEN = "spotlights-toured";

export function setUpTour() {
  let toured = true;
  try { toured = Boolean(localStorage.getItem(SEEN)) || navigator.webdriver; } catch { /* a browser that keeps nothing: no tour */ }
  if (!toured && run.slots && !run.no_masks) tour(0);
}

export function tour(at) {
  for (const each of document.querySelectorAll(".toured")) each.classList.remove("toured");
  const end = () => { tour(STEPS.length); };
  $("tour").hidden = at >= STEPS.length;
  if (at >= STEPS.length) {
    try { localStorage.setItem(SEEN, "yes"); } catch { /* then it comes again */ }
    return;
  }
  const [place, title, text] = STEPS[at];
  $(place).classList.add("toured");
  if (at) $(place).scrollIntoView({ block: "center", behavior: "smooth" });
  fill($("tour"), h("b", {}, `${at + 1} of ${STEPS.length}: ${title}`), h("p", {}, text), h("div", { class: "chips" }, h("button", { id: "tour-next", onclick: () => tour(at + 1) }, at + 1 < STEPS.length ? "Next" : "Done"), at + 1 < STEPS.length ? h("button", { onclick: end }, "Skip") : null));
}
