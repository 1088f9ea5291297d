// The state of the page: all of it stands in the address, so a link shows the same to somebody else.

import { offline } from "./api.js";
import { formatSelections, parseSelections, spell } from "./selections.js";

/** The memory, as the server describes it; it is there before anything is drawn. */
export let run;
export const begin = (about) => { run = about; };

/** Whether images are ink: 0 is background, so they are shown dark on white. */
export const ink = () => Boolean(run.drawing);

const KEYS = ["q", "at", "view", "layer", "measure", "target", "by", "per", "open", "where", "mask", "in", "step", "suspect", "paint", "projection"];

export const state = Object.fromEntries(KEYS.map((key) => [key, ""]));
const listeners = [];

/** Whether somebody who waited for an answer still looks at the view that asked. */
export const looking = (view) => state.view === view;

export function onChange(listener) {
  listeners.push(listener);
}

export function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const before = { ...state };
  for (const key of KEYS) state[key] = given.get(key) ?? "";
  return KEYS.filter((key) => state[key] !== before[key]);
}

/** Changes some of the state; `quietly` for a slider that moves, which should not fill the browser's history. */
export function change(changes, { quietly = false } = {}) {
  const changed = Object.keys(changes).filter((key) => state[key] !== String(changes[key] ?? ""));
  if (!changed.length) return;
  for (const key of changed) state[key] = String(changes[key] ?? "");
  const filled = KEYS.filter((key) => state[key] !== "").map((key) => [key, state[key]]);
  const address = `#${new URLSearchParams(filled)}`;
  try {
    if (quietly) history.replaceState(null, "", address);
    else history.pushState(null, "", address);
  } catch { /* a frame of a notebook has no address */ }
  for (const listener of listeners) listener(changed);
}

/** Another input: what belonged to the last one alone goes. */
export const ask_about = (q, more = {}) => change({ q, at: "", target: "", open: "", step: "", ...more });

export function follow() {
  addEventListener("popstate", () => {
    document.activeElement?.blur?.(); // a slider that has the focus is not made anew, see mask.js
    const changed = readAddress();
    if (changed.length) for (const listener of listeners) listener(changed);
  });
}

// -- the mask, between its text and its parts -------------------------------------------------

/** "label=3,5; step=0-300; label=1 step=0-9" → {label: ["3", "5"], step: ["0-300"]} and the others, which have several conditions */
export function maskParts(text = state.mask) {
  const parts = {};
  for (const terms of parseSelections(text)) {
    const [[column, values], ...more] = Object.entries(terms);
    if (!more.length) parts[column] = [...new Set([...(parts[column] ?? []), ...values])];
  }
  return parts;
}

export const otherSelections = (text = state.mask) => parseSelections(text).filter((terms) => Object.keys(terms).length > 1);

export function maskText(parts, others = otherSelections()) {
  const single = Object.entries(parts).filter(([, values]) => values.length).map(([column, values]) => ({ [column]: values }));
  return formatSelections([...single, ...others]);
}

/** `spelled` is the value as it is written in a selection. */
export function toggleMasked(column, value, spelled = spell(value)) {
  const all = maskParts();
  const parts = offline ? { [column]: (all[column] ?? []).filter((each) => each === spelled) } : all; // a saved page knows one group at a time
  const held = parts[column] ?? [];
  parts[column] = held.includes(spelled) ? held.filter((each) => each !== spelled) : [...held, spelled];
  change({ mask: maskText(parts) });
}

export const isMasked = (column, value) => (maskParts()[column] ?? []).includes(spell(value));
