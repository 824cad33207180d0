from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.ebpf import headstart
from dprobes.engines.ebpf.headstart import begin
from dprobes.engines.linux import kernelobjects

if TYPE_CHECKING:
    from dprobes.engines.linux.kernelobjects import Request

OWN = os.getpid()
MAP, PROGRAM, LINK = 0, 5, 28
CODE, PATH = 8, 16
RING_SIZE = 1 << 20


def number(value: int) -> bytes:
    return value.to_bytes(4, "little")


class Kernel:
    """A kernel that gives descriptors which lead nowhere, and notes what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[Any] = []
        self.untouched = True
        self.refuses: int | None = None
        self.open: set[int] = set()
        monkeypatch.setattr(headstart, "issue", self._issue)
        monkeypatch.setattr(headstart, "is_untouched", lambda *_: self.untouched)
        monkeypatch.setattr(headstart, "_write", lambda *words: self.said.append(("write", *words)))
        monkeypatch.setattr(headstart, "EarlyReader", self._reader)
        monkeypatch.setattr(kernelobjects, "close_in_proxy", self._close)

    def _issue(self, request: Request) -> int:
        if request.command == self.refuses:
            raise PermissionError
        self.said.append((request.command, request.attributes, dict(request.data)))
        made = os.open(os.devnull, os.O_RDONLY)
        self.open.add(made)
        return made

    def _reader(self, descriptor: int, size: int) -> Kernel:
        self.said.append(("reads", descriptor, size))
        return self

    def stop(self) -> list[tuple[bytes, float]]:
        self.said.append("reads no more")
        return []

    def _close(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    def are_closed(self) -> bool:
        return not any(Path(f"/proc/self/fd/{each}").exists() for each in self.open)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(headstart, "_INITIAL_PID_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)
    return Kernel(monkeypatch)


def plan_of(path: Path) -> Any:
    """Return a plan of a ring, a table, a program that uses both and our id, and its link."""
    status = path.stat()
    steps: Any = (
        (MAP, b"ring", {}, (), -1, False, 0, ()),
        (MAP, b"refused", {}, (), -1, False, 1, ()),
        (MAP, b"table", {}, (), -1, False, 0, ()),
        (PROGRAM, b"program", {CODE: bytes(12)}, (), -1, False, 0, ((CODE, 0, 0), (CODE, 4, 2), (CODE, 8, -1))),
        (LINK, bytes(8), {PATH: b"before"}, (4,), PATH, True, 0, ((-1, 4, 3),)),
    )
    contents = ((2, 64, b"places"),)
    return str(path), (status.st_dev, status.st_ino), ((8, b"code"),), steps, None, contents, (0, RING_SIZE)


def test_the_objects_of_a_plan_are_made_in_order_with_today_s_numbers(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.touch()
    objects = begin(plan_of(path), None)
    assert objects is not None
    ring, table, program, link = kernel.said[0], kernel.said[1], kernel.said[2], kernel.said[4]
    first, second, third, _ = sorted(kernel.open)
    assert (ring, table) == ((MAP, b"ring", {}), (MAP, b"table", {}))
    assert program == (PROGRAM, b"program", {CODE: number(first) + number(second) + number(OWN)})
    assert kernel.said[3] == ("write", second, 64, b"places")
    assert link[:2] == (LINK, number(0) + number(third))
    assert link[2][PATH].startswith(b"/proc/self/fd/")
    assert kernel.said[5:] == [("reads", first, RING_SIZE)]
    assert objects.since > 0
    assert objects.places == {8}
    objects.close()
    assert kernel.said[-1] == "reads no more"
    assert kernel.are_closed()


def test_what_stands_answers_for_the_file_by_its_name(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.touch()
    objects = begin(plan_of(path), None)
    assert objects is not None
    kernelobjects.stand(objects)
    try:
        ring, table, program, link = sorted(kernel.open)
        made, request = kernelobjects.made, kernelobjects.Request
        code = number(ring) + number(table) + number(OWN)
        assert made(request(MAP, b"ring")) == ring
        with pytest.raises(PermissionError):
            made(request(MAP, b"refused"))
        assert made(request(MAP, b"table")) == table
        assert made(request(PROGRAM, b"program", {CODE: code})) == program
        attributes = bytes(4) + number(program)
        asked = request(LINK, attributes, {PATH: os.fsencode(path) + b"\0"}, (4,), PATH, in_proxy=True)
        assert made(asked) == link
        assert objects.is_used_up
    finally:
        kernelobjects.stand(None)
        for each in kernel.open:
            os.close(each)


@pytest.mark.parametrize("what", ["touched", "refused", "file", "scope"])
def test_what_is_not_as_it_was_has_no_head_start(kernel: Kernel, tmp_path: Path, what: str) -> None:
    path = tmp_path / "program"
    path.touch()
    plan = plan_of(path)
    match what:
        case "touched":
            kernel.untouched = False
        case "refused":
            kernel.refuses = LINK
        case "file":
            plan = plan[0], (1, 2), *plan[2:]
        case "scope":
            plan = (*plan[:3], ((-1, b"", {}, (), -1, False, 0, ()), *plan[3]), *plan[4:])
    if what == "refused":
        with pytest.raises(PermissionError):
            begin(plan, None)
    else:
        assert begin(plan, None) is None
    assert kernel.are_closed()
    assert not any(said[0] == "reads" for said in kernel.said)


def test_in_another_pid_namespace_there_is_none(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "program"
    path.touch()
    monkeypatch.setattr(headstart, "_INITIAL_PID_NAMESPACE", 1)
    assert begin(plan_of(path), None) is None
    assert not kernel.said


def test_a_process_must_execute_the_file(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.touch()
    assert begin(plan_of(path), OWN) is None
    assert not kernel.said
