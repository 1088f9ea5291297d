// What lights up together: an example's picture and its points in every plot.

const listeners = [];
let lit = null;

export function onLight(listener) {
  listeners.push(listener);
}

/** Lights up an example ({example, slot, at: the pointer}), or nothing (null). */
export function light(what) {
  if (what?.example === lit?.example && what?.slot === lit?.slot) return;
  lit = what;
  for (const listener of listeners) listener(what);
}
