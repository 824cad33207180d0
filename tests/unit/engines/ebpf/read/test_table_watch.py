"""What a run says besides records: each thing once, and nothing that may still be on its way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.read.table_watch import TableWatch
from dprobes.engines.engine_interface import Notice, StateEvent
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.source_text import SourceFile


class Installed:
    """Stand for a program in the kernel with three probepoints of two definitions."""

    def __init__(self, text: str) -> None:
        self.program = parse_source(SourceFile("x.rpn", text), Diagnostics())
        numbers = (0, 0, 1)
        self.probes = [SimpleNamespace(number=n, definition=self.program.definitions[n]) for n in numbers]
        self.bits: dict[int, int] = {}
        self.gone: set[int] = set()
        self.taken: list[int] = []
        self.budget = None
        self.maps = SimpleNamespace(unfollowed=0, unseen=0)
        self.attachments = SimpleNamespace(expired=lambda: self.gone - set(self.taken), take_away=self.taken.append)

    def unhandled(self) -> list[tuple[int, int]]:
        return list(self.bits.items())


PROGRAM = "name = x\nmajor = 7\noffset = a*\nminor = 1\nexit\noffset = 2\nminor = 2\nexit 1\n"


def inspector(text: str = PROGRAM) -> tuple[TableWatch, Installed]:
    installed = Installed(text)
    return TableWatch(installed.program, cast("Any", installed)), installed


def test_an_exception_is_said_once_for_a_definition() -> None:
    found, installed = inspector()
    assert list(found.look(is_quiet=True)) == []
    installed.bits = {0: ExceptionCode.INVALID_ADDR, 1: ExceptionCode.INVALID_ADDR}
    (notice,) = found.look(is_quiet=False)
    assert notice == Notice(
        "the handler of 7,1 was ended by INVALID_ADDR, which nothing catches",
        "catch it with 'sx', or see where it is raised with 'autostacktrace = yes'",
    )
    installed.bits[2] = ExceptionCode.INVALID_ADDR
    (notice,) = found.finish()
    assert isinstance(notice, Notice)
    assert notice.message.startswith("the handler of 7,2 was ended by INVALID_ADDR")
    traced, installed = inspector(PROGRAM.replace("major", "autostacktrace = yes\nmajor"))
    installed.bits = {0: ExceptionCode.INVALID_ADDR}
    assert list(traced.finish()) == []


def test_what_ended_unheard_is_taken_away_when_nothing_more_can_come() -> None:
    found, installed = inspector()
    installed.gone = {1}
    assert list(found.look(is_quiet=True)) == []
    assert list(found.look(is_quiet=False)) == []
    assert list(found.look(is_quiet=True)) == [StateEvent((1,), 0, ProbeState.DISABLED)]
    assert installed.taken == [1]
    installed.gone = {1, 2}
    assert list(found.look(is_quiet=True)) == []
    state, notice = found.look(is_quiet=True)
    assert state == StateEvent((2,), 0, ProbeState.DISABLED)
    assert isinstance(notice, Notice)
    assert notice.message == (
        "7,2 was removed, but the ring had no room for the reason; if its handler stopped a process, "
        "that is still stopped"
    )


def test_what_the_kernel_had_no_room_for_is_said_at_the_end() -> None:
    found, installed = inspector()
    installed.maps.unfollowed, installed.maps.unseen = 3, 4
    assert list(found.look(is_quiet=True)) == []
    processes, faults = found.finish()
    assert isinstance(processes, Notice)
    assert isinstance(faults, Notice)
    assert processes.message == ("3 processes of the tree were not probed: too many were alive at once")
    assert faults.message == (
        "the ring had no room for 4 faults: up to that many records may be of instructions that did not complete"
    )
