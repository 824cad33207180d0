"""
What a handler in the probed process leaves for the trampoline, where it may end with ``exit N`` or ``skip``.

The context has a word that is no register: it says how the handler has ended, and 0 is that the instruction follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Register
from dprobes.bpf.layout import INLINE_ENDING, SKIPPED
from dprobes.bpf.lower.hosts.host import CONTEXT, Host
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Label

__all__ = ["InlineHost"]

_R = Register


class InlineHost(Host):
    """Write what one handler in a process needs that may stop it, or skip a function."""

    def begin(self) -> None:
        """Let the instruction be executed, unless the handler says otherwise."""
        self._asm.store(CONTEXT, INLINE_ENDING, 0)

    def note_stop(self, refused: Label) -> None:
        """Note nothing: the tracer holds the thread, and its end lets it go."""

    def stop_process(self) -> None:
        """Let the trampoline stop the thread, with the code of ``exit`` in R8."""
        self._asm.store(CONTEXT, INLINE_ENDING, _R.R8)

    def override_return(self) -> None:
        """Let the function that was entered return R2 at once."""
        self._asm.store(CONTEXT, REGISTER_OFFSETS["eax"], _R.R2)
        self._asm.store(CONTEXT, INLINE_ENDING, SKIPPED)
