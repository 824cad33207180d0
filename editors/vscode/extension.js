// Programs of DProbes in VS Code: what `dprobes lsp` says of them, as diagnostics, completions, hovers and definitions.

"use strict";

const vscode = require("vscode");
const { Client } = require("./client.js");

const LANGUAGES = ["dprobes-c", "dprobes"];
const TRIGGERS = [":", "@", ".", " ", '"'];

let client;

function isOurs(document) {
  return LANGUAGES.includes(document.languageId);
}

function toRange(range) {
  return new vscode.Range(range.start.line, range.start.character, range.end.line, range.end.character);
}

function toDiagnostic(found) {
  // The protocol counts severities from 1, the editor from 0.
  const diagnostic = new vscode.Diagnostic(toRange(found.range), found.message, (found.severity ?? 1) - 1);
  diagnostic.source = found.source;
  diagnostic.relatedInformation = (found.relatedInformation ?? []).map(
    ({ location, message }) =>
      new vscode.DiagnosticRelatedInformation(
        new vscode.Location(vscode.Uri.parse(location.uri), toRange(location.range)),
        message,
      ),
  );
  return diagnostic;
}

function toCompletion(found) {
  const item = new vscode.CompletionItem(found.label, (found.kind ?? 1) - 1);
  item.detail = found.detail;
  if (found.textEdit) {
    item.insertText = found.textEdit.newText;
    item.range = toRange(found.textEdit.range);
    item.filterText = found.textEdit.newText;
  }
  return item;
}

function toLocation(found) {
  return found && new vscode.Location(vscode.Uri.parse(found.uri), toRange(found.range));
}

function toHover(found) {
  return found && new vscode.Hover(new vscode.MarkdownString(found.contents.value), toRange(found.range));
}

async function activate(context) {
  const shown = vscode.languages.createDiagnosticCollection("dprobes");
  const settings = vscode.workspace.getConfiguration("dprobes");
  const [command, ...args] = settings.get("server", ["dprobes", "lsp"]);
  client = new Client(command, args, {
    onNotification(method, { uri, diagnostics }) {
      if (method === "textDocument/publishDiagnostics") shown.set(vscode.Uri.parse(uri), diagnostics.map(toDiagnostic));
    },
    onEnd(reason) {
      vscode.window.showErrorMessage(`DProbes: ${reason}`);
    },
  });
  context.subscriptions.push(shown, { dispose: () => client.stop() });
  try {
    await client.start(vscode.workspace.workspaceFolders?.[0]?.uri.toString() ?? null);
  } catch {
    return; // why has been said
  }

  const opened = (document) => {
    if (!isOurs(document)) return;
    const { languageId, version } = document;
    const text = document.getText();
    client.tell("textDocument/didOpen", { textDocument: { uri: document.uri.toString(), languageId, version, text } });
  };
  const ask = (method, document, position) =>
    client
      .ask(`textDocument/${method}`, {
        textDocument: { uri: document.uri.toString() },
        position: { line: position.line, character: position.character },
      })
      .catch(() => null);

  context.subscriptions.push(
    vscode.workspace.onDidOpenTextDocument(opened),
    vscode.workspace.onDidChangeTextDocument(({ document }) => {
      if (!isOurs(document)) return;
      client.tell("textDocument/didChange", {
        textDocument: { uri: document.uri.toString(), version: document.version },
        contentChanges: [{ text: document.getText() }],
      });
    }),
    vscode.workspace.onDidCloseTextDocument((document) => {
      if (!isOurs(document)) return;
      client.tell("textDocument/didClose", { textDocument: { uri: document.uri.toString() } });
      shown.delete(document.uri);
    }),
    vscode.languages.registerHoverProvider(LANGUAGES, {
      provideHover: async (document, position) => toHover(await ask("hover", document, position)),
    }),
    vscode.languages.registerDefinitionProvider(LANGUAGES, {
      provideDefinition: async (document, position) => toLocation(await ask("definition", document, position)),
    }),
    vscode.languages.registerCompletionItemProvider(
      LANGUAGES,
      {
        provideCompletionItems: async (document, position) =>
          ((await ask("completion", document, position)) ?? []).map(toCompletion),
      },
      ...TRIGGERS,
    ),
  );
  vscode.workspace.textDocuments.forEach(opened);
}

function deactivate() {
  return client?.stop();
}

module.exports = { activate, deactivate };
