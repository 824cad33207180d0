"""What handlers put into the ring, and for which of it they wake the reader."""

from __future__ import annotations

import select

import pytest

from dprobes.arch import architecture
from dprobes.bpf.bpf_instructions import Class, Helper, Jump, Register
from dprobes.bpf.lower import Abilities, Request, lower
from dprobes.bpf.map_layouts import Entry, MapName
from dprobes.diagnostics import Diagnostics
from dprobes.record.log_record import Item
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.rpn_program import Point
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from support.ebpf_backend import EbpfRunner, obstacle


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


class WatchedRunner(EbpfRunner):
    """Run handlers while this thread does not look at the ring, and note whether they would have woken it."""

    has_woken = False

    def _execute(self, program: int) -> None:
        with select.epoll() as poll:  # reports entries that come with a wake-up
            poll.register(self._maps[MapName.RING].fd, select.EPOLLIN)
            super()._execute(program)
            self.has_woken = bool(poll.poll(0.2))


@pytest.mark.parametrize(
    ("handler", "kinds"),
    [("exit", [Entry.RECORD]), ("remove", [Entry.RECORD, Entry.ENDED]), ("abort", [])],
)
def test_a_reader_that_is_awake_is_woken_only_to_remove_the_probepoint(handler: str, kinds: list[Entry]) -> None:
    program = parse_source(SourceFile("x.rpn", f"name = x\noffset = 0\n{handler}\n"), Diagnostics())
    context, target = FakeContext("x86_64"), architecture("x86_64")
    image = encode(program, target)
    with WatchedRunner(image, target, context) as runner:
        state = runner.run(image.handlers[0], prepare(program, 0, context))[1]
        assert [kind for kind, _, _ in state.entries] == kinds
        assert runner.has_woken == (Entry.ENDED in kinds)


@pytest.mark.parametrize("items", [Item.PID, Item.TID, Item.UID, Item.PROCESS_NAME, Item.PROCESS_NAME | Item.UID])
def test_what_others_say_of_a_thread_later_is_found_by_its_ids(items: Item) -> None:
    program = parse_source(SourceFile("x.rpn", "name = x\noffset = 0\nexit\n"), Diagnostics())
    image, target = encode(program, architecture("x86_64")), architecture("x86_64")
    point = Point.of(program, program.definitions[0], 0)
    request = Request(items=items, abilities=Abilities(named_later=True, verified=False), wants_tid=True)
    code = lower(image, target, image.handlers[0], point, request).assembled.code
    call = Class.JMP | Jump.CALL
    asked = [Helper(insn.imm) for insn in code if insn.opcode == call]
    assert asked.count(Helper.GET_CURRENT_PID_TGID) == 1
    assert not {Helper.GET_CURRENT_UID_GID, Helper.GET_CURRENT_COMM} & set(asked)
    later = code[[insn.imm for insn in code].index(Helper.GET_CURRENT_PID_TGID) :]
    stores = [insn for insn in later[:8] if insn.opcode & 0x07 == Class.STX and insn.src == Register.R0.value]
    assert len(stores) == 1 + len(items), "the thread id in the head, and an id for each item"
