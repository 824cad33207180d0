// A client of the language server protocol: starts "dprobes lsp", and talks to it on its standard input and output.
//
// It knows nothing of the editor, and needs no package.

"use strict";

const { spawn } = require("node:child_process");

const METHOD_NOT_FOUND = -32601;

class Client {
  // `onNotification(method, parameters)` hears what the server says by itself, `onEnd(reason)` that it has ended.
  constructor(command, args, { onNotification, onEnd }) {
    this._waiting = new Map();
    this._number = 0;
    this._received = Buffer.alloc(0);
    this._onNotification = onNotification;
    this._hasEnded = false;
    this._isStopping = false;
    this._process = spawn(command, args, { stdio: ["pipe", "pipe", "pipe"] });
    const said = [];
    this._process.stderr.on("data", (data) => said.push(data) > 20 && said.shift());
    this._process.stdout.on("data", (data) => this._take(data));
    this._process.stdin.on("error", () => {}); // the end of the process is told below
    const end = (reason) => {
      if (this._hasEnded) return;
      this._hasEnded = true;
      for (const { reject } of this._waiting.values()) reject(new Error(reason));
      this._waiting.clear();
      if (!this._isStopping) onEnd(reason);
    };
    this._process.on("error", (error) => end(`'${command}' cannot be started: ${error.message}`));
    this._process.on("close", (code) => {
      end(Buffer.concat(said).toString().trim() || `'${command}' has ended with status ${code}`);
    });
  }

  async start(rootUri) {
    const capabilities = { textDocument: { hover: { contentFormat: ["markdown"] }, publishDiagnostics: {} } };
    const answer = await this.ask("initialize", { processId: process.pid, rootUri, capabilities });
    this.tell("initialized", {});
    return answer.capabilities;
  }

  async stop() {
    this._isStopping = true;
    if (this._hasEnded) return;
    const ended = new Promise((resolve) => this._process.once("close", resolve));
    const timer = setTimeout(() => this._process.kill(), 2000);
    await this.ask("shutdown", null).catch(() => {});
    this.tell("exit", null);
    await ended;
    clearTimeout(timer);
  }

  ask(method, params) {
    if (this._hasEnded) return Promise.reject(new Error("the language server has ended"));
    const id = ++this._number;
    return new Promise((resolve, reject) => {
      this._waiting.set(id, { resolve, reject });
      this._send({ id, method, params });
    });
  }

  tell(method, params) {
    if (!this._hasEnded) this._send({ method, params });
  }

  _send(message) {
    const body = Buffer.from(JSON.stringify({ jsonrpc: "2.0", ...message }));
    this._process.stdin.write(Buffer.concat([Buffer.from(`Content-Length: ${body.length}\r\n\r\n`), body]));
  }

  // Messages come in pieces of any size: a head with the length of the body, an empty line, the body.
  _take(data) {
    this._received = Buffer.concat([this._received, data]);
    for (;;) {
      const end = this._received.indexOf("\r\n\r\n");
      if (end < 0) return;
      const length = /content-length: *(\d+)/i.exec(this._received.toString("latin1", 0, end));
      const start = end + 4;
      const next = start + (length === null ? 0 : Number(length[1]));
      if (this._received.length < next) return;
      const body = this._received.toString("utf8", start, next);
      this._received = this._received.subarray(next);
      if (length !== null) this._receive(JSON.parse(body));
    }
  }

  _receive(message) {
    if (message.method === undefined) {
      const waiting = this._waiting.get(message.id);
      this._waiting.delete(message.id);
      if (waiting === undefined) return;
      if (message.error) waiting.reject(new Error(message.error.message));
      else waiting.resolve(message.result);
    } else if (message.id !== undefined) {
      this._send({ id: message.id, error: { code: METHOD_NOT_FOUND, message: `no '${message.method}' here` } });
    } else {
      this._onNotification(message.method, message.params);
    }
  }
}

module.exports = { Client };
