// The grammar of selections, as in spotlights/selections.py: "label=3,5 step=0-300; source=mnist". Values stay as they are spelled.

const WORD = String.raw`[^\s;,="']+`;
const VALUE = String.raw`(?:"(?:[^"\\]|\\.)*"|${WORD})`;
const NUMERIC = /^-?\d+(?:(?:\.\d+)?(?:[eE][+-]?\d+)?|--?\d+)$/;

/** "label=3,5 step=0-300; source=mnist" → [{label: ["3", "5"], step: ["0-300"]}, {source: ["mnist"]}] */
export function parseSelections(text) {
  const selections = [{}];
  for (const [, column, values] of text.matchAll(new RegExp(`;|(${WORD})=(${VALUE}(?:,${VALUE})*)`, "gs"))) {
    if (column === undefined) selections.push({});
    else selections.at(-1)[column] = values.match(new RegExp(VALUE, "gs"));
  }
  return selections.filter((terms) => Object.keys(terms).length);
}

export const formatSelections = (selections) =>
  selections.map((terms) => Object.entries(terms).map(([column, values]) => `${column}=${values.join(",")}`).join(" ")).join("; ");

/** A value as it is written: strings that look like something else stand in quotes. */
export function spell(value) {
  const plain = typeof value !== "string" || (new RegExp(`^${WORD}$`).test(value) && !NUMERIC.test(value));
  return plain ? String(value) : `"${value.replace(/["\\]/g, "\\$&")}"`;
}
