// The page in a notebook: a frame, and between it and the kernel the notebook's own connection. No port is needed.

export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.sandbox = "allow-scripts allow-downloads";
    frame.title = "Spotlights";
    frame.style.cssText = `width: 100%; height: ${model.get("height")}px; border: 1px solid #8884`;
    frame.srcdoc = model.get("page");
    const asked = ({ data, source }) => { if (source === frame.contentWindow && data?.spotlights) model.send(data.spotlights); };
    const answered = (answer) => frame.contentWindow?.postMessage(answer, "*");
    addEventListener("message", asked);
    model.on("msg:custom", answered);
    el.append(frame);
    return () => { removeEventListener("message", asked); model.off("msg:custom", answered); };
  },
};
