"""The extension for VS Code, in Node.js with an editor that only writes down what it is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.support import TIMEOUT

pytest.importorskip("pygls", reason="needs pygls: pip install 'dprobes[lsp]'")

EXTENSION = Path(__file__).parents[2] / "editors" / "vscode"

EDITOR = """
const plain = (name) => class { constructor(...values) { Object.assign(this, { is: name, values }); } };
const providers = {}, listeners = {}, errors = [], diagnostics = new Map();
const nothing = { dispose() {} };
const provider = (kind) => (languages, it) => ((providers[kind] = it), nothing);
const listener = (kind) => (it) => ((listeners[kind] = it), nothing);
class MarkdownString { constructor(value) { this.value = value; } }
class Range {
  constructor(...numbers) { this.numbers = numbers; }
}
module.exports = {
  providers, listeners, errors, diagnostics, Range, MarkdownString,
  Diagnostic: class { constructor(range, message, severity) { Object.assign(this, { range, message, severity }); } },
  Location: plain("location"), Hover: plain("hover"), DiagnosticRelatedInformation: plain("related"),
  CompletionItem: class { constructor(label, kind) { Object.assign(this, { label, kind }); } },
  Uri: { parse: (text) => ({ toString: () => text, toJSON: () => text }) },
  window: { showErrorMessage: (text) => errors.push(text) },
  languages: {
    createDiagnosticCollection: () => ({
      set: (uri, found) => diagnostics.set(uri.toString(), found),
      delete: (uri) => diagnostics.delete(uri.toString()),
      dispose() {},
    }),
    registerHoverProvider: provider("hover"),
    registerDefinitionProvider: provider("definition"),
    registerCompletionItemProvider: provider("completion"),
  },
  workspace: {
    textDocuments: [],
    getConfiguration: () => ({ get: (name, otherwise) => JSON.parse(process.env.SERVER ?? "null") ?? otherwise }),
    onDidOpenTextDocument: listener("open"),
    onDidChangeTextDocument: listener("change"),
    onDidCloseTextDocument: listener("close"),
  },
};
"""
SESSION = """
const vscode = require("vscode");
const extension = require(process.env.EXTENSION);
const document = (version, text) => ({
  languageId: "dprobes-c", version, getText: () => text,
  uri: { toString: () => "file:///tmp/edited.dpc" },
});
const until = async (holds) => {
  while (!holds()) await new Promise((resolve) => setTimeout(resolve, 10));
};
const shown = () => vscode.diagnostics.get("file:///tmp/edited.dpc");
(async () => {
  const said = {};
  const subscriptions = [];
  const wrong = document(1, "libc.so.6:malloc(size) {\\n    @ = sum(siz);\\n}\\n");
  vscode.workspace.textDocuments.push(wrong, { ...wrong, languageId: "python" });
  await extension.activate({ subscriptions });
  said.errors = vscode.errors;
  if (vscode.errors.length === 0) {
    await until(() => shown() !== undefined);
    said.wrong = shown();
    const right = document(2, "libc.so.6:malloc(size) {\\n    @ = sum(size);\\n}\\n");
    vscode.listeners.change({ document: right });
    await until(() => shown().length === 0);
    said.hover = await vscode.providers.hover.provideHover(right, { line: 1, character: 13 });
    said.nothing = (await vscode.providers.hover.provideHover(right, { line: 2, character: 0 })) ?? null;
    said.definition = await vscode.providers.definition.provideDefinition(right, { line: 1, character: 13 });
    const completions = await vscode.providers.completion.provideCompletionItems(right, { line: 1, character: 14 });
    said.completion = completions.find((each) => each.label === "size");
    vscode.listeners.close(right);
    said.left = vscode.diagnostics.size;
  }
  await extension.deactivate();
  console.log(JSON.stringify(said));
})();
"""


def session(directory: Path, server: list[str]) -> dict[str, Any]:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    package = directory / "node_modules" / "vscode"
    package.mkdir(parents=True)
    (package / "index.js").write_text(EDITOR)
    (directory / "session.js").write_text(SESSION)
    environment = {
        **os.environ,
        "NODE_PATH": str(directory / "node_modules"),
        "EXTENSION": str(EXTENSION),
        "SERVER": json.dumps(server),
    }
    done = subprocess.run(
        ["node", directory / "session.js"], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_the_editor_is_told_what_the_server_says(tmp_path: Path) -> None:
    said = session(tmp_path, [sys.executable, "-m", "dprobes", "lsp"])
    (wrong,) = said["wrong"]
    assert wrong["message"] == "'siz' is not defined\nhint: did you mean 'size'?"
    assert (wrong["severity"], wrong["source"], wrong["range"]["numbers"]) == (0, "dprobes", [1, 12, 1, 15])
    hover, range_ = said["hover"]["values"]
    assert "  // size\n" in hover["value"]
    assert range_["numbers"] == [1, 12, 1, 16]
    assert said["nothing"] is None
    assert said["definition"]["values"][0] == "file:///tmp/edited.dpc"
    assert said["definition"]["values"][1]["numbers"] == [0, 17, 0, 21]
    assert said["completion"]["range"]["numbers"] == [1, 12, 1, 14]
    assert (said["errors"], said["left"]) == ([], 0)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (["/nowhere/dprobes", "lsp"], "DProbes: '/nowhere/dprobes' cannot be started: spawn /nowhere/dprobes ENOENT"),
        (["sh", "-c", "echo 'needs pygls' >&2; exit 1"], "DProbes: needs pygls"),
        (["sh", "-c", "exit 3"], "DProbes: 'sh' has ended with status 3"),
    ],
)
def test_a_server_that_does_not_start_is_said(tmp_path: Path, server: list[str], message: str) -> None:
    assert session(tmp_path, server)["errors"] == [message]


def test_the_package_names_files_that_are_there() -> None:
    package = json.loads((EXTENSION / "package.json").read_text())
    contributes = package["contributes"]
    files = [package["main"], *(each["configuration"] for each in contributes["languages"])]
    files += [each["path"] for each in contributes["grammars"]]
    for name in files:
        path = EXTENSION / name
        assert path.is_file()
        if path.suffix == ".json":
            json.loads(path.read_text())
    assert {each["language"] for each in contributes["grammars"]} == {each["id"] for each in contributes["languages"]}
    for grammar in contributes["grammars"]:
        assert json.loads((EXTENSION / grammar["path"]).read_text())["scopeName"] == grammar["scopeName"]
