"""The manager accepts the arguments and returns the results that docs/reference/manager.md documents."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes import errors
from dprobes.engines.engine_interface import Counts
from dprobes.errors import ManagerError
from dprobes.manager import managed_program
from dprobes.manager.manager_messages import (
    VERBS,
    GlobalValues,
    InsertedPrograms,
    Insertion,
    LeftOutPlace,
    ManagedHeader,
    ManagedProbepoint,
    ManagedScope,
    ManagedVariables,
    ManagerStatus,
    Removal,
    ScopeArguments,
    Selection,
    Stopped,
)
from dprobes.manager.wire_protocol import VERSION, decode, encode, members
from dprobes.resolve.probepoints import ProbeKind, Probepoint, ProbeState, WatchedMemory
from dprobes.rpn.rpn_program import Access, Code, ProbeDefinition, Sampler
from dprobes.sinks.sink_thread import TargetStatus
from dprobes.target.kernel.traced_fields import Source, TracedEvent
from integration.manager.conftest import PROGRAM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.manager.probe_manager import Manager
    from integration.manager.sandbox import Sandbox, Service

DOCUMENT = (Path(__file__).parents[3] / "docs" / "reference" / "manager.md").read_text()

PROBE_KINDS = {"breakpoint", "watchpoint", "sampler", "tracepoint", "patch"}


def section(verb: str) -> str:
    return DOCUMENT.partition(f"\n### Verb `{verb}`\n")[2].partition("\n### ")[0]


Row = tuple[str, ...]
"""The cells of a row of a table of the document, the names in the first one left out."""


def documented(text: str, heading: str) -> dict[str, Row]:
    """Return the rows of the table with this heading, by name: several names may share a row."""
    table = text.partition(f"\n| {heading} | ")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    return {name: tuple(row[1:]) for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def singular(text: str) -> str:
    """Return the name of a type as of one field: 'lists of strings' is what several have."""
    return {"numbers": "number", "lists of strings": "list of strings"}.get(text, text)


def types(rows: dict[str, Row]) -> dict[str, str]:
    return {name: singular(row[0]) for name, row in rows.items()}


def in_schema(kind: type, prefix: str = "", *, inner: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the types of a dataclass's fields, with those of the objects in the lists ``inner``."""
    found = {}
    for member in members(kind):
        found[prefix + member.name] = member.value_type.name + (" or null" if member.is_nullable else "")
        if member.inner is not None and member.name in inner:
            found |= in_schema(member.inner, f"{prefix}{member.name}[].")
    return found


DOCUMENTED_VERBS = re.findall(r"^### Verb `([a-z-]+)`$", DOCUMENT, re.MULTILINE)


def ask(manager: Manager, verb: str, **arguments: Any) -> dict[str, Any]:
    result = manager.answer(verb, arguments, lambda notice: None)
    json.dumps(result)
    return result


def test_all_verbs_are_documented() -> None:
    assert list(VERBS) == DOCUMENTED_VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_arguments_are_those_that_are_documented(verb: str) -> None:
    rows = documented(section(verb), "argument")
    assert types(rows) == {member.name: member.value_type.name for member in members(VERBS[verb])}
    written = {
        field.name: repr(field.default).lower() for field in fields(VERBS[verb]) if field.default not in (None, MISSING)
    }
    for member in members(VERBS[verb]):
        default = rows[member.name][1].strip("`")
        assert member.is_required == (default == "required"), member.name
        if (value := written.get(member.attribute)) not in (None, "()"):
            assert value.strip("'") == default, member.name


def test_the_scope_is_documented() -> None:
    row = documented(section("insert"), "argument")["scope"]
    names = {member.name for member in members(ScopeArguments)}
    assert names == {"pid", "cgroup", "uid", "follow", "program"}
    assert all(f"`{name}`" in row[-1] for name in names)


@pytest.mark.parametrize(
    ("verb", "kind", "inner"),
    [
        ("status", ManagerStatus, ()),
        ("insert", Insertion, ()),
        ("remove", Removal, ()),
        ("query", InsertedPrograms, ("programs",)),
        ("getvars", ManagedVariables, ("programs",)),
        ("stop", Stopped, ()),
    ],
)
def test_results_are_those_that_are_documented(verb: str, kind: type, inner: tuple[str, ...]) -> None:
    assert types(documented(section(verb), "result")) == in_schema(kind, inner=inner)


def test_log_targets_are_documented() -> None:
    targets = {f"targets[].{name}": text for name, text in in_schema(TargetStatus).items()}
    assert types(documented(section("add-target"), "result")) == {"targets": "list of objects"} | targets
    for verb in ("remove-target", "targets"):
        assert types(documented(section(verb), "result")) == {"targets": "list of objects"}


