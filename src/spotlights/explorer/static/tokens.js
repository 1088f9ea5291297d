// Texts token by token: each token is shaded by what it adds, and a language model writes on.

import { ask } from "./api.js";
import { h, shown, signed, visible } from "./dom.js";

const WRITTEN = 8;

const largest = (values) => Math.max(0, ...values.map((value) => Math.abs(value ?? 0)));

/** How a token is shaded: the class and the style that say how much it adds, of how much at most. */
export const shade = (value, most) => (value ? { class: `shaded ${value > 0 ? "pro" : "con"}`, style: { "--share": String(Math.round(1000 * Math.abs(value) / (most || 1)) / 1000) } } : { class: "shaded" });

export const mostOf = (texts) => largest(texts.flatMap(({ values }) => values));

/** A text whose tokens are shaded; `most` is the largest value of all texts that are shown together. */
export const shadedText = ({ tokens, values, mark }, most, number = signed) => h("span", { class: "shades" }, tokens.map((token, at) => {
  const { class: kind, style } = shade(values[at], most);
  const title = values[at] === null ? "no slot" : `“${visible(token)}”: ${number(values[at])}`;
  return at === mark ? h("mark", { class: kind, style, title }, visible(token)) : h("span", { class: kind, style, title }, token);
}));

/** What a query's own shading says, in words. */
export const told = ({ layer, values }, name) => `Shaded: what training adds for and against ${name} through each token, in ${layer} (first order; at most ${shown(largest(values))}).`;

/** The text with what the network says next, a few times over. */
export async function writtenOn(tokens) {
  let text = tokens.join("");
  for (let count = 0; count < WRITTEN; count++) {
    const next = await ask("query", { q: `text:${text}` }, "write").catch((error) => { if (count) return null; throw error; });
    if (!next?.said_name) break;
    text += next.said_name;
  }
  return text;
}
