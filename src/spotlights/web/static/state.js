// The state of the page: all of it stands in the address, so a link shows the same to somebody else.

const KEYS = ["q", "at", "layer", "measure", "target", "by", "per", "steps", "mask", "in", "view"];

export const state = Object.fromEntries(KEYS.map((key) => [key, ""]));
const listeners = [];

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
  if (quietly) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  for (const listener of listeners) listener(changed);
}

export function follow() {
  addEventListener("popstate", () => {
    document.activeElement?.blur?.(); // a slider that has the focus is not made anew, see mask.js
    const changed = readAddress();
    if (changed.length) for (const listener of listeners) listener(changed);
  });
}

// -- the mask, between its text and its parts -------------------------------------------------

/** "label:3,5;steps:0-300;example:12" → {label: ["3", "5"], steps: ["0-300"], example: ["12"]} */
export function maskParts(text = state.mask) {
  const pairs = text.split(";").filter(Boolean).map((part) => {
    const at = part.indexOf(":");
    return [part.slice(0, at), part.slice(at + 1).split(",").filter(Boolean)];
  });
  return Object.fromEntries(pairs);
}

export function maskText(parts) {
  return Object.entries(parts).filter(([, values]) => values.length).map(([key, values]) => `${key}:${values.join(",")}`).join(";");
}

export function toggleMasked(column, value) {
  const parts = maskParts();
  const held = parts[column] ?? [];
  const text = String(value);
  parts[column] = held.includes(text) ? held.filter((each) => each !== text) : [...held, text];
  change({ mask: maskText(parts) });
}

export const isMasked = (column, value) => (maskParts()[column] ?? []).includes(String(value));
