// Drawing and uploading: any picture becomes the small grey image that the network takes.

import { attempt, fill, h } from "./dom.js";
import { ask_about, run } from "./state.js";

const SCALE = 10;

export function drawingWay(upload) {
  const { width, height } = run.drawing;
  const pad = h("canvas", { width: width * SCALE, height: height * SCALE, class: "pad ink", id: "pad",
    "aria-label": "Draw here with the mouse or a finger" });
  const context = pad.getContext("2d", { willReadFrequently: true });
  const clear = () => { context.fillStyle = "#000"; context.fillRect(0, 0, pad.width, pad.height); };
  clear();
  const place = h("div", { id: "drawing-problem" });
  const send = async () => {
    const pixels = upload ? shrunk(context, width, height) : centred(context, width, height);
    if (!pixels) return;
    fill(place);
    ask_about(`pixels:${await packed(pixels)}`);
  };
  if (upload) {
    const take = async (file) => {
      if (!file) return;
      const image = await createImageBitmap(file).catch(() => { throw new Error("This file is no image that the browser can read."); });
      pad.hidden = false;
      clear();
      const factor = Math.min(pad.width / image.width, pad.height / image.height);
      const [wide, high] = [Math.round(image.width * factor), Math.round(image.height * factor)];
      const box = [Math.round((pad.width - wide) / 2), Math.round((pad.height - high) / 2), wide, high];
      context.fillStyle = "#fff"; // under what is transparent
      context.fillRect(...box);
      context.drawImage(image, ...box);
      onlyInk(context, box);
      await send();
    };
    pad.hidden = true;
    return [h("p", {}, h("input", { type: "file", accept: "image/*", id: "file", "aria-label": "Image file", onchange: (event) => attempt(place, () => take(event.target.files[0])) })), pad, place,
      h("p", { class: "quiet" }, `Becomes ${width} × ${height} grey pixels; what its edge looks like counts as empty paper. It goes to this explorer and nowhere else.`)];
  }
  let drawing = false;
  const point = (event) => {
    const box = pad.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * pad.width, ((event.clientY - box.top) / box.height) * pad.height];
  };
  pad.addEventListener("pointerdown", (event) => {
    drawing = true;
    pad.setPointerCapture(event.pointerId);
    context.beginPath();
    context.moveTo(...point(event));
  });
  pad.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    context.strokeStyle = "#fff";
    context.lineWidth = 0.085 * pad.width;
    context.lineCap = context.lineJoin = "round";
    context.lineTo(...point(event));
    context.stroke();
  });
  pad.addEventListener("pointerup", () => { drawing = false; attempt(place, send); });
  return [pad, h("p", {}, h("button", { id: "clear", onclick: clear }, "Clear")), place,
    h("p", { class: "quiet" }, "Draw with the mouse or a finger. It is centred and made as small as the network's images.")];
}

/** Leaves of a picture what differs from its edge, as light on black: the network knows ink, be the paper white, grey or dark. */
function onlyInk(context, [left, top, width, height]) {
  const image = context.getImageData(left, top, width, height);
  const level = (at) => (image.data[4 * at] + image.data[4 * at + 1] + image.data[4 * at + 2]) / 3;
  const levels = Float32Array.from({ length: width * height }, (_, at) => level(at));
  const edge = levels.filter((_, at) => at < width || at >= width * (height - 1) || at % width === 0 || at % width === width - 1).sort();
  const ground = edge[edge.length >> 1];
  const light = ground > 127 ? -1 : 1;
  const most = levels.reduce((far, each) => Math.max(far, light * (each - ground)), 1);
  levels.forEach((each, at) => image.data.fill((255 * Math.max(0, light * (each - ground))) / most, 4 * at, 4 * at + 3));
  context.putImageData(image, left, top);
}

function grey(canvas, width, height) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  return Uint8Array.from({ length: width * height }, (_, at) => Math.round((data[4 * at] + data[4 * at + 1] + data[4 * at + 2]) / 3));
}

function smaller(source, box, width, height, to) {
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillRect(0, 0, width, height);
  context.drawImage(source, ...box, ...to);
  return canvas;
}

const shrunk = (context, width, height) =>
  grey(smaller(context.canvas, [0, 0, context.canvas.width, context.canvas.height], width, height, [0, 0, width, height]), width, height);

/** As MNIST's digits were made: the ink fits a box of 20 of 28 pixels, its centre of mass in the middle. */
function centred(context, width, height) {
  const pad = context.canvas;
  const { data } = context.getImageData(0, 0, pad.width, pad.height);
  let [left, top, right, bottom, mass, sumX, sumY] = [pad.width, pad.height, -1, -1, 0, 0, 0];
  for (let y = 0; y < pad.height; y++) for (let x = 0; x < pad.width; x++) {
    const ink = data[4 * (y * pad.width + x)];
    if (!ink) continue;
    left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y);
    mass += ink; sumX += ink * x; sumY += ink * y;
  }
  if (!mass) return null;
  const factor = ((20 / 28) * Math.min(width, height)) / Math.max(right - left + 1, bottom - top + 1);
  const x = width / 2 - (sumX / mass - left) * factor;
  const y = height / 2 - (sumY / mass - top) * factor;
  const box = [left, top, right - left + 1, bottom - top + 1];
  return grey(smaller(pad, box, width, height, [x, y, box[2] * factor, box[3] * factor]), width, height);
}

/** The bytes, deflated and in base64url: small enough for an address. */
async function packed(pixels) {
  const stream = new Blob([pixels]).stream().pipeThrough(new CompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  if (bytes.length > 40000) throw new Error("This image is too detailed for an address. Take a smaller one.");
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
