// The charts: a waterfall, a mosaic, a cumulative curve, values over training. They know numbers and names, and no server.

import { shown, signed } from "./dom.js";
import { chart, colour, pressed, s, scale, text, ticks } from "./svg.js";

const [ROW, TALL, FILLED] = [27, 84, 400];
const cut = (name, most) => (String(name).length > most ? `${String(name).slice(0, Math.max(1, most - 1))}…` : String(name));
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/**
 * A sum, row by row. Rows: {key, name, value, kept, dot, title, act, out}. `kept` is what is left of the value under a mask.
 * `sum`: the rows lead from one number to another. Without it each row begins at zero. `plain`: nothing speaks for or
 * against. `beside`: the rows of other charts that are to have the same scale.
 */
export function waterfall(place, rows, { sum = null, label, open = null, whole = null, plain = false, beside = [] }) {
  const before = new Map([...place.querySelectorAll("[data-key] .solid")].map((bar) => [bar.parentNode.dataset.key, [bar.getAttribute("x"), bar.getAttribute("width")]]));
  const width = Math.max(240, place.clientWidth);
  const names = Math.min(Math.max(...rows.map(({ name }) => 7.2 * String(name).length + 26), 70), (width < 460 ? 0.4 : 0.34) * width, 230);
  const numbers = width < 460 ? 62 : 78;
  const high = Math.max(ROW, Math.min(TALL, Math.floor(Math.min(FILLED, 0.8 * width) / rows.length))); // few rows are taller: the chart fills its place
  const placed = (list) => {
    let at = 0;
    return list.map((row) => {
      const from = !sum || row.absolute ? 0 : at;
      const to = from + row.kept;
      if (sum) at = row.absolute ? row.kept : to;
      return { ...row, from, to, ghost: from + row.value };
    });
  };
  const bars = placed(rows);
  const all = [...bars, ...placed(beside)].flatMap(({ from, to, ghost, absolute }) => (absolute ? [to, 0] : [from, to, ghost]));
  const x = scale([Math.min(0, ...all), Math.max(0, ...all)], [names + 8, width - numbers - 8]);
  const parts = bars.map((bar, number) => {
    const y = 4 + number * high;
    const tone = bar.absolute ? colour("ink") : plain ? colour("accent") : bar.kept >= 0 ? colour("for") : colour("against");
    const [left, right] = [Math.min(x(bar.from), x(bar.to)), Math.max(x(bar.from), x(bar.to))];
    const less = bar.kept !== bar.value;
    const solid = s("rect", { class: "solid", x: left, width: Math.max(1.5, right - left), y: y + 4, height: high - 8, rx: 3, fill: tone });
    const old = before.get(bar.key);
    if (old && !still()) solid.animate([{ x: `${old[0]}px`, width: `${old[1]}px` }, { x: `${left}px`, width: `${Math.max(1.5, right - left)}px` }], { duration: 420, easing: "ease-in-out" });
    return s("g", { "data-key": bar.key, "data-value": bar.kept, class: bar.act ? "row can" : "row", role: bar.act ? "button" : "img", tabindex: bar.act ? 0 : null, "aria-label": bar.title, "aria-pressed": bar.act ? String(bar.key === open) : null,
      onclick: bar.act ?? null, onkeydown: bar.act ? (event) => { if (event.key === "x" && bar.out) { event.stopPropagation(); bar.out(); } else pressed(bar.act)(event); } : null },
      s("title", {}, bar.title),
      s("rect", { class: "ground", x: 0, y, width, height: high, fill: bar.key === open ? colour("chosen") : "transparent", rx: 4 }),
      bar.dot ? s("circle", { cx: 9, cy: y + high / 2, r: 4.5, fill: bar.dot }) : null,
      text(bar.dot ? 19 : 5, y + high / 2 + 0.5, cut(bar.name, Math.floor((names - 22) / 7)), { "font-weight": bar.absolute ? 650 : 450, fill: less && !bar.kept ? colour("quiet") : colour("ink") }),
      less ? s("rect", { x: Math.min(x(bar.from), x(bar.ghost)), width: Math.abs(x(bar.ghost) - x(bar.from)), y: y + 4.5, height: high - 9, rx: 3, fill: "none", stroke: colour("caution"), "stroke-dasharray": "3 3" }) : null,
      solid,
      text(width - 4, y + high / 2 + 0.5, bar.absolute || plain ? shown(bar.kept) : signed(bar.kept), { "text-anchor": "end", fill: tone, "font-weight": bar.absolute ? 700 : 500, "font-size": 13, style: "font-variant-numeric: tabular-nums" }));
  });
  const lines = sum ? bars.slice(0, -1).map(({ to }, number) => s("line", { x1: x(to), x2: x(to), y1: 4 + number * high + high - 4, y2: 8 + (number + 1) * high, stroke: colour("quiet"), "stroke-width": 1 })) : [];
  const zero = s("line", { x1: x(0), x2: x(0), y1: 2, y2: 4 + rows.length * high, stroke: colour("faint") });
  const mark = whole === null ? null : s("line", { x1: x(whole), x2: x(whole), y1: 2, y2: 4 + rows.length * high, stroke: colour("caution"), "stroke-dasharray": "2 4" });
  return chart(place, rows.length * high + 8, label, zero, mark, lines, parts);
}

