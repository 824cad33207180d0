"""The kernel's tracepoints and system calls as ``locate`` shows them: lists by pattern, and the fields of one."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dprobes.errors import TargetError, reason_of
from dprobes.target.kernel.systemcalls import system_calls
from dprobes.target.kernel.tracepoints import KernelTracepoints

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["describe_traced", "is_traced", "split_traced"]

_TRACEPOINT, _SYSTEM_CALL = "tracepoint", "syscall"
_WILD = "*?["


def is_traced(place: str) -> bool:
    """Return whether a place is one of a tracepoint or system call, or a pattern of such."""
    return split_traced(place)[0] in (_TRACEPOINT, _SYSTEM_CALL)


def split_traced(place: str) -> tuple[str, str]:
    """Return the kind and the name, which a blank separates as in DProbes C, or a colon."""
    kind, _, name = place.replace(" ", ":", 1).partition(":")
    return kind, name.strip()


def describe_traced(place: str) -> Iterator[str]:
    """
    Iterate over the lines about ``tracepoint SUBSYSTEM:NAME`` or ``syscall NAME``, or what matches a pattern.

    Lists have each as a program in DProbes C names it. Without a name all are listed.
    Raise ``TargetError`` if there is no such thing.
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
