// The map: one point for each training example, where a layer puts it. The input is the lamp: brightness by size, colour by sign.

import { column, controls, layer, measure, peek, rowsOf, targetName, theAnswer } from "./answer.js";
import { ask, Replaced } from "./api.js";
import { $, choose, fill, h, percent, problem, shown, signed, waits } from "./dom.js";
import { change, looking, maskParts, maskText, run, state } from "./state.js";
import { colour, takeAway } from "./svg.js";

const [MOVING, MOST_MASKED, NEAR, GLOWING, MOST_NAMES] = [700, 400, 12, 300, 30];
let map = null;
let lamp = null;
let canvas = null;
let shape = [];
let chosen = null;
let drawn = 0;
let picture = null;
const points = h("canvas");

const bytes = (text, Kind) => new Kind(Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer);
const by = () => (state.paint === "group" && map?.groups.length ? "group" : "value");

export async function showMap(keys) {
  if (map && keys.every((key) => ["mask", "in", "open", "step", "where", "by"].includes(key))) return;
  if (!$("map-canvas")) lay();
  const per = column() === "step" ? "" : column();
  try {
    const told = waits($("map-note"), state.projection === "umap" ? "UMAP places the points, once for each layer: a minute or two for 60,000 of them." : "Finding two directions, once for each layer.");
    const projection = state.projection;
    const [places, light] = await Promise.all([ask("map", { layer: layer(), per, projection }, "map", told), ask("lamp", { q: state.q, at: state.at, layer: layer(), measure: measure().name, target: measure().signed ? state.target : "", projection }, "lamp", told)]);
    if (!looking("map")) return;
    const before = map;
    map = { ...places, examples: bytes(places.examples, BigInt64Array), at: bytes(places.places, Uint16Array), groups: bytes(places.groups, Uint8Array) };
    lamp = { ...light, values: bytes(light.values, Float32Array) };
    rank();
    loadPicture();
    controls();
    tell();
    if (before && (before.layer !== map.layer || before.projection !== map.projection) && before.count === map.count) await move(before);
    if (!looking("map")) return;
    chosen = null;
    drawMap();
    showChosen();
  } catch (error) {
    if (error instanceof Replaced || !looking("map")) return;
    fill($("map-note"), problem(error, () => showMap(["view"])), state.projection ? h("button", { onclick: () => change({ projection: "" }) }, "Two directions instead") : null);
  }
}

function lay() {
  canvas = h("canvas", { id: "map-canvas", tabindex: 0, role: "img", "aria-label": "Map of the training examples", onpointerdown: press, onpointermove: hover, onpointerup: release, onpointerleave: () => peek(null), onkeydown: ring });
  fill($("view"), h("section", { class: "panel wide", id: "map" }, h("h2", { id: "map-title" }), h("div", { class: "chart", id: "map-place" }, canvas), h("p", { class: "quiet", id: "map-note" })),
    h("section", { class: "panel wide", id: "chosen" }));
}

/** Brightness by rank of size would hide how few matter; by size alone most would be dark. The root is between. */
function rank() {
  const most = lamp.values.reduce((far, each) => Math.max(far, Math.abs(each)), 1e-12);
  lamp.light = lamp.values.map((each) => Math.sqrt(Math.abs(each) / most));
  lamp.order = Array.from(lamp.values.keys()).sort((a, b) => lamp.light[a] - lamp.light[b]);
}

