// Search needs a Worker, and browsers refuse workers on file:// pages. There, run its script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.deliver = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inner.document.open();
      inner.document.write(`<body><script>
        var postMessage = (data) => deliver(data);
        var importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script");
          script.src = url; script.onload = done; script.onerror = failed;
          document.body.appendChild(script);
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script></body>`);
      inner.document.close();
      this.ready = new Promise((done) => (inner.onload = done));
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
