"""The processes in the memory of a seized one are seized as well; what it has made itself is told of by its thread."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

from dprobes.engines.ptrace.tracer import process_tree
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.process_tree import Seizer
from dprobes.engines.ptrace.tracer.tracer_state import ThreadTable
from dprobes.platform.linux import ptrace_calls

if TYPE_CHECKING:
    import pytest


def test_a_child_that_nobody_has_told_of_yet_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of vfork(2) of a seized thread is traced from its birth, and runs in the memory of its parent."""
    looks: list[int] = []
    no_stopper: Any = None
    with subprocess.Popen(["sleep", "1000"]) as child:
        ptrace_calls.seize(child.pid)
        try:

            def sharing(tid: int) -> list[int]:
                looks.append(tid)
                assert len(looks) < 3, "it is looked for again and again"
                return [child.pid]

            monkeypatch.setattr(process_tree, "processes_in_memory_of", sharing)
            threads = ThreadTable()
            threads.enter(1, 1, AddressSpace.closed(8))
            assert Seizer(threads, no_stopper).seize_sharing(1) == []
            assert looks == [1]
            assert list(threads) == [1]
        finally:
            child.kill()
