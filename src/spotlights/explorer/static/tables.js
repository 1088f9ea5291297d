// Rows of a table: those of training examples under the row that is asked about, cells shaded by how near they are to it.

import { h } from "./dom.js";

/** How far apart the values of a column are, so that "near" means the same in each. */
function spread(rows, at) {
  const all = rows.map(({ shown }) => shown.numbers?.[at]).filter((value) => value !== null && value !== undefined);
  const mean = all.reduce((sum, value) => sum + value, 0) / (all.length || 1);
  return Math.sqrt(all.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (all.length || 1)) || 1;
}

/**
 * A table. Rows: {example, shown, …}; `facts` [[title, (row) => cell], …] stand before the columns of the data and stay in view,
 * as does `own`, the row that is asked about. `mark` (row) → what the row of the page is given besides.
 */
export function table(rows, { own = null, facts, mark = () => ({}), label, name = "this input" }) {
  const names = rows[0].shown.rows.map(([name]) => name);
  const asked = own?.kind === "table" && own.rows.length === names.length ? own : null;
  const spreads = names.map((_, at) => spread(rows, at));
  const near = (of, at) => {
    const [one, two] = [asked?.numbers?.[at], of.numbers?.[at]];
    if (typeof one === "number" && typeof two === "number") return Math.exp(-Math.abs(one - two) / spreads[at]);
    return asked && asked.rows[at][1] === of.rows[at]?.[1] ? 1 : 0;
  };
  const shade = (share) => (share < 0.02 ? {} : { background: `color-mix(in srgb, var(--lamp) ${Math.round(38 * share)}%, transparent)` });
  return h("div", { class: "tablewrap", tabIndex: 0, role: "region", "aria-label": label }, h("table", { class: "data" },
    h("thead", {}, h("tr", {}, facts.map(([title], at) => h("th", { scope: "col", class: at ? "" : "first" }, title || h("span", { class: "unseen" }, "leave out"))), names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, asked ? h("tr", { class: "asked" }, h("th", { scope: "row", class: "first" }, name), facts.slice(1).map(() => h("td", {})), asked.rows.map(([, value]) => h("td", {}, value))) : null,
      rows.map((row) => h("tr", mark(row), facts.map(([, cell], at) => h(at ? "td" : "th", at ? {} : { scope: "row", class: "first" }, cell(row))),
        row.shown.rows.map(([, value], at) => h("td", { class: row.shown.numbers?.[at] === null ? "words" : "", style: shade(near(row.shown, at)) }, value)))))));
}
