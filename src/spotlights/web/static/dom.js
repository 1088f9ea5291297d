// Small tools for the page: elements, numbers, and how a datum is shown.

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
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function fill(place, ...children) {
  place.replaceChildren(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A number as one reads it: 12,345 · 3.21 · 0.0042 · 1.2 M. */
export function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return size >= 1 ? value.toFixed(2) : value === 0 ? "0" : value.toPrecision(2).replace(/e([+-]\d+)/, "e$1");
}

export const signed = (value) => (value < 0 ? "−" : "+") + shown(Math.abs(value));
export const percent = (share) => (share > 0.9995 && share < 1 ? ">99.9 %" : `${(100 * share).toFixed(1)} %`);

/** A picture, a passage with its highlight, or a small table. `ink`: 0 is background, so dark on white. */
export function datum(shownAs, { ink = false, name = "" } = {}) {
  if (!shownAs) return h("span", { class: "quiet" }, name || "no view");
  if (shownAs.kind === "image") {
    const src = shownAs.image ?? pixelsUrl(shownAs);
    return h("img", { src, alt: name, class: ink ? "ink" : "", loading: "lazy", draggable: false });
  }
  if (shownAs.kind === "text") {
    const { text, start, end } = shownAs;
    return h("span", {}, text.slice(0, start), end > start ? h("mark", {}, text.slice(start, end)) : null, text.slice(end));
  }
  return h("table", { class: "mini" }, shownAs.rows.map(([key, value]) => h("tr", {}, h("td", {}, key), h("td", {}, value))));
}

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

/** What is not exact says so; why, on hover. */
export const caution = ({ caution: word, note }) => (word ? h("span", { class: "caution", title: note ?? "", tabindex: "0" }, word) : null);

/** Shows in a place what is being waited for, and how far it is. */
export const waits = (place, text) => (progress) => fill(place, h("p", { class: "quiet" }, text), h("progress", { value: progress, max: 1 }));

export function problem(error, again) {
  return h("div", { class: "error", role: "alert" }, error.message, " ", again ? h("button", { onclick: again }, "Try again") : null);
}
