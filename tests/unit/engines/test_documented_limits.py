"""Numbers and words on the pages about engines and probepoints are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dprobes.engines.ebpf.attach.module_watch import WAITING_TIME
from dprobes.engines.ebpf.ebpf_engine import MANY_BREAKPOINTS
from dprobes.engines.ebpf.ebpf_options import RING_SIZE
from dprobes.engines.ebpf.inkernel.kernel_spec import SINGLE_KPROBES_MAX
from dprobes.engines.ebpf.kernel.bpf_links import SINGLE_UPROBES_MAX
from dprobes.engines.ebpf.read.held_records import HOLDING
from dprobes.engines.overload_guard import DEFAULT_OVERHEAD
from dprobes.engines.ptrace.tracer.placed_breakpoints import ENTRIES_MAX
from dprobes.platform.foreign.examination import Limits
from dprobes.platform.foreign.foreign_outlines import PROBES_MAX
from dprobes.platform.x86.patches.patch_plans import Method
from dprobes.rpn.instruction_set import KERNEL_FRAMES_MAX, StackEnd

DOCS = Path(__file__).parents[3] / "docs"
MIB = 1 << 20


def page(name: str) -> str:
    """Return a page with each run of blanks as one."""
    return re.sub(r"\s+", " ", (DOCS / name).read_text())


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


READING = Limits()
DOCUMENTED = [
    ("how-to/choose-an-engine.md", f"more than {spaced(MANY_BREAKPOINTS)} breakpoints in other"),
    ("reference/engines.md", f"the limit is {DEFAULT_OVERHEAD:.0f} % for runs in all processes and in the kernel"),
    ("reference/probepoints.md", f"{spaced(ENTRIES_MAX)} open calls are kept"),
    ("reference/probepoints.md", f"innermost first, at most N ({KERNEL_FRAMES_MAX} without N)."),
    ("reference/kernel-probes.md", f"A pattern has at most {SINGLE_KPROBES_MAX}:"),
    ("reference/kernel-probes.md", f"at most N frames ({KERNEL_FRAMES_MAX} without N)"),
    ("reference/engine-ebpf.md", f"Default: {RING_SIZE // MIB} MiB in a run"),
    ("reference/engine-ebpf.md", f"at most {SINGLE_UPROBES_MAX} for a definition in a file"),
    ("reference/engine-ebpf.md", f"{spaced(PROBES_MAX)} probepoints in such a file"),
    (
        "reference/engine-ebpf.md",
        f"{READING.memory >> 30} GiB of memory, {READING.processor_time} s of processor time, {READING.time} s in all",
    ),
]


@pytest.mark.parametrize(("name", "words"), DOCUMENTED, ids=[words for _, words in DOCUMENTED])
def test_a_documented_limit_is_that_of_the_code(name: str, words: str) -> None:
    assert words in page(name)


def test_records_and_processes_wait_for_half_a_second_as_documented() -> None:
    assert (HOLDING, WAITING_TIME) == (0.5, 0.5)
    assert "some milliseconds, at most half a second" in page("reference/engine-ebpf.md")
    assert "After half a second it continues" in page("reference/engine-ebpf.md")


def test_each_kind_of_jump_is_documented() -> None:
    kinds = page("reference/engine-inline.md").partition("## Kinds of jumps")[2].partition("## ")[0]
    assert re.findall(r"\| `([^`]+)` \|", kinds) == [method.term for method in Method]


def test_each_end_of_a_call_stack_is_documented() -> None:
    stacks = page("reference/probepoints.md").partition("## Call stacks")[2].partition("## ")[0]
    assert [int(number) for number in re.findall(r"\| (\d+) \|", stacks)] == [
        end for end in StackEnd if end >= StackEnd.NO_TABLE
    ]
