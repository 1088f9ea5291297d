// Two memories and one input: two sums side by side, and the examples that only one of them puts forward.

import { asked, controls, rowsOf, sumParts, sumRows, theAnswer } from "./answer.js";
import { ask } from "./api.js";
import { waterfall } from "./charts.js";
import { $, attempt, fill, h, percent, shown, visible } from "./dom.js";
import { looking, run, state } from "./state.js";
import { takeAway } from "./svg.js";

let pair = null;

export async function showCompare() {
  const place = h("div", { class: "panel wide" }, h("p", { class: "quiet" }, "Asking both memories …"));
  fill($("view"), place);
  await attempt(place, async () => {
    const one = theAnswer();
    const wanted = asked({ top: 24, target: state.target || String(one.said), where: "" });
    const [other, first, second, two] = await Promise.all([ask("other/run"), ask("layer", wanted, "one"), ask("other/layer", wanted, "two"), ask("other/query", { q: state.q, at: state.at })]);
    if (!looking("compare")) return;
    pair = [{ title: run.title, found: first, answer: one }, { title: other.title, found: second, answer: two }];
    controls();
    drawCompare();
  }, showCompare);
}

export function drawCompare() {
  if (!pair) return;
  const share = (answer) => answer.outputs.find(({ number }) => number === answer.said)?.share;
  const side = ({ title, found, answer }, number) => h("section", { class: "panel" }, h("h2", {}, title, h("span", { class: "quiet" }, "says ", h("b", {}, visible(answer.said_name)), share(answer) === null ? "" : ` (${percent(share(answer))})`), takeAway(`twin-${number}`, `spotlights-twin-${number + 1}`)), h("div", { class: "chart", id: `twin-${number}` }));
  const key = (found, which) => new Set((found[which] ?? []).filter(({ value }) => (which === "top" ? value > 0 || !found.signed : value < 0)).map(({ example }) => example));
  const only = (here, there, which) => here.found[which]?.filter(({ example }) => key(here.found, which).has(example) && !key(there.found, which).has(example)).slice(0, 10) ?? [];
  const both = [...key(pair[0].found, "top")].filter((example) => key(pair[1].found, "top").has(example)).length;
  fill($("view"), pair.map(side), h("section", { class: "panel wide" }, h("h2", {}, `Of the 24 examples that speak most for it, ${both} are the same in both`),
    h("div", { class: "sides" }, pair.map((each, number) => h("div", {}, rowsOf(`Only in ${each.title}`, only(each, pair[1 - number], "top"), "for", each.found, "contribution"), each.found.signed ? rowsOf(`Only in ${each.title}, against`, only(each, pair[1 - number], "bottom"), "against", each.found, "contribution") : null)))));
  const order = sumParts(pair[0].found).map(({ key: name }) => name);
  const sums = pair.map(({ found }) => sumRows(found, sumParts(found).sort((a, b) => order.indexOf(a.key) - order.indexOf(b.key))));
  sums.forEach(({ rows, adds }, number) => waterfall($(`twin-${number}`), rows, { sum: adds, plain: !pair[0].found.signed, beside: sums[1 - number].rows, label: `The sum in ${pair[number].title}: ${shown(pair[number].found.value)}` }));
}