function tell() {
  const paint = map.groups.length ? choose("colour by", "paint", state.paint || "value", [["value", measure().signed ? "for and against" : measure().title], ["group", map.per]], (value) => change({ paint: value })) : null;
  const placed = run.saved ? null : choose("placed by", "projection", map.projection, [["pca", "two directions", "The two directions in which the keys differ most (PCA)"], ["umap", "neighbours", "Examples with similar keys lie together (UMAP)"]], (value) => change({ projection: value === "pca" ? "" : value }));
  const about = measure().signed ? `${measure().estimate ? "its influence on" : "what each adds to"} ${targetName(lamp.target, lamp.versus)}` : measure().title;
  fill($("map-title"), `${map.count.toLocaleString("en")} training examples, lit by ${about}`, paint, placed, takeAway("map-place", "spotlights-map"));
  fill($("map-note"), map.explained === null ? `Each point is a training example. UMAP puts those together whose inputs of ${map.layer} are similar; distances between far points mean nothing. The ring is the input, between the examples nearest to it` : `Each point is a training example, placed by the two directions in which the inputs of ${map.layer} differ most (${percent(map.explained)} of their variance). The ring is the input`, "; the brighter a point, the more it matters", measure().signed ? [": ", h("span", { class: "key" }, h("span", {}, h("i", { style: { background: colour("lit-for") } }), "for"), h("span", {}, h("i", { style: { background: colour("lit-against") } }), "against"))] : ".", run.saved ? "" : " Draw a line around some, or press ↑ and ↓ for a ring around the input: they are added up below.",
    by() === "group" ? h("span", { class: "key" }, (run.groups[map.per] ?? []).map(({ name, colour: each }) => h("span", {}, h("i", { style: { background: each } }), name))) : null);
  canvas.setAttribute("aria-label", `Map of ${map.count} training examples in ${map.layer}; the brightest are listed below`);
}

// -- drawing ----------------------------------------------------------------------------------

