"""``dprobes lsp`` as an editor uses it: messages of the protocol on its standard input and output."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pygls", reason="needs pygls: pip install 'dprobes[lsp]'")

PROGRAM = 'libc.so.6:malloc(size) {\n    printf("ü𝄞 %d", siz);\n}\n'


class Editor:
    """A client of the protocol, with one document."""

    def __init__(self, path: Path) -> None:
        self.uri = path.as_uri()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dprobes", "lsp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._number = 0

    def __enter__(self) -> Self:
        self.ask("initialize", {"processId": None, "rootUri": None, "capabilities": {}})
        self.tell("initialized", {})
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self.ask("shutdown", None)
                self.tell("exit", None)
                assert self._process.wait(TIMEOUT) == 0
        finally:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                stream.close()

    def tell(self, method: str, parameters: Any) -> None:
        self._send({"method": method, "params": parameters})

    def ask(self, method: str, parameters: Any) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": parameters})
        return self._await(lambda message: message.get("id") == self._number)["result"]

    def at(self, method: str, line: int, character: int) -> Any:
        place = {"textDocument": {"uri": self.uri}, "position": {"line": line, "character": character}}
        return self.ask(f"textDocument/{method}", place)

    def diagnostics(self) -> list[dict[str, Any]]:
        message = self._await(lambda message: message.get("method") == "textDocument/publishDiagnostics")
        found: list[dict[str, Any]] = message["params"]["diagnostics"]
        return found

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self._process.stdin.flush()

    def _await(self, is_it: Any) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        while True:
            size = 0
            while (line := stream.readline()).strip():
                name, _, value = line.decode().partition(":")
                if name.lower() == "content-length":
                    size = int(value)
            assert size, "the server has ended"
            message: dict[str, Any] = json.loads(stream.read(size))
            if is_it(message):
                return message


def test_an_editor_is_served(tmp_path: Path) -> None:
    path = tmp_path / "sizes.dpc"
    document = {"uri": path.as_uri(), "languageId": "dpc", "version": 1, "text": PROGRAM}
    with Editor(path) as editor:
        editor.tell("textDocument/didOpen", {"textDocument": document})
        (found,) = editor.diagnostics()
        # Characters are counted as UTF-16, in which the clef has two.
        assert found["range"] == {"start": {"line": 1, "character": 21}, "end": {"line": 1, "character": 24}}
        assert found["message"].startswith("'siz' is not defined")
        names = [each["label"] for each in editor.at("completion", 1, 24)]
        assert "size" in names
        change = {"range": found["range"], "text": "size"}
        editor.tell(
            "textDocument/didChange",
            {"textDocument": {"uri": editor.uri, "version": 2}, "contentChanges": [change]},
        )
        assert editor.diagnostics() == []
        hover = editor.at("hover", 0, 12)
        assert "offset = malloc" in hover["contents"]["value"]
        assert hover["range"]["end"] == {"line": 0, "character": 16}
        location = editor.at("definition", 1, 22)
        assert location["uri"] == editor.uri
        assert location["range"]["start"] == {"line": 0, "character": 17}


def test_members_are_completed_and_variables_of_the_module_found(tmp_path: Path) -> None:
    source, program = tmp_path / "own.c", tmp_path / "own"
    source.write_text(
        "struct item { int id; struct item *next; };\nint counted;\n"
        "int take(struct item *it)\n{\n    counted++;\n    return it->id;\n}\n"
        "int main(void) { struct item one = {0}; return take(&one); }\n"
    )
    subprocess.run(["gcc", "-g", "-O0", "-o", program, source], check=True)
    path = tmp_path / "takes.dpc"
    text = f'{program}:take {{\n    @ = sum(counted);\n    printf("%d", it->);\n}}\n'
    document = {"uri": path.as_uri(), "languageId": "dpc", "version": 1, "text": text}
    with Editor(path) as editor:
        editor.tell("textDocument/didOpen", {"textDocument": document})
        assert len(editor.diagnostics()) == 1
        members = editor.at("completion", 2, len('    printf("%d", it->'))
        assert [(each["label"], each["detail"]) for each in members] == [("id", "int"), ("next", "struct item *")]
        assert editor.at("definition", 1, 14)["range"]["start"] == {"line": 1, "character": 0}
        assert editor.at("definition", 2, 18) == {
            "uri": source.as_uri(),
            "range": {"start": {"line": 2, "character": 0}, "end": {"line": 2, "character": 0}},
        }


def test_the_source_of_a_function_is_found(tmp_path: Path) -> None:
    source, program = tmp_path / "own.c", tmp_path / "own"
    source.write_text(
        "static int unused;\n\nint twice(int n)\n{\n    return 2 * n;\n}\nint main(void) { return twice(0); }\n"
    )
    subprocess.run(["gcc", "-g", "-O0", "-o", program, source], check=True)
    path = tmp_path / "calls.dpc"
    text = f"return {program}:twice(int n) {{ @ = sum(n) }}\nlibc.so.6:malloc {{ @ = sum(1) }}\n"
    document = {"uri": path.as_uri(), "languageId": "dpc", "version": 1, "text": text}
    with Editor(path) as editor:
        editor.tell("textDocument/didOpen", {"textDocument": document})
        assert editor.diagnostics() == []
        place = editor.at("definition", 0, text.index("twice"))
        assert place == {
            "uri": source.as_uri(),
            "range": {"start": {"line": 2, "character": 0}, "end": {"line": 2, "character": 0}},
        }
