// Browsers start no worker from a file: there, the script of the search runs in a frame.
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(file) {
    super();
    const frame = document.body.appendChild(document.createElement("iframe"));
    const { contentWindow: inside, contentDocument: content } = frame;
    const script = content.body.appendChild(content.createElement("script"));
    const started = new Promise((done) => { script.onload = done; });
    const send = (to, data) => to.dispatchEvent(new MessageEvent("message", { data }));
    frame.hidden = true;
    inside.postMessage = (data) => send(this, data);
    this.postMessage = (data) => started.then(() => send(inside, data));
    script.src = new URL(file, location);
  }
};