// -- mosaics ----------------------------------------------------------------------------------

/** Rectangles in a box, as square as can be, with areas in proportion to the sizes (which come in descending order). */
export function squarify(sizes, box) {
  const total = sizes.reduce((sum, size) => sum + size, 0) || 1;
  let [left, top, wide, high] = box;
  const unit = (wide * high) / total;
  const placed = [];
  for (let first = 0; first < sizes.length;) {
    const short = Math.max(1e-9, Math.min(wide, high));
    const worst = (count) => {
      const row = sizes.slice(first, first + count).map((size) => size * unit);
      const sum = row.reduce((all, each) => all + each, 0);
      return Math.max((short * short * row[0]) / (sum * sum), (sum * sum) / (short * short * row.at(-1)));
    };
    let count = 1;
    while (first + count < sizes.length && worst(count + 1) <= worst(count)) count += 1;
    const row = sizes.slice(first, first + count).map((size) => size * unit);
    const deep = row.reduce((all, each) => all + each, 0) / short;
    let along = 0;
    for (const area of row) {
      const long = area / deep;
      placed.push(wide >= high ? [left, top + along, deep, long] : [left + along, top, long, deep]);
      along += long;
    }
    if (wide >= high) { left += deep; wide -= deep; } else { top += deep; high -= deep; }
    first += count;
  }
  return placed;
}

/** The words of a name as lines of some characters. */
function wrapped(name, most, count) {
  const found = [""];
  for (const word of String(name).split(/\s+/)) {
    if (`${found.at(-1)} ${word}`.trim().length <= most) found[found.length - 1] = `${found.at(-1)} ${word}`.trim();
    else found.push(word);
  }
  const kept = found.filter(Boolean).map((each) => cut(each, most));
  return kept.length > count ? [...kept.slice(0, count - 1), cut(`${kept[count - 1]} …`, most)] : kept;
}

const [STRIP, LENS] = [20, 18];

/** The tiles are one stop of the tab key; arrows go from one to the next. */
const among = (act) => (event) => {
  const by = { ArrowRight: "next", ArrowDown: "next", ArrowLeft: "previous", ArrowUp: "previous" }[event.key];
  if (!by) return pressed(act)(event);
  event.preventDefault();
  event.stopPropagation(); // elsewhere arrows go to another input
  const next = event.currentTarget[`${by}ElementSibling`];
  if (next?.classList.contains("tile")) next.focus();
};

/**
 * Examples as tiles, area by the size of their value. Above them is a strip for the whole group: the tiles are what a lens shows of
 * its first part, and `rest` are those that have no tile.
 */
