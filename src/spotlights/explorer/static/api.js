// Asking the server. A newer question of the same kind replaces one that is still on its way.

const under_way = new Map();

export class Refused extends Error {}
export class Replaced extends Error {}

const PAUSE = 500;

/** A page that was saved has its answers with it, and no server. The page of a notebook has neither: the kernel answers. */
const held = document.getElementById("answers");
export const given = held ? JSON.parse(held.textContent) : null;
export const offline = given?.kernel ? null : given;
const waiting = new Map();
const pictured = (answer, images) => JSON.parse(JSON.stringify(answer), (_, value) => (typeof value === "string" && Object.hasOwn(images, value) ? images[value] : value));

if (given?.kernel) addEventListener("message", ({ data, source }) => {
  if (source !== parent || !waiting.has(data?.id)) return;
  waiting.get(data.id)({ status: data.status, ok: data.status === 200, json: async () => (data.images ? pictured(data.answer, data.images) : data.answer) });
  waiting.delete(data.id);
});

/** What the kernel of a notebook answers, by way of the notebook's own connection. */
const fromKernel = (path, parameters) => new Promise((done) => {
  const id = crypto.randomUUID?.() ?? String(Math.random());
  waiting.set(id, done);
  parent.postMessage({ spotlights: { id, path, parameters } }, "*");
});

/** The answer at an address; `kind` names questions of which only the newest counts; `waits` is told how far something is that the answer needs. */
export async function ask(path, parameters = {}, kind = null, waits = null, method = "GET") {
  const pairs = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(pairs.sort(([a], [b]) => (a < b ? -1 : 1))).toString();
  if (offline) {
    const sorted = pairs.map(([name, value]) => [name, String(value)]).sort(([a], [b]) => (a < b ? -1 : 1));
    const found = offline.answers[JSON.stringify([path, ...sorted])];
    if (found === undefined) throw new Refused("This saved page does not hold that answer. The explorer does: spotlights explore.");
    return pictured(found, offline.images);
  }
  const control = new AbortController();
  if (kind) {
    under_way.get(kind)?.abort();
    under_way.set(kind, control);
  }
  let answer;
  try {
    answer = given?.kernel ? await fromKernel(path, query) : await fetch(`${path.startsWith("other/") ? `other/api/${path.slice(6)}` : `api/${path}`}${query ? `?${query}` : ""}`, { method, signal: control.signal });
  } catch (error) {
    if (control.signal.aborted) throw new Replaced();
    throw new Refused("The explorer does not answer. Is it still running in its terminal?");
  }
  const found = await answer.json().catch(() => {
    if (control.signal.aborted) throw new Replaced();
    throw new Refused("The explorer's answer was cut off.");
  });
  if (answer.status === 202) {
    waits?.(found.progress);
    await new Promise((wake) => setTimeout(wake, PAUSE));
    if (control.signal.aborted) throw new Replaced();
    return ask(path, parameters, kind, waits, method);
  }
  if (kind && under_way.get(kind) === control) under_way.delete(kind);
  if (!answer.ok) throw new Refused(found.error?.message ?? `The explorer answered ${answer.status}.`);
  return found;
}

/** For sliders: at most one question on its way; of those that come meanwhile, the last is asked next. */
export function latest(question) {
  let busy = false;
  let next = null;
  return async function run(...given) {
    if (busy) {
      next = given;
      return;
    }
    busy = true;
    try {
      await question(...given);
    } finally {
      busy = false;
    }
    if (next) {
      const wanted = next;
      next = null;
      run(...wanted);
    }
  };
}
