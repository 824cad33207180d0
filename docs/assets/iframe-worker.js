// The search of pages that are opened from a disk. Browsers start no workers there, so that the worker's script runs in
// a hidden frame. The site loads this file in place of the script that Material's plugin "offline" loads from a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      this.loaded = new Promise(resolve => {
        const script = this.scope.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        this.scope.document.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
