"""Programs about all processes, which run in code of either word size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.lower import Abilities, Request
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach.perf_probes import events_everywhere
from dprobes.engines.engine_interface import Notice
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program

REQUEST = Request(abilities=Abilities(writes_memory=True, writes_registers=True))


def watching(handler: str) -> Program:
    text = f"name = vmlinux\nmodtype = kernel\naddress = 0x1000\nwatchpoint = w\n{handler}\nexit\n"
    return parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions(allow_write=True))


def test_a_handler_runs_in_code_of_both_word_sizes() -> None:
    (event,), notices = events_everywhere(watching("push r, eax; log 1"), REQUEST)
    assert [arch.name for _, arch in event.forms] == ["x86_64", "i386"]
    assert notices == []


def test_where_a_register_is_missing_the_program_is_not_inserted() -> None:
    (event,), notices = events_everywhere(watching("push r, r8; log 1"), REQUEST)
    assert [arch.name for _, arch in event.forms] == ["x86_64"]
    (notice,) = notices
    assert isinstance(notice, Notice)
    assert notice.message == "the program cannot be inserted into i386 processes"
    assert "r8" in notice.details


def test_a_handler_that_an_event_cannot_run_is_refused() -> None:
    message = r"the ebpf engine cannot run this handler: 'pop r, "
    with pytest.raises(SourceError, match=message):
        events_everywhere(watching("push 0; pop r, eax"), REQUEST)
