"""What docs/manager.md says of the arguments and results of verbs is what the manager takes and answers."""

from __future__ import annotations

import inspect
import json
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes import errors
from dprobes.errors import ManagerError
from dprobes.manager import descriptions
from dprobes.manager.arguments import Arguments
from dprobes.manager.manager import Manager
from dprobes.manager.protocol import VERSION
from dprobes.resolve.probestate import ProbeState
from dprobes.resolve.samplers import ResolvedSampler
from dprobes.resolve.watchpoints import ResolvedWatchpoint
from dprobes.rpn.program import Access, Code, ProbeDefinition, Sampler
from integration.manager.conftest import PROGRAM

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox, Service

DOCUMENT = (Path(__file__).parents[3] / "docs" / "manager.md").read_text()

PROBE_KINDS = {"breakpoint", "watchpoint", "sampler"}


def section(verb: str) -> str:
    return DOCUMENT.partition(f"\n### Verb `{verb}`\n")[2].partition("\n### ")[0]


def documented(text: str, heading: str) -> dict[str, str]:
    """Return the rows of the table with this heading: names, and the whole row."""
    table = text.partition(f"\n| {heading} | ")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return {name: row for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


VERBS = re.findall(r"^### Verb `([a-z-]+)`$", DOCUMENT, re.MULTILINE)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The arguments that each verb has asked for."""
    found: dict[str, set[str]] = {}
    take = Arguments._take

    def spy(self: Arguments, name: str, *rest: Any) -> Any:
        found.setdefault(self._verb, set()).add(name)
        return take(self, name, *rest)

    monkeypatch.setattr(Arguments, "_take", spy)
    return found


def ask(manager: Manager, verb: str, **arguments: Any) -> dict[str, Any]:
    result = manager.answer(verb, arguments, lambda notice: None)
    json.dumps(result)
    return result


def test_all_verbs_are_documented() -> None:
    assert set(VERBS) == set(re.findall(r'case "([a-z-]+)":', inspect.getsource(Manager.answer)))


def test_arguments_are_those_that_are_documented(
    manager: Manager, taken: dict[str, set[str]], insertion: dict[str, Any], tmp_path: Path
) -> None:
    ask(manager, "insert", **insertion)
    required = {"add-target": {"target": str(tmp_path / "log")}, "remove-target": {"target": str(tmp_path / "log")}}
    for verb in VERBS:
        if verb not in ("insert", "remove"):
            ask(manager, verb, **required.get(verb, {}))
    with pytest.raises(ManagerError):
        ask(manager, "remove")
    for verb in VERBS:
        assert set(documented(section(verb), "argument")) == taken.get(verb, set()), verb
    scope = documented(section("insert"), "argument")["scope"]
    assert taken["insert.scope"] == {"pid", "cgroup", "uid", "follow", "program"}
    assert all(f"`{name}`" in scope for name in taken["insert.scope"])


def test_results_have_the_documented_fields(
    manager: Manager, insertion: dict[str, Any], target: Service, tmp_path: Path
) -> None:
    inserted = ask(manager, "insert", **insertion)
    assert set(inserted) == set(documented(section("insert"), "result"))
    assert set(ask(manager, "status")) == set(documented(section("status"), "result"))

    (program,) = ask(manager, "query", extended=True)["programs"]
    fields = documented(section("query"), "result")
    assert {f"programs[].{name}" for name in program} | {"programs"} == set(fields)
    assert set(inserted["program"]) | {"ppdf", "selected"} == set(program)
    assert set(program["header"]) == inner(fields["programs[].header"], "programs[].header")
    assert program["scope"] == {"pid": target.pid, "follow": True}
    check_probes(program["probes"][0])

    variables = ask(manager, "getvars", **{"local": True, "global": True})
    fields = documented(section("getvars"), "result")
    assert set(variables) | {f"programs[].{name}" for name in variables["programs"][0]} == set(fields)
    assert set(variables["globals"]) == {"count", "values"} == inner(fields["globals"], "globals", "global")

    added = ask(manager, "add-target", target=str(tmp_path / "log"))
    names = documented(section("add-target"), "result")
    assert {"targets", *(f"targets[].{name}" for name in added["targets"][0])} == set(names)
    assert set(ask(manager, "targets")) == set(documented(section("targets"), "result"))
    gone = ask(manager, "remove-target", target=str(tmp_path / "log"))
    assert set(gone) == set(documented(section("remove-target"), "result"))

    removal = documented(section("remove"), "result")
    assert set(ask(manager, "remove", probe=[5, 1])) | set(ask(manager, "remove", all=True)) == set(removal)
    assert set(ask(manager, "stop")) == set(documented(section("stop"), "result"))


def inner(row: str, *outer: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", row)) - set(outer)


def check_probes(breakpoint_: dict[str, Any]) -> None:
    """Compare the fields of all kinds of probepoint."""
    fields = documented(DOCUMENT.partition("\nFields of each of `probes`:")[2], "probepoint")
    definition = ProbeDefinition(Sampler(99), Code())
    watchpoint = ResolvedWatchpoint(0, definition, "/lib", 16, 4, False, Access.WRITE, "place")
    sampler = ResolvedSampler(0, definition, "/lib", 99)
    state = (ProbeState.ACTIVE, "")
    described = [breakpoint_, *(descriptions._describe_probe(1, each, state, None) for each in (watchpoint, sampler))]
    common = set(described[0]) & set(described[1]) & set(described[2]) | {"counts"}
    for probe in described:
        kind = probe["kind"]
        own = {name for name, row in fields.items() if f"| {kind}: " in row}
        assert set(probe) | {"counts"} == common | own, kind
    assert common == {name for name, row in fields.items() if not any(f"| {kind}: " in row for kind in PROBE_KINDS)}
    assert set(breakpoint_["counts"]) == inner(fields["counts"], "counts")
    assert set(re.findall(r"\b[A-Z][A-Z_]{5,}\b", fields["state"])) == {each.value for each in ProbeState}
    assert inner(fields["kind"], "kind") == PROBE_KINDS


def test_kinds_of_errors_are_those_of_the_package() -> None:
    table = DOCUMENT.partition("\n| kind | means |\n|---|---|\n")[2].partition("\n\n")[0]
    kinds = {row.split("|")[1].strip() for row in table.splitlines()}
    assert kinds == {name for name in errors.__all__ if name.endswith("Error")} - {"DprobesError"}


def converse(sandbox: Sandbox, *lines: bytes) -> list[dict[str, Any]]:
    """Send lines as they are, and return the answers."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(30)
        end.connect(str(sandbox.runtime / "manager.sock"))
        with end.makefile("rb") as answers:
            received = []
            for line in lines:
                end.sendall(line + b"\n")
                received.append(json.loads(answers.readline() or b"null"))
        return received


def test_what_is_said_of_versions_and_errors_is_true_on_the_socket(
    sandbox: Sandbox, insertion: dict[str, Any], target: Service
) -> None:
    source = sandbox.write("q.rpn", PROGRAM.format(library=target.library))
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace --as libc.so.6")
    assert f"This is **version\n{VERSION}**" in DOCUMENT
    examples = re.findall(r"^(client|manager)   ?(\{.*\})$", DOCUMENT, re.MULTILINE)
    request = examples[0][1].encode()
    answers = converse(
        sandbox,
        request,
        b'{"dprobes": 2, "verb": "status"}',
        b'{"dprobes": 1, "verb": "status", "arguments": null}',
        b'{"dprobes": 1, "verb": "query", "arguments": {"name": "libc"}}',
        b'{"dprobes": 1, "verb": "query", "arguments": {"nme": "libc"}}',
        b'{"dprobes": 1, "verb": "fly"}',
        b'{"dprobes": 1, "verb": "query", "arguments": {"name": null}}',
    )
    assert answers[0] == {"result": {"first": 0, "globals": {"count": 3, "values": [0, 0, 0]}}}
    assert "the client speaks version 2 of the manager's protocol" in answers[1]["error"]["message"]
    assert answers[1]["error"]["message"].endswith(" version 1")
    assert answers[2]["error"]["kind"] == "ManagerError"
    assert json.dumps(answers[3]) == next(line for _, line in examples if '"error"' in line)
    assert answers[4]["error"]["message"] == "the manager's verb 'query' has no argument 'nme'"
    assert answers[5]["error"]["message"].endswith("knows no verb 'fly'")
    assert [program["name"] for program in answers[6]["result"]["programs"]] == ["libc.so.6"]
    message = "a line of the manager's protocol is not a JSON object"
    assert converse(sandbox, b"[1]") == [{"error": {"kind": "FormatError", "message": message, "hint": None}}]
