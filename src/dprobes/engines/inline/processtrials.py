"""
The trials in one process: there are none where memory of devices is mapped.

What reads such memory may change it, so that nothing may be read there in vain. The kernel says in ``smaps`` which
mappings are such; only files of some places can have them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Class, Helper, Jump
from dprobes.engines.inline.trials import Trial
from dprobes.native.footprint import footprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Mapping as MappingOf

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.engines.inline.sitegroups import PlannedSite
    from dprobes.native.footprint import Footprint
    from dprobes.target.processmaps import Mapping

__all__ = ["has_device_memory", "process_trials"]

_DEVICES = "its instruction may fault, which cannot be tried where memory of devices is mapped"

_OTHERS = "its handler may stop the thread or skip the function, and it is there for another probepoint as well"

_CHANGES = "its instruction may fault, which may depend on what another handler there changes"

_DISTURBS = "it is there for another probepoint as well, whose handler changes registers that this one looks at"

_PLACES = ("/dev/", "/sys/", "/proc/", "/dmabuf", "anon_inode:")
_MEMORY = ("/dev/shm/", "/dev/zero", "/dev/hugepages/")  # noqa: S108 - nothing is opened there
_FLAGS = frozenset(("io", "pf"))
"""Memory-mapped input and output, and pages that are no memory (Documentation/filesystems/proc.rst, VmFlags)."""


def process_trials(sites: MappingOf[int, PlannedSite], pid: int, mappings: Iterable[Mapping]) -> dict[int, Trial | str]:
    """Return what comes before handlers, by the addresses of instructions in a process, or why it cannot."""
    found: dict[int, Trial | str] = {}
    for address, planned in sites.items():
        pieces = planned.pieces
        trial = next((piece.trial for piece in pieces if piece.trial is not None), None)
        ending = next((piece.probe for piece in pieces if piece.diverts), None)
        if ending is not None and len(pieces) > 1:
            found[address] = _OTHERS
        elif len(pieces) > 1 and _disturbs([footprint(piece.assembled) for piece in pieces]):
            found[address] = _DISTURBS
        elif trial is not None and len(pieces) > 1 and any(_may_change(piece.assembled) for piece in pieces):
            found[address] = _CHANGES
        elif trial is not None or ending is not None:
            found[address] = replace(trial or Trial(b""), ends=ending)
    tried = [address for address, trial in found.items() if isinstance(trial, Trial) and trial.tries]
    return found | dict.fromkeys(tried, _DEVICES) if tried and has_device_memory(pid, mappings) else found


def _disturbs(handlers: Sequence[Footprint]) -> bool:
    """Return whether one of several handlers would see another register than that of the hit (``hits.handlerruns``)."""
    changed: set[int] = set()
    for each in handlers:
        if not changed.isdisjoint(each.reads):
            return True
        changed |= each.writes
    return False


def _may_change(assembled: Assembled) -> bool:
    """Return whether a handler may change registers or memory of the program."""
    writing = Class.JMP | Jump.CALL, Helper.PROBE_WRITE_USER
    return bool(footprint(assembled).writes) or any((insn.opcode, insn.imm) == writing for insn in assembled.code)


def has_device_memory(pid: int, mappings: Iterable[Mapping]) -> bool:
    """Return whether a process has mapped memory of a device; of one that cannot be asked it is assumed."""
    suspected = {m.start for m in mappings if m.path.startswith(_PLACES) and not m.path.startswith(_MEMORY)}
    if not suspected:
        return False
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return True
    return any(_flags_of(text, start) & _FLAGS for start in suspected)


def _flags_of(text: str, start: int) -> frozenset[str]:
    """Return the flags of the mapping that begins at an address, in the text of ``smaps``."""
    _, found, rest = f"\n{text}".partition(f"\n{start:08x}-")
    _, _, flags = rest.partition("\nVmFlags:")
    return frozenset(flags.partition("\n")[0].split()) if found else frozenset()