export function mosaic(place, tiles, { label, height, ink, number = signed, plain = false }) {
  const width = Math.max(240, place.clientWidth);
  const ordered = tiles.filter(({ value, rest }) => value && !rest).sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const rests = tiles.filter(({ value, rest }) => value && rest);
  const size = (list) => list.reduce((sum, { value }) => sum + Math.abs(value), 0);
  const tone = ({ value }) => colour(plain ? "accent" : value >= 0 ? "for" : "against");
  const top = rests.length ? STRIP + LENS : 0;
  const x = scale([0, size(tiles)], [1, width - 1]);
  const seen = x(size(ordered));
  let at = size(ordered);
  const strip = rests.map((rest) => {
    const [left, right] = [x(at), x((at += Math.abs(rest.value)))];
    const told = [`${rest.rest} ${number(rest.value)}`, number(rest.value)].find((each) => 7 * each.length < right - left - 12);
    return s("g", { class: "rest", role: "img", "aria-label": rest.title }, s("title", {}, rest.title),
      s("rect", { x: left + 1, y: 0, width: Math.max(0.5, right - left - 1), height: STRIP, rx: 2, fill: tone(rest), "fill-opacity": 0.17 }),
      told ? text(right - 7, STRIP / 2 + 0.5, told, { "text-anchor": "end", "font-size": 12 }) : null);
  });
  const shade = tone(ordered[0] ?? { value: 1 });
  const lens = rests.length && ordered.length ? [s("rect", { x: 1, y: 0, width: Math.max(2, seen - 1), height: STRIP, rx: 2, fill: shade }),
    s("path", { d: `M1,${STRIP}L${Math.max(3, seen)},${STRIP}L${width - 1},${top}L1,${top}Z`, fill: shade, "fill-opacity": 0.13 })] : null;
  const boxes = squarify(ordered.map(({ value }) => Math.abs(value)), [1, top, width - 2, height - top - 1]);
  const drawn = ordered.map((tile, place) => {
    const [left, y, w, t] = boxes[place];
    const [wide, high] = [Math.max(0.5, w - 2), Math.max(0.5, t - 2)];
    const picture = tile.image && Math.min(w, t) > 9;
    const told = picture ? Math.min(w, t) > 62 : w > 52 && t > 40;
    const fits = told && w > 14 + 7.7 * number(tile.value).length;
    const words = !picture && told ? wrapped(tile.text, Math.floor((w - 12) / 6.7), Math.floor((t - 24) / 15)) : [];
    return s("g", { class: tile.act ? "tile can" : "tile", role: tile.act ? "button" : "img", tabindex: tile.act ? (place ? -1 : 0) : null, "aria-label": tile.title, "data-example": tile.example ?? "", opacity: tile.masked ? 0.25 : 1,
      onclick: tile.act ?? null, onkeydown: tile.act ? among(tile.act) : null, onpointerenter: tile.enter ?? null, onpointerleave: tile.leave ?? null, onfocus: tile.enter ?? null, onblur: tile.leave ?? null },
      s("title", {}, tile.title),
      s("rect", { x: left + 1, y: y + 1, width: wide, height: high, rx: 3, fill: tone(tile), "fill-opacity": picture ? 1 : 0.17 }),
      picture ? s("image", { href: tile.image, x: left + 3, y: y + 3, width: Math.max(1, wide - 4), height: Math.max(1, high - 4), preserveAspectRatio: "xMidYMid slice", style: `${tile.smooth ? "" : "image-rendering: pixelated;"}${ink ? "filter: invert(1)" : ""}` }) : null,
      picture && fits ? s("rect", { x: left + 3, y: y + t - 18, width: wide - 4, height: 15, fill: tone(tile), "fill-opacity": 0.86 }) : null,
      words.map((each, line) => text(left + 7, y + 14 + 15 * line, each, { "font-size": 12 })),
      fits ? text(picture ? left + w / 2 : left + 7, y + t - 10, number(tile.value), { "font-size": 12, "font-weight": 600, "text-anchor": picture ? "middle" : "start", fill: picture ? colour("paper") : tone(tile) }) : null);
  });
  return chart(place, height, label, lens, strip, drawn);
}

