// Small tools for the page: elements, numbers, and how a datum is shown.

import { Replaced } from "./api.js";

export const $ = (id) => document.getElementById(id);

/** An element: h("button", {class: "chip", onclick}, "text", child, …). Text is always text, never markup. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name in element && name !== "list" && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

/** Lists of children as one, without those that are not there. */
export const present = (children) => children.flat(9).filter((child) => (child ?? false) !== false);

export const fill = (place, ...children) => place.replaceChildren(...present(children));

/** A number as one reads it: 12,345 · 3.21 · 0.0042 · 1.2 M. */
export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `−${shown(-value)}`;
  const size = value;
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 1e5) return `${Math.round(value / 1e3)} k`;
  if (size && size < 1e-4) return value.toExponential(0);
  if (size >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return size >= 1 ? value.toFixed(2) : value.toPrecision(size >= 0.1 ? 3 : 2);
}

export const signed = (value) => (value < 0 ? "" : "+") + shown(value);
export const percent = (share) => (share > 0.9995 && share < 1 ? ">99.9 %" : `${(100 * share).toFixed(1)} %`);

/** A picture, a passage with its highlight, a row of a table, or whatever a user's own HTML is. `ink`: 0 is background, so dark on white. */
export function datum(shownAs, { ink = false, name = "" } = {}) {
  if (!shownAs) return h("span", { class: "quiet" }, name || "no view");
  if (shownAs.kind === "image") {
    const src = shownAs.image ?? pixelsUrl(shownAs);
    return h("img", { src, alt: name, class: `${ink ? "ink" : ""} ${shownAs.smooth ? "smooth" : ""}`, loading: "lazy", draggable: false });
  }
  if (shownAs.kind === "html") return h("iframe", { class: "frame", sandbox: "", srcdoc: shownAs.html, title: name });
  if (shownAs.kind === "text") {
    const { text, start, end } = shownAs;
    if (end <= start) return h("span", {}, text);
    return h("span", {}, text.slice(0, start).trimStart(), h("mark", {}, visible(text.slice(start, end))), text.slice(end).trimEnd());
  }
  return h("span", { class: "pairs" }, shownAs.rows.map(([key, value]) => h("span", {}, h("i", {}, key), ` ${value}`)));
}

/** A text with the words marked that another text has too. */
export function shared(text, other) {
  const words = new Set(other.toLowerCase().match(/[\p{L}\p{N}]{3,}/gu) ?? []);
  return h("span", {}, text.split(/([\p{L}\p{N}]+)/u).map((part) => (words.has(part.toLowerCase()) ? h("mark", {}, part) : part)));
}

/** A choice: a select with its name before it. */
export const choose = (name, id, current, options, act) => h("label", { class: "switch" }, name,
  h("select", { id, onchange: (event) => act(event.target.value) }, options.map(([value, text, title]) => h("option", { value, title, selected: String(value) === String(current) }, text))));

/** The picture of an image that came as bytes: drawn here, since no address has it. */
function pixelsUrl({ bytes, width, height }) {
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const raw = atob(bytes);
  for (let at = 0; at < raw.length; at++) {
    image.data.fill(raw.charCodeAt(at), 4 * at, 4 * at + 3);
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

/** A name that can be seen: a token may be nothing but white space. */
export const visible = (name) => (String(name).trim() ? name : String(name).replaceAll(" ", "␣").replaceAll("\n", "↵") || "∅");

// -- explanations -----------------------------------------------------------------------------

let bubble = null;
let explained = null;

/** Says more about an element on hover, on focus, and where there is no hover, on a tap. */
export function explain(element, text) {
  if (!text) return element;
  element.tabIndex = 0;
  element.setAttribute("aria-description", text);
  for (const event of ["pointerenter", "focus", "click"]) element.addEventListener(event, () => open(element, text));
  for (const event of ["pointerleave", "blur"]) element.addEventListener(event, close);
  return element;
}

function open(element, text) {
  if (!bubble) document.body.append(bubble = h("div", { id: "bubble", role: "tooltip" }));
  explained = element;
  fill(bubble, text);
  bubble.hidden = false;
  const { left, bottom, top } = element.getBoundingClientRect();
  const below = bottom + 6 + bubble.offsetHeight < innerHeight;
  bubble.style.left = `${Math.max(8, Math.min(left, innerWidth - bubble.offsetWidth - 8))}px`;
  bubble.style.top = `${below ? bottom + 6 : Math.max(8, top - 6 - bubble.offsetHeight)}px`;
}

function close() {
  explained = null;
  if (bubble) bubble.hidden = true;
}

addEventListener("pointermove", () => { if (explained && !explained.isConnected) close(); }); // it was drawn anew meanwhile

/** What is not exact says so; why, on hover. */
export const caution = ({ caution: word, note }) => (word ? explain(h("span", { class: "caution" }, word), note) : null);

/** Shows in a place what is being waited for, and how far it is. */
export const waits = (place, text) => (progress) => {
  place.classList.remove("busy");
  fill(place, h("p", {}, text, progress ? h("span", { class: "quiet" }, ` ${Math.round(100 * progress)} %`) : null), h("progress", { ...(progress ? { value: progress, max: 1 } : {}), "aria-label": text }));
};

/** Fills a place of the page; what goes wrong is said there, with a way to try again. A newer question says nothing. */
export async function attempt(place, work, again = null) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Replaced)) fill(place, problem(error, again));
  }
}

export function problem(error, again) {
  return h("div", { class: "error", role: "alert" }, error.message, " ", again ? h("button", { onclick: again }, "Try again") : null);
}
