"""Places in the running kernel as ``locate`` shows them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.instructions import MAX_LENGTH, decode
from dprobes.target.kernel.runningkernel import KERNEL_NAMES, RunningKernel, module_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.rpn.program import Expression
    from dprobes.target.instructions import DecodedInstruction
    from dprobes.target.kernel.kallsyms import KernelSymbol

__all__ = ["describe_kernel_place", "kernel_module"]

_BITS = 64
_BEFORE, _AFTER = 3, 6


def kernel_module(name: str) -> str | None:
    """Return the module of the kernel that a name means, "" for the kernel itself; None if it means neither."""
    if name in KERNEL_NAMES:
        return ""
    module = module_name(name)
    return module if module in RunningKernel().modules else None


def describe_kernel_place(module: str, expression: Expression | None) -> Iterator[str]:
    """Iterate over the lines about the kernel or a module, and a place in it; raise ``TargetError`` if it has none."""
    kernel = RunningKernel()
    base = kernel.base_of(module)
    release = f"Linux {os.uname().release}"
    yield f"module    {module} of {release}" if module else f"module    the running kernel, {release}"
    yield f"loaded at {base:#x}"
    if expression is None:
        return
    if expression.symbol is None:
        # As in 'address =' and 'offset =': the upper half of all numbers are addresses.
        address = expression.addend if expression.addend >> 63 else base + expression.addend
    else:
        address = kernel.symbol(expression.symbol, module, is_code=True).address + expression.addend
    function = kernel.symbols.covering(address)
    if function is None or function.module != module:
        raise TargetError(f"{address:#x} is not in the code of '{module or KERNEL_NAMES[0]}'")
    around = _instructions(kernel, function, address, base)
    yield f"function  {kernel.name_of(address)}"
    yield f"address   {address:#x}"
    yield ""
    yield f"offset = {expression}          // {address - base:#x} from where it is loaded"
    if around is None:
        yield f"// the opcode is not known: {kernel.text.problem}"
    else:
        (here,) = (each for each in around if each.address == address)
        yield f"opcode = {here.opcode_byte:#04x}"
        yield ""
        for each in around:
            yield f"{'=>' if each is here else '  '} {each.offset:8x}   {each.raw.hex(' '):<30} {each.text}"
    yield ""
    yield _verdict(kernel, function, address)


def _instructions(
    kernel: RunningKernel, function: KernelSymbol, address: int, base: int
) -> list[DecodedInstruction] | None:
    """Return the instructions around an address, None if the kernel does not show its text."""
    code = kernel.text.read(function.address, address - function.address + (_AFTER + 1) * MAX_LENGTH)
    if not code:
        return None
    decoded = list(decode(code, _BITS, function.address, function.address - base))
    index = next((number for number, each in enumerate(decoded) if each.address >= address), None)
    if index is None or decoded[index].address != address:
        raise TargetError(f"{kernel.name_of(address)} is inside an instruction")
    return decoded[max(0, index - _BEFORE) : index + _AFTER + 1]


def _verdict(kernel: RunningKernel, function: KernelSymbol, address: int) -> str:
    if kernel.is_blacklisted(address):
        return "ebpf: the kernel allows no probe there (kprobe blacklist)"
    if address == function.address and kernel.is_traceable(address):
        return "ebpf: ftrace calls the handler, if it reads only registers of arguments; else a kprobe does"
    return "ebpf: a kprobe, for which the kernel replaces the instruction by a breakpoint, or by a jump if it can"
