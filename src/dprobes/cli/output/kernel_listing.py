"""The output of ``locate`` for places in the running kernel."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dprobes.errors import TargetError, reason_of
from dprobes.rpn.rpn_program import Expression
from dprobes.target.code.machine_code import MAX_LENGTH, decode
from dprobes.target.kernel.kernel_copies import copies_of, source_of_copy
from dprobes.target.kernel.kernel_files import module_name
from dprobes.target.kernel.kprobe_ways import KprobeWay, KprobeWays
from dprobes.target.kernel.running_kernel import KERNEL_NAMES, RunningKernel
from dprobes.target.kernel.tracepoints import KernelTracepoints, system_calls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.kernel.kernel_symbols import KernelSymbol

__all__ = ["describe_kernel_place", "describe_traced", "is_module_file", "is_traced", "kernel_module", "split_traced"]

_BITS = 64
_BEFORE, _AFTER = 3, 6


def kernel_module(name: str) -> tuple[RunningKernel, str] | None:
    """
    Return the kernel and the name of one of its modules, "" for the kernel itself, or None if ``name`` is neither.

    If the module is not loaded, the kernel is the object in the module's file. Raise ``TargetError`` for a file that
    cannot be read.
    """
    kernel = RunningKernel()
    if name in KERNEL_NAMES:
        return kernel, ""
    module = module_name(name)
    if module in kernel.modules:
        return kernel, module
    from dprobes.target.kernel.kernel_image import open_unloaded_module

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
    """Iterate over the lines about the kernel or a module, and a place in it; raise ``TargetError`` without one."""
    base = kernel.base_of(module)
    release = f"Linux {os.uname().release}"
    yield f"module    {module} of {release}" if module else f"module    the running kernel, {release}"
    yield f"loaded at {base:#x}" if kernel.is_loaded else f"file      {kernel.file}, which is not loaded"
    if expression is None:
        return
    if expression.symbol is None:
        # As in 'address =' and 'offset =': numbers in the upper half are addresses.
        address = expression.addend if expression.addend >> 63 else base + expression.addend
    else:
        address = kernel.symbol(expression.symbol, module, is_code=True).address + expression.addend
    function = kernel.symbols.covering(address)
    if function is None or function.module != module:
        raise TargetError(f"{address:#x} is not in the code of '{module or KERNEL_NAMES[0]}'")
    around = _instructions(kernel, function, address, base)
    yield f"function  {kernel.name_of(address)}"
    if function.name in kernel.symbols.shared_names:
        copies = copies_of(kernel, function.name, module)
        copy = next(each for each in copies if each.symbol.address == function.address)
        yield f"source    {source_of_copy(kernel, copy) or 'unknown'}"
    if kernel.is_loaded:
        yield f"address   {address:#x}"
    yield ""
    ways: Mapping[int, KprobeWay] = {}
    written = expression.symbol
    if written is not None and re.fullmatch(r"[\w.$]+", written, re.ASCII) is None:
        expression = Expression(expression.addend, f'"{written}"')
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
    """
    Return the instructions of a function around an address, or None if the kernel does not expose its code.

    ``base`` is the address to which displayed offsets are relative. Raise ``TargetError`` for an address inside an
    instruction.
    """
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
    KprobeWay.JUMP: "a kprobe: a breakpoint, which the kernel replaces by a jump as soon as it can",
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


# The output of ``locate`` for the kernel's tracepoints and system calls: lists by pattern, and the fields of one.

_TRACEPOINT, _SYSTEM_CALL = "tracepoint", "syscall"
_WILD = "*?["


def is_traced(place: str) -> bool:
    """Return whether a place is one of a tracepoint or system call, or a pattern of these."""
    return split_traced(place)[0] in (_TRACEPOINT, _SYSTEM_CALL)


def split_traced(place: str) -> tuple[str, str]:
    """Return the kind and the name, separated by a blank as in DProbes C, or by a colon."""
    kind, _, name = place.replace(" ", ":", 1).partition(":")
    return kind, name.strip()


def describe_traced(place: str) -> Iterator[str]:
    """
    Iterate over the lines about ``tracepoint SUBSYSTEM:NAME`` or ``syscall NAME``, or the matches of a pattern.

    Lists use the names of DProbes C. Without a name all are listed. Raise ``TargetError`` if nothing matches.
    """
    kind, name = split_traced(place)
    if kind == _SYSTEM_CALL:
        yield from _system_calls(name)
    else:
        yield from _tracepoints(name)


def _system_calls(name: str) -> Iterator[str]:
    calls = system_calls()
    if not name or any(c in name for c in _WILD):
        found = [each for each in calls if fnmatchcase(each, name or "*")]
        if not found:
            raise TargetError(f"no system call matches '{name}'")
        yield from (f"{_SYSTEM_CALL} {each}" for each in found)
        return
    known = KernelTracepoints()
    known.find_system_call(name, (), at_return=False)
    call = calls[name]
    numbers = {"x86_64": call.wide, "i386": call.narrow}
    yield f"system call  {name}, " + ", ".join(
        f"{number} in {arch}" for arch, number in numbers.items() if number is not None
    )
    yield ""
    yield f"offset = {_SYSTEM_CALL}:{name}          // with 'return = yes' its end"
    yield ""
    parameters = [(each, kind) for kind, each in call.parameters]
    yield from _fields(
        "its arguments, at the end as well", [*parameters, ("arg0", "to arg5: the same by their places")]
    )
    yield from _fields("at the end", [("ret", "long")])


def _tracepoints(name: str) -> Iterator[str]:
    known = KernelTracepoints()
    subsystem, colon, event = name.partition(":")
    if not colon or any(c in name for c in _WILD):
        pattern = name if colon else f"{name or '*'}:*"
        try:
            all_names = [f"{each}:{one}" for each in known.subsystems() for one in known.names(each)]
        except OSError as error:
            raise TargetError(
                f"the kernel does not show its tracepoints: tracefs: {reason_of(error)}", hint="run dprobes as root"
            ) from error
        found = [each for each in all_names if fnmatchcase(each, pattern)]
        if not found:
            raise TargetError(f"this kernel has no tracepoint that matches '{pattern}'")
        yield from (f"{_TRACEPOINT} {each}" for each in found)
        return
    known.find(subsystem, event, ())
    yield f"tracepoint  {name}"
    yield ""
    yield f"offset = {name}"
    yield ""
    record = [(field.name, field.type_name) for field in known.record_fields(subsystem, event).values()]
    yield from _fields("the record", record)
    yield from _fields(
        "or the arguments, and members of what they point to", [(b, a) for a, b in known.arguments(event)]
    )


def _fields(title: str, fields: list[tuple[str, str]]) -> Iterator[str]:
    if not fields:
        return
    yield f"// {title}:"
    width = max(len(name) for name, _ in fields)
    yield from (f"push tp, {name:<{width}}   // {kind}" for name, kind in fields)
