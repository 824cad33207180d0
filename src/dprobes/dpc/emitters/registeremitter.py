"""How registers are pushed: those of the FPU and SSE in their own way, and of those wider than a word the low word."""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from dprobes.dpc.emitters.writer import Writer

__all__ = ["push_register"]

_PORTABLE = ("arg", "ret", "pc", "sp")
_PROCESSORS = {4: "i386", 8: "x86_64"}
"""Those that have registers of programs only, by the size of a word."""


def push_register(w: Writer, name: str, word_size: int, *, at_entry: bool) -> None:
    """Push a register, as it is at the hit or was at the entry of the call; ``word_size`` is in bytes."""
    if at_entry or name.startswith(_PORTABLE) or not _is_low_word_pushed(w, name, word_size):
        w.op(f"push {'entry' if at_entry else 'r'}, {name}", 1)


def _is_low_word_pushed(w: Writer, name: str, word_size: int) -> bool:
    from dprobes.arch import architecture
    from dprobes.arch.processor import Direction

    register = architecture(_PROCESSORS[word_size]).register(name)
    if register is None or Direction.PUSH_CURRENT in register.allowed or register.selector_cells:
        return False
    cells = register.cells(word_size)
    w.op(f"push u, {name}", cells)
    for _ in range(cells - 1):  # the low one is on top
        w.op("xchg")
        w.op("ros 1", -1)
    return True