/** How many of the largest make how much of a sum. */
export function cumulative(place, { curve, half, side }) {
  const [width, height] = [Math.max(240, place.clientWidth), 92];
  const log = side > 50;
  const x = scale([log ? 0 : 1, log ? Math.log10(side) : Math.max(2, side)], [40, width - 12]);
  const at = (count) => x(log ? Math.log10(count) : count);
  const y = scale([0, 1], [height - 22, 8]);
  const path = curve.map(([count, share], number) => `${number ? "L" : "M"}${at(count).toFixed(1)},${y(share).toFixed(1)}`).join("");
  const marks = log ? ticks(0, Math.floor(Math.log10(side)), 5).filter(Number.isInteger).map((power) => 10 ** power) : ticks(1, side, 5).filter(Number.isInteger);
  return chart(place, height, `Cumulative curve: the ${half} largest of ${side} examples make half of the sum`,
    [0, 0.5, 1].map((share) => [s("line", { x1: 40, x2: width - 12, y1: y(share), y2: y(share), stroke: colour("faint") }), text(36, y(share), `${100 * share} %`, { "text-anchor": "end", "font-size": 12, fill: colour("quiet") })]),
    marks.map((count) => text(at(count), height - 9, count.toLocaleString("en"), { "text-anchor": "middle", "font-size": 12, fill: colour("quiet") })),
    s("path", { d: path, fill: "none", stroke: colour("accent"), "stroke-width": 2 }),
    s("circle", { cx: at(half), cy: y(0.5), r: 5, fill: colour("lamp"), stroke: colour("ink") }));
}

// -- over training ----------------------------------------------------------------------------

const stepped = (value) => Math.round(value).toLocaleString("en");

/** A frame over training steps: axes, and what is drawn in it; a drag marks a stretch of steps. */
export function overSteps(place, { steps, low, high, height, label, brushed = null, hovered = null, range = null, draw, name = "step", format = shown, foot = 22 }) {
  const width = Math.max(240, place.clientWidth);
  const [left, right, top, bottom] = [50, width - 10, 8, height - foot];
  const [x, y] = [scale([0, steps], [left, right]), scale([low, high], [bottom, top])];
  const step = (event) => { const box = svg.getBoundingClientRect(); return Math.max(0, Math.min(steps, ((event.clientX - box.left - left) / (right - left)) * steps)); };
  const band = s("rect", { y: top, height: bottom - top, x: range ? x(range[0]) : 0, width: range ? x(range[1]) - x(range[0]) : 0, fill: colour("lamp"), "fill-opacity": 0.25, "pointer-events": "none" });
  let begun = null;
  const over = s("rect", { class: "brush", x: left, y: top, width: right - left, height: bottom - top, fill: "transparent", style: brushed ? "cursor: crosshair" : "",
    onpointerdown: brushed ? (event) => { begun = step(event); over.setPointerCapture(event.pointerId); } : null,
    onpointermove: (event) => {
      const now = step(event);
      if (begun === null) return hovered?.(now, event);
      band.setAttribute("x", x(Math.min(begun, now)));
      band.setAttribute("width", Math.abs(x(now) - x(begun)));
    },
    onpointerup: brushed ? (event) => { const [from, to] = [begun, step(event)].sort((a, b) => a - b); begun = null; brushed(to - from > steps / 200 ? [from, to] : null, from); } : null,
    onpointerleave: () => hovered?.(null) });
  const svg = chart(place, height, label,
    ticks(low, high, 4).map((value) => [s("line", { x1: left, x2: right, y1: y(value), y2: y(value), stroke: colour(value ? "faint" : "quiet") }), text(left - 5, y(value), format(value), { "text-anchor": "end", "font-size": 12, fill: colour("quiet") })]),
    ticks(0, steps, Math.max(2, Math.floor(width / 130))).map((value) => text(x(value), height - 9, `${value ? "" : `${name} `}${stepped(value)}`, { "text-anchor": value === 0 ? "start" : value > 0.93 * steps ? "end" : "middle", "font-size": 12, fill: colour("quiet") })),
    draw(x, y), band, over);
  return svg;
}

/** A line or an area through points. */
export function line(points, x, y, { fill = null, stroke = null, dash = null, width = 2, base = null } = {}) {
  const path = points.map(([at, value], number) => `${number ? "L" : "M"}${x(at).toFixed(1)},${y(value).toFixed(1)}`).join("");
  const closed = base ? `${path}${[...base].reverse().map(([at, value]) => `L${x(at).toFixed(1)},${y(value).toFixed(1)}`).join("")}Z` : path;
  return s("path", { d: closed, fill: fill ?? "none", stroke: stroke ?? "none", "stroke-width": width, "stroke-dasharray": dash, "stroke-linejoin": "round", "pointer-events": "none" });
}
