from __future__ import annotations

import binascii
import marshal
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.cli.runs import headstarts
from dprobes.cli.runs.headstarts import SWITCH, HeadStart, code_state, file_state
from dprobes.engines.ebpf import headstart
from dprobes.engines.linux import kernelobjects
from dprobes.engines.linux.kernelobjects import Standing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINE = ["run", "--engine", "ebpf", "-e", "tick { @ = count(); }"]
PLAN = ("path", (1, 2), (), (), None, ())
PID = str(os.getpid())


class Machine:
    """A cache directory, and a kernel that has whatever plan one gives it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory / "headstarts"
        self.source = directory / "source"
        self.source.touch()
        self.begun: list[tuple[Any, int | None]] = []
        monkeypatch.delenv(SWITCH, raising=False)
        monkeypatch.setattr(headstart, "begin", self._begin)

    def _begin(self, plan: Any, pid: int | None) -> Standing:
        self.begun.append((plan, pid))
        return Standing((1, 2), frozenset())

    def start(self, *more: str, line: list[str] = LINE) -> HeadStart:
        start = HeadStart([*line, *more], str(self.directory))
        start.begin()
        return start

    def keep(self, start: HeadStart, pid: int | None = None, plan: object = PLAN) -> None:
        source = str(self.source)
        code = code_state(headstarts.__file__)
        assert code is not None
        with start.noting():
            notes = kernelobjects.notes()
            assert notes is not None
            notes.plan = plan
        start.keep(pid, {source: file_state(source)}, (code,))

    def begins(self, *more: str, line: list[str] = LINE) -> bool:
        count = len(self.begun)
        self.start(*more, line=line)
        kernelobjects.stand(None)
        return len(self.begun) > count


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)
    kernelobjects.stand(None)


def test_a_line_has_a_head_start_once_its_plan_is_kept(machine: Machine) -> None:
    assert not machine.begins()
    machine.keep(machine.start())
    assert machine.begins()
    assert machine.begun == [(PLAN, None)]


def test_the_number_of_the_process_may_be_another_one_of_the_same_program(machine: Machine) -> None:
    machine.keep(machine.start("-p", PID), int(PID))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        machine.begins("-p", str(other.pid))
        other.communicate(b"\n")
    assert machine.begun == [(PLAN, other.pid)]
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        assert not machine.begins("-p", str(sleeping.pid))
        sleeping.kill()


@pytest.mark.parametrize(
    "more", [("--verbose",), ("-p", PID), ("-p", PID, "--pid", PID), ("-p", "2147483647"), ("-p", "x")]
)
def test_another_line_has_none(machine: Machine, more: tuple[str, ...]) -> None:
    machine.keep(machine.start())
    assert not machine.begins(*more)


@pytest.mark.parametrize("line", [[], ["--help"], ["run", "program.rpn"], ["check", "-e", "tick { }"]])
def test_only_one_liners_that_are_run_have_one(machine: Machine, line: list[str]) -> None:
    with machine.start(line=line).noting():
        assert kernelobjects.notes() is None
    assert not machine.directory.exists()


def test_what_was_read_and_our_code_must_be_the_same(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.keep(machine.start())
    machine.source.write_text("changed")
    assert not machine.begins()
    machine.keep(machine.start())
    assert machine.begins()
    with monkeypatch.context() as other:
        other.setattr(headstarts, "code_state", lambda path: (path, 0, 0))
        assert not machine.begins()
    machine.source.unlink()
    assert not machine.begins()


def test_a_place_and_a_boot_have_plans_of_their_own(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.keep(machine.start())
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        assert not machine.begins()
    boot = tmp_path / "boot"
    boot.write_text("another one")
    monkeypatch.setattr(headstarts, "_BOOT_ID", str(boot))
    assert not machine.begins()


def test_with_the_switch_there_is_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.keep(machine.start())
    monkeypatch.setenv(SWITCH, "1")
    assert not machine.begins()


@pytest.mark.parametrize(
    "content", [b"", b"1234", marshal.dumps(7), marshal.dumps((1, 2)), marshal.dumps((1, 2, 3, 4))]
)
def test_a_damaged_plan_is_none(machine: Machine, content: bytes) -> None:
    machine.keep(machine.start())
    (file,) = machine.directory.iterdir()
    file.write_bytes(content)
    assert not machine.begins()
    file.write_bytes(binascii.crc32(content).to_bytes(4, "little") + content)
    assert not machine.begins()


def test_a_file_that_others_can_write_is_none(machine: Machine) -> None:
    machine.keep(machine.start())
    (file,) = machine.directory.iterdir()
    file.chmod(0o622)
    assert not machine.begins()


def test_a_plan_that_turned_out_wrong_is_replaced_or_forgotten(machine: Machine) -> None:
    machine.keep(machine.start())
    other = ("another path", *PLAN[1:])
    wrong = machine.start()
    kernelobjects.give_up()
    machine.keep(wrong, plan=other)
    assert machine.begins()
    assert machine.begun[-1] == (other, None)
    wrong = machine.start()
    kernelobjects.give_up()
    machine.keep(wrong, plan=None)
    assert not machine.begins()
    assert not [*machine.directory.iterdir()]


def test_a_run_that_took_what_stood_leaves_the_plan(machine: Machine) -> None:
    machine.keep(machine.start())
    machine.keep(machine.start(), plan=None)
    kernelobjects.stand(None)
    assert machine.begins()


def test_a_run_that_cannot_take_what_stands_gives_it_up(machine: Machine) -> None:
    machine.keep(machine.start())
    start = machine.start()
    start.settle(is_possible=True)
    assert kernelobjects.standing() is not None
    start.settle(is_possible=False)
    assert kernelobjects.standing() is None
    assert start.lead == 0.0


def test_a_plan_for_another_process_than_the_line_names_is_not_kept(machine: Machine) -> None:
    machine.keep(machine.start("-p", PID), 1)
    assert not machine.directory.exists()


def test_the_oldest_plans_make_room(machine: Machine) -> None:
    for number in range(70):
        machine.keep(machine.start(f"--{number}"))
    assert len([*machine.directory.iterdir()]) == 64
    assert machine.begins("--69")