const rgb = (css) => { const context = h("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true }); context.fillStyle = css; context.fillRect(0, 0, 1, 1); return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3); };

export function drawMap() {
  const wide = map && $("map-place").clientWidth;
  if (!wide) return;
  const ratio = Math.min(2, devicePixelRatio || 1);
  canvas.width = Math.round(wide * ratio);
  const left = innerHeight - canvas.getBoundingClientRect().top - scrollY - 70; // the whole map on the first screen, with the words under it
  canvas.height = Math.round(Math.min(1.15 * wide, Math.max(380, left)) * ratio);
  canvas.style.height = `${canvas.height / ratio}px`;
  paint(map.at);
}

/** Where the lamp is, on the map's own scale. */
function lampAt() {
  const scaled = lamp.place.map((each, side) => (each - map.low[side]) / (map.high[side] - map.low[side] || 1));
  return scaled.map((each) => Math.max(0, Math.min(1, each)));
}

const MARGIN = 22;
const onScreen = (x, y) => [MARGIN + x * (canvas.width - 2 * MARGIN), canvas.height - MARGIN - y * (canvas.height - 2 * MARGIN)];
const byGroup = () => by() === "group";
const pointSize = () => (map.count > 20000 ? 1 : map.count > 3000 ? 1.5 : 2.4) * Math.max(1, canvas.width / 1500);

/** The shades of a point, from dust to bright: of each group, or for and against; and of points in no group. */
function palette() {
  const [ground, dust] = [rgb(colour("night")), byGroup() ? null : rgb(colour("dust"))];
  const pack = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  const mix = (tone, share) => pack(tone.map((each, side) => Math.round((dust ?? ground)[side] + (each - (dust ?? ground)[side]) * share)));
  const shades = (tone) => Array.from({ length: 33 }, (_, share) => mix(tone, dust ? share / 32 : 0.3 + (0.7 * share) / 32));
  const tones = byGroup() ? (run.groups[map.per] ?? []).map(({ colour: each }) => each) : [colour("lit-for"), colour("lit-against")];
  return { ground: pack(ground), tones: tones.map((each) => shades(rgb(each))), grey: shades(rgb(colour("ghost"))) };
}

/** All points as pixels of one image: 60,000 of them take a few milliseconds. Points that move have no light around them. */
function paint(at, moving = null) {
  const { width, height } = canvas;
  const { ground, tones, grey } = moving ?? palette();
  const image = new ImageData(width, height);
  const data = new Uint32Array(image.data.buffer);
  if (moving) data.fill(ground);
  const [wide, high, size] = [width - 2 * MARGIN, height - 2 * MARGIN, pointSize()];
  for (const point of lamp.order) {
    const light = lamp.light[point];
    const tone = (byGroup() ? tones[map.groups[point]] : tones[lamp.values[point] >= 0 ? 0 : 1]) ?? grey;
    const shade = tone[Math.round(32 * light)];
    const x = MARGIN + Math.round((at[2 * point] / 65535) * wide);
    const y = height - MARGIN - Math.round((at[2 * point + 1] / 65535) * high);
    const radius = size * (1 + 2 * light);
    const far = Math.round(radius);
    const round = radius * radius + 0.25;
    for (let row = Math.max(0, y - far); row <= Math.min(height - 1, y + far); row++) for (let pixel = Math.max(0, x - far); pixel <= Math.min(width - 1, x + far); pixel++)
      if ((row - y) ** 2 + (pixel - x) ** 2 <= round) data[row * width + pixel] = shade;
  }
  if (moving) return canvas.getContext("2d").putImageData(image, 0, 0);
  if (points.width !== width || points.height !== height) Object.assign(points, { width, height });
  const context = points.getContext("2d");
  context.putImageData(image, 0, 0);
  glow(context, at);
  compose();
}

/** A halo around the brightest points. */
function glow(context, at) {
  context.globalCompositeOperation = "lighter";
  const size = 14 * pointSize();
  const halo = (tone) => {
    const [r, g, b] = rgb(tone);
    const sprite = h("canvas", { width: 64, height: 64 });
    const brush = sprite.getContext("2d");
    const fade = brush.createRadialGradient(32, 32, 0, 32, 32, 32);
    [[0, 0.55], [0.25, 0.22], [1, 0]].forEach(([far, light]) => fade.addColorStop(far, `rgba(${r},${g},${b},${light})`));
    brush.fillStyle = fade;
    brush.fillRect(0, 0, 64, 64);
    return sprite;
  };
  const halos = (byGroup() ? (run.groups[map.per] ?? []).map(({ colour: each }) => each) : [colour("lit-for"), colour("lit-against")]).map(halo);
  for (const point of lamp.order.slice(-GLOWING)) {
    const sprite = byGroup() ? halos[map.groups[point]] : halos[lamp.values[point] >= 0 ? 0 : 1];
    const [x, y] = onScreen(at[2 * point] / 65535, at[2 * point + 1] / 65535);
    const far = size * lamp.light[point] ** 2;
    if (sprite) context.drawImage(sprite, x - far, y - far, 2 * far, 2 * far);
  }
  context.globalCompositeOperation = "source-over";
}

/** The night, the lamp's light, the points, the names of the groups, the input, and the line of the lasso. */
function compose() {
  const context = canvas.getContext("2d");
  const ratio = canvas.width / canvas.clientWidth || 1;
  const [x, y] = onScreen(...lampAt());
  context.fillStyle = colour("night");
  context.fillRect(0, 0, canvas.width, canvas.height);
  const light = context.createRadialGradient(x, y, 0, x, y, 0.55 * canvas.width);
  [[0, "#ffbe4533"], [0.3, "#ffbe4514"], [1, "#ffbe4500"]].forEach(([far, tone]) => light.addColorStop(far, tone));
  context.fillStyle = light;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(points, 0, 0);
  nameGroups(context, ratio);
  lampOn(context, x, y, ratio);
  if (shape.length > 1) {
    context.beginPath();
    shape.forEach(([left, top], number) => (number ? context.lineTo(left, top) : context.moveTo(left, top)));
    if (chosen) context.closePath();
    context.strokeStyle = colour("lamp");
    context.fillStyle = "#ffbe4522"; context.fill(); context.lineWidth = 2 * ratio; context.stroke();
  }
  drawn += 1;
  canvas.dataset.drawn = drawn;
}

/** Each group's name where the middle one of its points is. */
function nameGroups(context, ratio) {
  const named = run.groups[map.per] ?? [];
  if (!map.groups.length || named.length > MOST_NAMES) return;
  map.middles ??= named.map((_, group) => {
    const own = [];
    for (let point = 0; point < map.count; point++) if (map.groups[point] === group) own.push(point);
    const middle = (side) => own.map((point) => map.at[2 * point + side]).sort((a, b) => a - b)[own.length >> 1];
    return own.length ? [middle(0) / 65535, middle(1) / 65535] : null;
  });
  context.font = `650 ${14 * ratio}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineJoin = "round";
  const written = [[...onScreen(...lampAt()), 40 * ratio]]; // where the input's ring and other names are: a name goes below them
  map.middles.map((middle, group) => middle && [...onScreen(...middle), named[group].name]).filter(Boolean).sort((one, other) => one[1] - other[1]).forEach(([x, middle, name]) => {
    const wide = context.measureText(name).width;
    let y = middle;
    for (const [left, top, long] of written.sort((one, other) => one[1] - other[1])) if (Math.abs(x - left) < (wide + long) / 2 && Math.abs(y - top) < 19 * ratio) y = top + 19 * ratio;
    written.push([x, y, wide]);
    context.lineWidth = 4 * ratio;
    context.strokeStyle = "#0b0e14d0";
    context.strokeText(name, x, y);
    context.fillStyle = "#f4f5f7";
    context.fillText(name, x, y);
  });
}

/** The input: its picture in a ring, or the ring alone. */
function lampOn(context, x, y, ratio) {
  const far = 20 * ratio;
  context.strokeStyle = colour("lamp");
  if (picture?.complete && picture.naturalWidth) {
    context.save();
    context.beginPath(); context.arc(x, y, far, 0, 7); context.clip();
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, x - far, y - far, 2 * far, 2 * far);
    context.restore();
    context.lineWidth = 3 * ratio; context.beginPath(); context.arc(x, y, far, 0, 7); context.stroke();
    return;
  }
  for (const [radius, line] of [[9, 3], [17, 1.5]]) { context.lineWidth = line * ratio; context.beginPath(); context.arc(x, y, radius * ratio, 0, 7); context.stroke(); }
}

/** The picture of the input, for the ring. */
function loadPicture() {
  const src = theAnswer()?.shown.image;
  if ((picture?.getAttribute("src") ?? null) === (src ?? null)) return;
  picture = src ? h("img", { src, onload: () => looking("map") && map && compose() }) : null;
}

/** Another layer: the points wander to their new places. */
function move(before) {
  const start = performance.now();
  const between = new Float32Array(map.at.length);
  const [shades, frames] = [palette(), []];
  shape = [];
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return null;
  return new Promise((done) => {
    const step = (now) => {
      const share = Math.min(1, (now - start) / MOVING);
      const eased = share * share * (3 - 2 * share);
      for (let each = 0; each < between.length; each++) between[each] = before.at[each] + (map.at[each] - before.at[each]) * eased;
      paint(between, shades);
      frames.push(now);
      if (share < 1 && state.view === "map") requestAnimationFrame(step);
      else { canvas.dataset.frames = frames.map(Math.round).join(); done(); }
    };
    requestAnimationFrame(step);
  });
}

// -- the lasso --------------------------------------------------------------------------------

const where = (event) => { const box = canvas.getBoundingClientRect(); return [((event.clientX - box.left) / box.width) * canvas.width, ((event.clientY - box.top) / box.height) * canvas.height]; };
let pressed = false;

function press(event) {
  if (!map) return;
  pressed = true;
  chosen = null;
  shape = [where(event)];
  canvas.setPointerCapture(event.pointerId);
}

function hover(event) {
  if (!map) return;
  if (pressed) {
    shape.push(where(event));
    return compose();
  }
  const [x, y] = where(event);
  let [best, near] = [-1, NEAR * NEAR];
  for (let point = 0; point < map.count; point++) {
    const [left, top] = onScreen(map.at[2 * point] / 65535, map.at[2 * point + 1] / 65535);
    const far = (left - x) ** 2 + (top - y) ** 2;
    if (far < near) [best, near] = [point, far];
  }
  peek(best < 0 ? null : Number(map.examples[best]), event);
}

function release() {
  pressed = false;
  if (shape.length < 3) shape = [];
  enclose();
}

function enclose() {
  chosen = shape.length ? inside() : null;
  compose();
  showChosen();
}

let around = 0;

/** By keyboard, a ring around the input that grows and shrinks. */
function ring(event) {
  if (!map || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
  event.preventDefault();
  around = Math.max(0, Math.min(20, around + (event.key === "ArrowUp" ? 1 : -1)));
  const [x, y] = onScreen(...lampAt());
  const far = 0.025 * around * canvas.width;
  shape = far ? Array.from({ length: 48 }, (_, at) => [x + far * Math.cos((at * Math.PI) / 24), y + far * Math.sin((at * Math.PI) / 24)]) : [];
  enclose();
}

function inside() {
  const found = [];
  for (let point = 0; point < map.count; point++) {
    const [x, y] = onScreen(map.at[2 * point] / 65535, map.at[2 * point + 1] / 65535);
    let within = false;
    for (let at = 0, last = shape.length - 1; at < shape.length; last = at++) {
      const [[ax, ay], [bx, by]] = [shape[at], shape[last]];
      if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) within = !within;
    }
    if (within) found.push(point);
  }
  return found;
}

async function showChosen() {
  const some = chosen ?? lamp.order.slice(-24);
  const sum = some.reduce((total, point) => total + lamp.values[point], 0);
  const all = lamp.values.reduce((total, each) => total + each, 0);
  const biggest = [...some].sort((a, b) => lamp.light[b] - lamp.light[a]).slice(0, 24);
  const ids = some.map((point) => String(map.examples[point]));
  const number = (value) => (measure().signed ? signed(value) : shown(value));
  const parts = Object.entries(some.reduce((counts, point) => { const group = run.groups[map.per]?.[map.groups[point]]; if (group) counts[group.name] = (counts[group.name] ?? 0) + 1; return counts; }, {})).sort((a, b) => b[1] - a[1]).slice(0, 8);
  const rows = await Promise.all(biggest.map(async (point) => { const example = Number(map.examples[point]); const facts = await ask(`examples/${example}`).catch(() => null); return { example, value: lamp.values[point], shown: facts?.shown, ...(facts?.columns ?? {}) }; }));
  if (!looking("map")) return;
  const out = () => { const held = maskParts(); change({ view: "", mask: maskText({ ...held, example: [...new Set([...(held.example ?? []), ...ids])] }) }); };
  fill($("chosen"), h("h2", {}, chosen ? `${some.length.toLocaleString("en")} examples in the line add ${number(sum)}` : "The brightest points",
      h("span", { class: "quiet" }, chosen ? `of ${number(all)} from all ${map.count.toLocaleString("en")}${parts.length ? `; ${map.per} ${parts.map(([name, count]) => `${name}: ${count.toLocaleString("en")}`).join(", ")}` : ""}` : ""),
      chosen?.length && !run.no_masks ? h("button", { id: "mask-chosen", disabled: some.length > MOST_MASKED, title: some.length > MOST_MASKED ? `An address holds at most ${MOST_MASKED}: draw a smaller line` : "See the answer without these", onclick: out }, "Leave these out") : null,
      chosen?.length && run.audit ? h("button", { id: "audit-chosen", disabled: some.length > MOST_MASKED, onclick: () => change({ view: "audit", where: `example=${ids.join(",")}`, suspect: "" }) }, "Audit these") : null),
    rows.length ? rowsOf("", rows, "", { signed: measure().signed }, measure().title) : h("p", { class: "empty" }, "No point is in the line."));
  document.body.dataset.chosen = String(chosen?.length ?? "");
}
