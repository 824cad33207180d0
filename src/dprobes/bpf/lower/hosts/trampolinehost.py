"""
What a handler at a BPF trampoline asks of the kernel, in eBPF: where a function of the kernel begins, or returns.

The program's argument is an array of the words that the function takes in registers, and at its return behind them what
it returns. All else of the registers is not saved by anybody.
"""

from __future__ import annotations

from dprobes.bpf.asm.isa import Register
from dprobes.bpf.layout import ProbeField
from dprobes.bpf.lower.hosts.host import CONTEXT
from dprobes.bpf.lower.hosts.kernelhost import KernelHost
from dprobes.bpf.lower.request import ARGUMENT_REGISTERS, Placement
from dprobes.bpf.lower.state.handlerstate import Field
from dprobes.bpf.lower.state.stack import SCRATCH

__all__ = ["TrampolineHost"]

_R = Register
_WORD = 8
_RESULT = -112
"""Where on the stack the value waits that a skipped function is to return; 0 lets it be executed."""


class TrampolineHost(KernelHost):
    """Write what one handler at a trampoline needs."""

    def begin(self) -> None:
        """Let the function be executed, unless its handler says otherwise."""
        if self._request.placement is Placement.MODIFY_RETURN:
            self._asm.store(_R.R10, _RESULT, 0)

    def load_result(self) -> None:
        """Load what the program returns to R0."""
        if self._request.placement is Placement.MODIFY_RETURN:
            self._asm.load(_R.R0, _R.R10, _RESULT)
        else:
            super().load_result()

    def override_return(self) -> None:
        """Let the function return R2 in the place of being executed."""
        self._asm.store(_R.R10, _RESULT, _R.R2)

    def register(self, dst: Register, name: str) -> None:
        """Load a word of the arguments, the result, or the address of the function; 0 for what nobody has saved."""
        words = self._request.arguments
        if name == "eip":
            self.probe_entry(dst)
            self._asm.load(dst, dst, ProbeField.LINK)
        elif name in ARGUMENT_REGISTERS[:words]:
            self._load_word(dst, ARGUMENT_REGISTERS.index(name))
        elif name == "eax" and self._request.placement is Placement.FEXIT:
            self._load_word(dst, words)
        else:
            self._asm.mov(dst, 0)

    def _load_word(self, dst: Register, number: int) -> None:
        """Load a word of the array, as a number with which a handler may do what it likes: the verifier knows types."""
        self._asm.load(dst, CONTEXT, _WORD * number)
        self._asm.store(SCRATCH, Field.BIAS, dst)
        self._asm.load(dst, SCRATCH, Field.BIAS)