def inner_names(row: Row, *outer: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", row[-1])) - set(outer)


def names_of(kind: type) -> set[str]:
    return {member.name for member in members(kind)}


def test_objects_within_results_are_documented() -> None:
    rows = documented(section("query"), "result")
    assert names_of(ManagedHeader) == inner_names(rows["programs[].header"])
    assert names_of(ManagedScope) == inner_names(rows["programs[].scope"])
    assert names_of(LeftOutPlace) == inner_names(rows["programs[].left_out"])
    assert names_of(Selection) == inner_names(rows["programs[].selected"], "extended")
    assert names_of(GlobalValues) == inner_names(documented(section("getvars"), "result")["globals"], "global")


def kinds_of(row: Sequence[str]) -> set[str]:
    """Return the kinds of probepoints that a row of the table names before a colon; none for a field of all kinds."""
    return set(row[-1].partition(":")[0].split(", ")) & PROBE_KINDS if ":" in row[-1] else set()


def test_probepoints_are_documented() -> None:
    rows = documented(DOCUMENT.partition("\nFields of each of `probes`:")[2], "probepoint")
    assert types(rows) == in_schema(ManagedProbepoint)
    assert names_of(Counts) == inner_names(rows["counts"])
    assert set(re.findall(r"\b[A-Z][A-Z_]{5,}\b", rows["state"][-1])) == {each.value for each in ProbeState}
    assert inner_names(rows["kind"]) == PROBE_KINDS
    # What only some kinds have is left out of the others.
    own = {name for name, row in rows.items() if kinds_of(row)}
    assert own == {member.name for member in members(ManagedProbepoint) if member.is_left_out}


def test_kinds_of_probepoints_have_the_fields_that_are_documented(
    manager: Manager, insertion: dict[str, Any], target: Service
) -> None:
    inserted = ask(manager, "insert", **insertion)
    rows = documented(DOCUMENT.partition("\nFields of each of `probes`:")[2], "probepoint")
    definition = ProbeDefinition(Sampler(99), Code())
    memory = WatchedMemory(16, 4, False, Access.WRITE)
    watchpoint = Probepoint(ProbeKind.WATCHPOINT, 0, definition, "/lib", "place", memory)
    sampler = Probepoint(ProbeKind.SAMPLER, 0, definition, "/lib", "99hz", Sampler(99))
    counting = sampler._replace(subject=Sampler(7, "page-faults"))
    event = TracedEvent(Source.RECORD, "sched_switch", 300)
    tracepoint = Probepoint(ProbeKind.TRACEPOINT, 0, definition, "vmlinux", "sched:sched_switch", event)
    state = (ProbeState.ACTIVE, "")
    probes = (watchpoint, sampler, counting, tracepoint)
    others = [encode(managed_program._describe_probe(1, each, state, Counts())) for each in probes]
    common = {name for name, row in rows.items() if not kinds_of(row)}
    for probe in (inserted["program"]["probes"][0], *others):
        own = {name for name, row in rows.items() if probe["kind"] in kinds_of(row)}
        assert set(probe) == common | own, probe["kind"]
    rates = [(each["frequency"], each["period"], each["counter"]) for each in others if each["kind"] == "sampler"]
    assert rates == [(99, 0, ""), (0, 7, "page-faults")]
    assert inserted["program"]["scope"] == {"pid": target.pid, "follow": True}


def test_what_is_answered_is_what_is_documented(
    manager: Manager, insertion: dict[str, Any], target: Service, tmp_path: Path
) -> None:
    inserted = ask(manager, "insert", **insertion)
    assert set(inserted) == set(documented(section("insert"), "result"))
    (program,) = ask(manager, "query", extended=True)["programs"]
    fields = set(documented(section("query"), "result"))
    assert {f"programs[].{name}" for name in program} | {"programs"} == fields
    assert set(inserted["program"]) | {"ppdf", "selected"} == set(program)
    variables = ask(manager, "getvars", **{"local": True, "global": True})
    own = {f"programs[].{name}" for name in variables["programs"][0]}
    own |= {"programs[].tables"}  # which only programs with tables have
    assert set(variables) | own == set(documented(section("getvars"), "result"))
    (added,) = ask(manager, "add-target", target=str(tmp_path / "log"))["targets"]
    assert {"targets", *(f"targets[].{name}" for name in added)} == set(documented(section("add-target"), "result"))
    assert {"targets": [added]} == ask(manager, "targets")
    assert set(ask(manager, "remove-target", target=str(tmp_path / "log"))) == {"targets"}
    assert set(ask(manager, "remove", probe=[5, 1])) == {"probepoints"}
    assert set(ask(manager, "remove", all=True)) == {"removed"}
    assert ask(manager, "stop") == {"stopped": 0, "unfinished": []}


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        (Stopped, [], "it must be an object"),
        (Stopped, {"stopped": 1}, "it has no field 'unfinished'"),
        (Stopped, {"stopped": True, "unfinished": []}, "it has a field 'stopped', which must be a number"),
        (Stopped, {"stopped": 1, "unfinished": [1]}, "it has a field 'unfinished', which must be a list of strings"),
        (
            InsertedPrograms,
            {"programs": [{"name": 1}]},
            "it has a field 'programs', which has a field 'name', which must be a text",
        ),
    ],
)
def test_an_answer_that_is_not_as_documented_is_an_error(kind: type, message: object, expected: str) -> None:
    with pytest.raises(ManagerError) as caught:
        decode(kind, message)
    assert caught.value.message == f"the probe manager's answer is not as expected: {expected}"


def test_fields_that_are_not_known_are_skipped() -> None:
    assert decode(Stopped, {"stopped": 1, "unfinished": ["a"], "new": {}}) == Stopped(1, ("a",))


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
    assert f"This is **version {VERSION}**" in " ".join(DOCUMENT.split())
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
    assert answers[5]["error"]["message"].endswith("has no verb 'fly'")
    assert [program["name"] for program in answers[6]["result"]["programs"]] == ["libc.so.6"]
    message = "a line of the manager's protocol is not a JSON object"
    assert converse(sandbox, b"[1]") == [{"error": {"kind": "FormatError", "message": message, "hint": None}}]
