// The figures: sorted values by group, totals by group, and totals over training time. One look for all.

import { h, shown } from "./dom.js";

let colours;

export function setUpPlots(palette) {
  colours = palette;
}

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false };

function layout(more) {
  const axis = { gridcolor: colours.faint, zerolinecolor: colours.quiet, linecolor: colours.quiet, fixedrange: true, tickfont: { size: 10.5 } };
  const { xaxis, yaxis, ...rest } = more;
  return {
    margin: { l: 46, r: 6, t: 6, b: 28 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", showlegend: false, hovermode: "closest", dragmode: false,
    font: { family: "system-ui, sans-serif", size: 11, color: colours.ink }, hoverlabel: { bgcolor: "#fff", bordercolor: colours.quiet },
    xaxis: { ...axis, showgrid: false, zeroline: false, ...xaxis }, yaxis: { ...axis, nticks: 6, ...yaxis }, ...rest,
  };
}

const LONGEST = 13;

/** A name that fits under an axis: the last words say most. */
function short(name) {
  let words = String(name).split(" ");
  while (words.length > 1 && words.join(" ").length > LONGEST) words = words.slice(1);
  const text = words.join(" ");
  return text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text;
}

const faded = (colour) => `${colour}55`;

const large = (values) => (values.some((value) => Math.abs(value) >= 1000) ? "~s" : "~g");

/** The largest values of each group in descending order, side by side: the paper's figures 4 and 6. */
export function drawSorted(place, found, names) {
  const { groups, values, examples, slots } = found.sorted;
  const widest = Math.max(1, ...values.map((each) => each.length));
  const gap = Math.max(1, 0.05 * widest);
  const traces = groups.map((group, number) => {
    const { name, colour } = names(group, number);
    return {
      x: values[number].map((_, rank) => number * (widest + gap) + rank), y: values[number], type: "scatter", mode: "lines", fill: "tozeroy",
      line: { color: colour, width: 1.4, shape: "hv" }, fillcolor: faded(colour), name, hoverinfo: "none",
      customdata: values[number].map((_, rank) => [examples[number][rank], slots[number][rank]]),
    };
  });
  traces.push({ x: [], y: [], type: "scatter", mode: "markers", marker: { color: "#ffa90e", size: 8, line: { color: colours.ink, width: 1 } }, hoverinfo: "none" });
  const ticks = groups.map((_, number) => number * (widest + gap) + widest / 2);
  const texts = groups.map((group, number) => short(names(group, number).name));
  const tilted = texts.some((text) => text.length > 3) && texts.length > 4;
  return Plotly.react(place, traces, layout({
    xaxis: { tickvals: ticks, ticktext: texts, tickangle: tilted ? -35 : 0, range: [-gap, groups.length * (widest + gap)] },
    yaxis: { tickformat: large(values.flat()) },
    margin: { l: 46, r: 6, t: 6, b: tilted ? 62 : 28 },
  }), CONFIG);
}

/** Marks an example's points in the sorted figure. */
export function markSorted(place, found, what) {
  if (!place.data) return;
  const x = [];
  const y = [];
  if (what) place.data.slice(0, -1).forEach((trace) => trace.customdata.forEach(([example, slot], rank) => {
    const same = found.by === "slot" && what.slot !== undefined && what.slot !== null ? slot === what.slot : example === what.example;
    if (same) { x.push(trace.x[rank]); y.push(trace.y[rank]); }
  }));
  Plotly.restyle(place, { x: [x], y: [y] }, [place.data.length - 1]);
}

export function drawTotals(place, found, column, names, masked) {
  const rows = found.totals[column] ?? [];
  const looks = rows.map((row, number) => names(row.value, number));
  const colour = rows.map((row, number) => (found.signed ? (row.total >= 0 ? colours.for : colours.against) : looks[number].colour));
  const tilted = looks.some(({ name }) => name.length > 3) && looks.length > 4;
  return Plotly.react(place, [{
    x: rows.map((_, number) => number), y: rows.map((row) => row.total), type: "bar", customdata: rows.map((row) => row.value),
    marker: { color: colour, opacity: rows.map((row) => (masked(row.value) ? 0.25 : 1)), line: { width: 0 } },
    hovertext: rows.map((row, number) => `${looks[number].name}: ${shown(row.total)}<br>${row.slots.toLocaleString("en")} slots<br>click to leave it out`),
    hoverinfo: "text",
  }], layout({
    xaxis: { tickvals: rows.map((_, number) => number), ticktext: looks.map(({ name }) => short(name)), tickangle: tilted ? -35 : 0, range: [-0.6, rows.length - 0.4] },
    yaxis: { tickformat: large(rows.map((row) => row.total)) },
    margin: { l: 46, r: 6, t: 6, b: tilted ? 62 : 28 }, bargap: 0.25,
  }), CONFIG);
}

/** Totals over training time: the chosen layer filled, the others as lines, each as a share of its own sum of sizes. */
export function drawTime(place, layers, chosen, range, visits) {
  const dashes = ["dot", "dash", "dashdot"];
  const traces = layers.map((each, number) => {
    const sum = each.totals.reduce((total, value) => total + Math.abs(value), 0) || 1;
    const width = each.steps / each.totals.length;
    const here = each.layer === chosen;
    return {
      x: each.starts.map((start) => start + width / 2), y: each.totals.map((value) => (100 * value) / sum), type: "scatter", mode: "lines", name: each.layer,
      line: { color: here ? colours.classes[0] : colours.quiet, width: here ? 2 : 1, dash: here ? "solid" : dashes[number % 3], shape: "hvh" },
      fill: here ? "tozeroy" : "none", fillcolor: faded(colours.classes[0]),
      hovertemplate: `${each.layer}, around step %{x:,.0f}: %{y:.2f} %<extra></extra>`,
    };
  }).sort((a, b) => (a.name === chosen) - (b.name === chosen));
  const shapes = (visits ?? []).map((step) => ({ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: "#ffa90e", width: 2 } }));
  if (range) shapes.push({ type: "rect", x0: range[0], x1: range[1], yref: "paper", y0: 0, y1: 1, fillcolor: "#ffa90e33", line: { width: 0 } });
  return Plotly.react(place, traces, layout({
    dragmode: "select", selectdirection: "h", shapes, showlegend: layers.length > 1,
    legend: { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", font: { size: 10 } },
    xaxis: { range: [0, layers[0].steps], tickformat: ",d" }, yaxis: { ticksuffix: " %", tickformat: "", nticks: 4 }, margin: { l: 46, r: 6, t: layers.length > 1 ? 20 : 6, b: 22 },
    newselection: { line: { color: colours.ink, width: 1 } },
  }), CONFIG);
}

/** The buttons that take a figure away. */
export function takeAway(place, name) {
  const save = (format) => () => Plotly.downloadImage(place, { format, filename: name, width: Math.max(640, place.clientWidth), height: Math.max(260, place.clientHeight), scale: format === "png" ? 2 : 1 });
  return h("span", { class: "links" }, ["png", "svg"].map((format) => h("button", { onclick: save(format), title: `Download this figure as ${format.toUpperCase()}` }, format.toUpperCase())));
}
