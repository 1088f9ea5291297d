// Charts are SVG drawn here, with colours of the page's scheme written into them: a saved chart looks as on the page.

import { $, h, present } from "./dom.js";

const SPACE = "http://www.w3.org/2000/svg";

/** A colour of the page: "ink", "for", "against" … */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** An SVG element: s("rect", {x, y, width, height, fill}, children …). */
export function s(tag, properties = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...present(children));
  return element;
}

export const text = (x, y, words, more = {}) => s("text", { x, y, fill: colour("ink"), "font-size": 12.5, "dominant-baseline": "middle", ...more }, words);

/** A chart that fills the width of its place; `label` is what a screen reader says of it. */
export function chart(place, height, label, ...children) {
  const width = Math.max(240, place.clientWidth);
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label, "font-family": "system-ui, sans-serif" }, ...children);
  place.replaceChildren(svg);
  return svg;
}

/** Draws again whenever the place's width, or the colour scheme, changes. */
export function responsive(place, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(place.clientWidth - width) < 2) return;
    width = place.clientWidth;
    if (width) draw();
  }).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

/** From numbers to pixels. */
export function scale([low, high], [from, to]) {
  const factor = (to - from) / (high - low || 1);
  return (value) => from + (value - low) * factor;
}

/** Round numbers between two. */
export function ticks(low, high, count = 5) {
  const rough = (high - low || 1) / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 5, 10].find((each) => each * size >= rough);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, at) => (first + at) * step);
}

/** What Enter and the space bar do to a part of a chart that can be clicked. */
export const pressed = (act) => (event) => {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  act(event);
};

// -- taking a chart away ----------------------------------------------------------------------

async function standalone(svg) {
  const copy = svg.cloneNode(true);
  copy.setAttribute("xmlns", SPACE);
  copy.prepend(s("rect", { width: "100%", height: "100%", fill: colour("paper") }));
  for (const image of copy.querySelectorAll("image")) {
    const source = image.getAttribute("href");
    if (source.startsWith("data:")) continue;
    const bytes = await (await fetch(source)).blob();
    const reader = new FileReader();
    image.setAttribute("href", await new Promise((done) => { reader.onload = () => done(reader.result); reader.readAsDataURL(bytes); }));
  }
  return new XMLSerializer().serializeToString(copy);
}

/** What was painted, as a picture in an SVG. */
function pictured(canvas) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  return s("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, s("image", { href: canvas.toDataURL(), width, height }));
}

async function asPng(markup, width, height) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(markup)}`;
  await image.decode();
  const canvas = h("canvas", { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

export function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** The buttons that take the chart of a place away, by the place's id. */
export function takeAway(id, name) {
  const save = (kind) => async () => {
    const chart = $(id).querySelector("svg, canvas");
    if (!chart) return;
    const svg = chart.tagName === "CANVAS" ? pictured(chart) : chart;
    const markup = await standalone(svg);
    const { width, height } = svg.viewBox.baseVal;
    download(kind === "svg" ? new Blob([markup], { type: "image/svg+xml" }) : await asPng(markup, width, height), `${name}.${kind}`);
  };
  return h("span", { class: "links" }, ["png", "svg"].map((kind) => h("button", { class: "more", title: `Save this picture as ${kind.toUpperCase()}`, onclick: save(kind) }, kind.toUpperCase())));
}
