"""Places in the running kernel as ``locate`` shows them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.code.instructions import MAX_LENGTH, decode
from dprobes.target.kernel.kprobeways import KprobeWay, KprobeWays
from dprobes.target.kernel.modulefiles import module_name
from dprobes.target.kernel.runningkernel import KERNEL_NAMES, RunningKernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.rpn.program import Expression
    from dprobes.target.code.instructions import DecodedInstruction
    from dprobes.target.kernel.kallsyms import KernelSymbol

__all__ = ["describe_kernel_place", "is_module_file", "kernel_module"]

_BITS = 64
_BEFORE, _AFTER = 3, 6


def kernel_module(name: str) -> tuple[RunningKernel, str] | None:
    """
    Return the kernel, and its module that a name means, "" for the kernel itself; None if it means neither.

    A module that is not loaded is one of a kernel that is read from its file. Raise ``TargetError`` for a file that
    cannot be read.
    """
    kernel = RunningKernel()
    if name in KERNEL_NAMES:
        return kernel, ""
    module = module_name(name)
    if module in kernel.modules:
        return kernel, module
    from dprobes.target.kernel.unloadedmodule import open_unloaded_module

    try:
        unloaded = open_unloaded_module(name)
    except TargetError:
        if is_module_file(name):
            raise
        return None
    return (kernel, unloaded.name) if unloaded.name in kernel.modules else (unloaded, unloaded.name)


def is_module_file(name: str) -> bool:
    """Return whether a name is that of a kernel module's file."""
    return bool(name.rpartition("/")[2].partition(".ko")[1])


def describe_kernel_place(kernel: RunningKernel, module: str, expression: Expression | None) -> Iterator[str]:
    """Iterate over the lines about the kernel or a module, and a place in it; raise ``TargetError`` if it has none."""
    base = kernel.base_of(module)
    release = f"Linux {os.uname().release}"
    yield f"module    {module} of {release}" if module else f"module    the running kernel, {release}"
    yield f"loaded at {base:#x}" if kernel.is_loaded else f"file      {kernel.file}, which is not loaded"
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
    if kernel.is_loaded:
        yield f"address   {address:#x}"
    yield ""
    ways: Mapping[int, KprobeWay] = {}
    yield f"offset = {expression}          // {kernel.offset_text(address - base)}"
    if around is None:
        yield f"// the opcode is not known: {kernel.text.problem_at(function.address)}"
    else:
        (here,) = (each for each in around if each.address == address)
        later = "          // the kernel may replace it when it loads the module" * kernel.is_changed_later(address)
        yield f"opcode = {here.opcode_byte:#04x}{later}"
        yield ""
        ways = KprobeWays(kernel).ways(function) if kernel.is_loaded else {}
        width = max(len(each.text) for each in around)
        for each in around:
            way = ways.get(each.address)
            line = f"{'=>' if each is here else '  '} {each.offset:8x}   {each.raw.hex(' '):<30} {each.text:<{width}}"
            yield f"{line}   {way.value if way is not None else ''}".rstrip()
        if origin := kernel.text.origin_of(address):
            patched = "; the kernel patches such code when it runs" if kernel.text.is_patched(here) else ""
            yield f"the instructions are from {origin}{patched}"
    yield ""
    yield _verdict(kernel, function, address, ways.get(address))


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


_VERDICTS = {
    KprobeWay.FTRACE: "a kprobe, whose handler ftrace calls",
    KprobeWay.JUMP: "a kprobe, for whose breakpoint the kernel puts a jump as soon as it can",
    KprobeWay.JUMP_SINCE: "a kprobe: a breakpoint, or a jump instead since Linux 6.10",
    KprobeWay.EMULATED: "a kprobe: a breakpoint, whose instruction the kernel emulates",
    KprobeWay.MOVED: "a kprobe: a breakpoint, whose instruction is executed elsewhere",
    KprobeWay.MOVED_SINCE: (
        "a kprobe: a breakpoint, whose instruction is executed elsewhere; before Linux 6.10 it runs into another one"
    ),
    KprobeWay.STEPPED: "a kprobe: a breakpoint, whose instruction is executed elsewhere and runs into another one",
}


def _verdict(kernel: RunningKernel, function: KernelSymbol, address: int, way: KprobeWay | None) -> str:
    if (reason := kernel.refusal(address)) is not None:
        return f"ebpf: {reason}"
    if function.module:
        return "ebpf: a kprobe, which the kernel registers whenever it loads the module; a pattern may use ftrace"
    if address == function.address and kernel.is_traceable(address):
        return "ebpf: ftrace calls the handler, if it reads only registers of arguments; else a kprobe does"
    if way is not None:
        return f"ebpf: {_VERDICTS[way]}"
    return "ebpf: a kprobe, for which the kernel replaces the instruction by a breakpoint, or by a jump if it can"
