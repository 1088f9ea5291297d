// Step 1: choose an input. Test inputs in a grid, a drawing, an uploaded image, or a prompt.

import { ask } from "./api.js";
import { $, attempt, datum, fill, h, percent } from "./dom.js";
import { drawingWay } from "./draw.js";
import { ask_about, change, ink, run, state } from "./state.js";

const PAGE = 40;
const EVERYTHING = { only: "all", label: "", source: "", order: "given", seed: 0, first: 0 };
const filters = { ...EVERYTHING };
let listed = [];

export function setUpChoosing() {
  const ways = [["Test inputs", testWay]];
  if (run.drawing) ways.push(["Draw", () => drawingWay(false)], ["Upload", () => drawingWay(true)]);
  if (run.prompt) ways.push(["Prompt", promptWay]);
  const buttons = ways.map(([name, way]) =>
    h("button", { "aria-pressed": "false", onclick: (event) => open(event.currentTarget, way) }, name));
  fill($("ways"), buttons);
  $("ways").hidden = ways.length === 1;
  const first = state.q.startsWith("text:") ? buttons.length - 1 : state.q.startsWith("pixels:") ? 1 : 0;
  open(buttons[Math.min(first, buttons.length - 1)], ways[Math.min(first, ways.length - 1)][1]);
}

function open(button, way) {
  for (const each of $("ways").children) each.setAttribute("aria-pressed", String(each === button));
  fill($("way"), way());
}

// -- test inputs ------------------------------------------------------------------------------

function testWay() {
  const select = (name, title, options) =>
    h("select", { "aria-label": title, onchange: (event) => { filters[name] = event.target.value; filters.first = 0; list(); } },
      options.map(([value, text]) => h("option", { value, selected: String(filters[name]) === String(value) }, text)));
  const classes = [["", "every class"], ...run.classes.map((name, number) => [number, name])];
  const search = h("input", { type: "search", placeholder: "id …", "aria-label": "Find a test input by its id", id: "search",
    onchange: (event) => event.target.value.trim() && ask_about(`test:${event.target.value.trim()}`) });
  queueMicrotask(list);
  return [
    h("div", { class: "filters" },
      run.labelled ? select("only", "Right or wrong", [["all", "all"], ["wrong", "wrong"], ["right", "right"]]) : null,
      run.labelled && run.classes.length ? select("label", "Class", classes) : null,
      run.sources.length > 1 ? select("source", "Source", [["", "every source"], ...run.sources.map((name) => [name, name])]) : null,
      select("order", "Order", [["given", "in order"], ["unsure", "least sure"], ["random", "shuffled"]]),
      search),
    h("div", { id: "inputs", class: "grid" }),
    h("div", { class: "pager" },
      h("button", { id: "earlier", "aria-label": "Earlier inputs", onclick: () => page(-PAGE) }, "‹"),
      h("span", { id: "counted", class: "quiet" }),
      h("button", { id: "random", title: "A random one (r)", onclick: random }, "random"),
      h("button", { id: "later", "aria-label": "Later inputs", onclick: () => page(PAGE) }, "›")),
  ];
}

async function list() {
  const place = $("inputs");
  if (!place) return;
  place.classList.add("busy");
  await attempt(place, async () => {
    const found = await ask("inputs", { ...filters, count: PAGE }, "inputs");
    listed = found.inputs;
    const rows = listed.length && listed[0].shown.kind !== "image";
    place.className = rows ? "grid rows" : run.classes.some((each) => each.length > 5) ? "grid named" : "grid";
    fill(place, listed.length ? listed.map(thumbnail) : nothing());
    const last = Math.min(filters.first + PAGE, found.matching);
    fill($("counted"), found.matching ? `${filters.first + 1}–${last} of ${found.matching.toLocaleString("en")}` : "");
    $("earlier").disabled = filters.first === 0;
    $("later").disabled = last >= found.matching;
    $("random").disabled = !found.matching;
    const opening = state.q || !listed.length ? null : await interesting();
    if (opening && !state.q) change({ q: `test:${opening.id}` }, { quietly: true });
    markCurrent();
  }, list);
  place.classList.remove("busy");
}

/** What the page opens with: an answer that is wrong, if there is one. */
async function interesting() {
  const wrong = listed.find(isWrong) ?? (run.labelled ? (await ask("inputs", { only: "wrong", count: 1 })).inputs[0] : null);
  return wrong ?? listed[0];
}

/** No input is like that: why, and the way back. */
function nothing() {
  const wanted = [filters.label === "" ? null : `of class ${name(filters.label)}`, filters.source && `from ${filters.source}`, { wrong: "that is answered wrong", right: "that is answered right" }[filters.only]].filter(Boolean);
  if (!wanted.length) return h("p", { class: "empty" }, "There are no test inputs here.");
  const all = () => { Object.assign(filters, EVERYTHING); fill($("way"), testWay()); };
  return h("div", { class: "empty" }, h("p", {}, `There is no test input ${wanted.join(" ")}.`), h("button", { onclick: all }, "Show all of them"));
}

const name = (number) => run.classes[number] ?? number;
const isWrong = ({ said, label }) => said !== null && label !== null && said !== label;

function thumbnail(input) {
  const wrong = isWrong(input);
  const title = input.said === null ? `input ${input.id}`
    : `input ${input.id}: says ${name(input.said)} (${percent(input.share)})${wrong ? `, is ${name(input.label)}` : ""}`;
  const tag = input.said === null ? null : h("span", { class: "tag" }, name(input.said), !wrong ? null : String(name(input.label)).length < 5 ? `, is ${name(input.label)}` : h("span", {}, `is ${name(input.label)}`));
  return h("button", { class: wrong ? "thumb wrong" : "thumb", title, "data-id": String(input.id), "aria-label": title,
    onclick: () => ask_about(`test:${input.id}`) },
    datum(input.shown, { ink: ink(), name: title }), tag);
}

export function markCurrent() {
  for (const each of document.querySelectorAll("#inputs .thumb")) {
    each.setAttribute("aria-current", String(state.q === `test:${each.dataset.id}`));
    if (state.q === `test:${each.dataset.id}`) $("inputs").scrollLeft = each.offsetLeft - 150; // on a phone they stand in one row
  }
}

function page(by) {
  filters.first = Math.max(0, filters.first + by);
  return list();
}

/** The next or the previous input of the grid: arrow keys. */
export async function step(by) {
  const at = listed.findIndex((input) => state.q === `test:${input.id}`);
  let next = at + by;
  if (at >= 0 && next >= listed.length && !$("later").disabled) { await page(PAGE); next = 0; }
  else if (next < 0 && filters.first > 0) { await page(-PAGE); next = listed.length - 1; }
  const input = listed[Math.max(0, Math.min(listed.length - 1, next))];
  if (input) ask_about(`test:${input.id}`);
}

export async function random() {
  const seed = Math.floor(Math.random() * 2 ** 31);
  const found = await ask("inputs", { ...filters, order: "random", seed, first: 0, count: 1 });
  if (found.inputs.length) ask_about(`test:${found.inputs[0].id}`);
}

// -- prompts ----------------------------------------------------------------------------------

function promptWay() {
  const text = h("textarea", { id: "prompt", "aria-label": "Prompt", placeholder: "Type a prompt …" });
  if (state.q.startsWith("text:")) text.value = state.q.slice(5);
  const send = () => text.value && ask_about(`text:${text.value}`);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
  });
  return [text, h("p", {}, h("button", { id: "send", onclick: send }, "Ask")),
    h("p", { class: "quiet" }, "Enter asks. Then click the token to ask about: the spotlight falls on what the network had read up to it.")];
}
