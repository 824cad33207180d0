"""Places of a script's probes in the syntax of DProbes C."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from dprobes.rpn.performance_counters import period_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.bpftrace import script_tree
    from dprobes.diagnostics import Diagnostics

__all__ = ["LONG_NAMES", "Machine", "Place", "PlaceKind", "places_of"]


class Machine(Protocol):
    """The facts about a machine, or about an unknown one (``NoMachine``)."""

    def library(self, name: str) -> str:
        """Return the file name of a library such as ``libc``; the same name if there is none."""

    def tracepoints(self, subsystem: str, pattern: str) -> Sequence[str]:
        """Return the names of the tracepoints of a subsystem that match a shell pattern."""

    def arrays(self, subsystem: str, name: str) -> Mapping[str, int]:
        """Return the sizes in bytes of a tracepoint's array fields, by field, or 0 if the size is in the record."""

    def pointers(self, subsystem: str, name: str) -> Mapping[str, str]:
        """Return the C types of a tracepoint's fields that point to structures, by field."""


class NoMachine:
    """Machine of which nothing is known: no tracepoint matches a pattern, and no field is an array or a pointer."""

    def library(self, name: str) -> str:
        """Return the library's name unchanged: its file is not known."""
        return name

    def tracepoints(self, subsystem: str, pattern: str) -> Sequence[str]:  # noqa: ARG002 - what the protocol says
        """Return no names: patterns of tracepoints match nothing on an unknown machine."""
        return ()

    def arrays(self, subsystem: str, name: str) -> Mapping[str, int]:  # noqa: ARG002 - what the protocol says
        """Return no fields: those of tracepoints are not known, so none is treated as an array."""
        return {}

    def pointers(self, subsystem: str, name: str) -> Mapping[str, str]:  # noqa: ARG002 - what the protocol says
        """Return no fields: those of tracepoints are not known, so none is treated as a pointer."""
        return {}


LONG_NAMES = {
    "k": "kprobe", "kr": "kretprobe", "u": "uprobe", "ur": "uretprobe", "U": "usdt", "t": "tracepoint", "p": "profile",
    "i": "interval", "s": "software", "h": "hardware", "w": "watchpoint", "f": "kfunc", "fr": "kretfunc",
    "fentry": "kfunc", "fexit": "kretfunc", "rt": "rawtracepoint", "it": "iter", "begin": "BEGIN", "end": "END",
}  # fmt: skip
"""Long names of kinds of probes, by their short and new names."""

_ABSENT = {
    "rawtracepoint": "raw tracepoints are not probepoints",
    "iter": "iterators are not probepoints",
    "asyncwatchpoint": "watchpoints on arguments are not probepoints",
}
_HINTS = {
    "rawtracepoint": "write tracepoint:SUBSYSTEM:NAME",
}
_DIGITS_MAX = 20
_SYSTEM_CALL = re.compile(r"sys_(enter|exit)_(.+)")
_CALLS = {
    "newstat": "stat", "newlstat": "lstat", "newfstat": "fstat", "newuname": "uname", "sendfile64": "sendfile",
    "umount": "umount2",
}  # fmt: skip
"""System calls whose tracepoints have other names on x86-64 (arch/x86/entry/syscalls/syscall_64.tbl of the kernel)."""

_EVENTS = {
    "page-faults": ("page-faults", 100), "faults": ("page-faults", 100), "minor-faults": ("minor-faults", 100),
    "major-faults": ("major-faults", 1), "context-switches": ("context-switches", 1000),
    "cs": ("context-switches", 1000), "cpu-migrations": ("cpu-migrations", 1), "task-clock": ("task-clock", 0),
    "cpu-cycles": ("cycles", 1_000_000), "cycles": ("cycles", 1_000_000), "instructions": ("instructions", 1_000_000),
    "cache-references": ("cache-references", 1_000_000), "cache-misses": ("cache-misses", 1_000_000),
    "branch-instructions": ("branches", 100_000), "branches": ("branches", 100_000),
    "branch-misses": ("branch-misses", 100_000), "bus-cycles": ("bus-cycles", 100_000),
    "ref-cycles": ("ref-cycles", 1_000_000),
}  # fmt: skip
"""
Events of bpftrace's ``software`` and ``hardware``: our counters, and the periods if a script states none.

0: a script must state it.
"""

_PERIODS = {"s": 1, "ms": 10**3, "us": 10**6}
_TYPES = {1: "char", 2: "short", 4: "int", 8: "long"}
_WILD = re.compile(r"[*?\[]")


class PlaceKind(enum.Enum):
    """The kind of a probed place: it decides whether arguments, a return value or fields can be used there."""

    ENTRY = "entry"
    RETURN = "return"
    CALL_ENTRY = "entry of a system call"
    CALL_RETURN = "return of a system call"
    TRACEPOINT = "tracepoint"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Place:
    """
    Place to probe. ``text`` is written in DProbes C, ``written`` is its name in bpftrace.

    ``function`` is the last part of that name. ``subsystem`` is that of a tracepoint, otherwise empty. ``has_names``
    means that the script uses the names of the function's parameters.
    """

    text: str
    kind: PlaceKind
    written: str = ""
    function: str = ""
    subsystem: str = ""
    has_names: bool = False

    @property
    def is_usdt(self) -> bool:
        """True for a USDT probe, which has more arguments than registers hold."""
        return self.text.startswith("usdt ")

    @property
    def knows_kernel(self) -> bool:
        """True if the types of the kernel are known: in its code, at tracepoints and system calls, in samplers."""
        return self.text.removeprefix("return ").startswith(("kernel:", "kmod ", "tracepoint ", "syscall ", "sample "))


def places_of(point: script_tree.Point, machine: Machine, diagnostics: Diagnostics) -> list[Place]:
    """Return the places of a script's probe point; report one without an equivalent."""
    return list(_Places(point, machine, diagnostics).found())


class _Places:
    def __init__(self, point: script_tree.Point, machine: Machine, diagnostics: Diagnostics) -> None:
        self._point = point
        self._machine = machine
        self._diagnostics = diagnostics

    def found(self) -> Iterator[Place]:
        word, *rest = self._point.parts
        kind = LONG_NAMES.get(word, word)
        match kind, rest:
            case "kprobe" | "kretprobe", [function]:
                yield self._function("kernel", function, is_return=kind == "kretprobe")
            case "kprobe" | "kretprobe", [module, function]:
                yield self._function(f"kmod {_quoted(module)}", function, is_return=kind == "kretprobe")
            case "kfunc" | "kretfunc", [function]:
                yield replace(self._function("kernel", function, is_return=kind == "kretfunc"), has_names=True)
            case "kfunc" | "kretfunc", [module, function]:
                where = "kernel" if module == "vmlinux" else f"kmod {_quoted(module)}"
                yield replace(self._function(where, function, is_return=kind == "kretfunc"), has_names=True)
            case "software" | "hardware", [event, *period]:
                yield from self._event(event, ":".join(period))
            case "uprobe" | "uretprobe", [path, function] if function:
                yield from self._of_program(path, function, is_return=kind == "uretprobe")
            case "usdt", [path, provider, name] if provider and name and not _WILD.search(path):
                yield Place(
                    f"usdt {_quoted(self._library(path))}:{provider}:{name}", PlaceKind.ENTRY, self._written, name
                )
            case "usdt", _:
                self._wrong(f"'{self._written}' names no program and provider", "write usdt:PROGRAM:PROVIDER:NAME")
            case "tracepoint", ["syscalls", name]:
                yield from self._system_calls(name)
            case "tracepoint", [subsystem, name]:
                yield from self._tracepoints(subsystem, name)
            case "profile", [unit, number] if number.isdigit() and len(number) < _DIGITS_MAX and int(number):
                yield from self._sampler(unit, int(number))
            case "watchpoint", [address, size, access]:
                yield from self._watchpoint(address, size, access)
            case _ if kind in _ABSENT:
                self._wrong(f"'{self._written}' has no equivalent in DProbes C: {_ABSENT[kind]}", _HINTS.get(kind))
            case _:
                self._wrong(f"'{self._written}' is not a probe of bpftrace that is known here")

    @property
    def _written(self) -> str:
        return ":".join(self._point.parts)

    def _wrong(self, message: str, hint: str | None = None) -> None:
        self._diagnostics.error(self._point.span, message, hint=hint)

    def _library(self, path: str) -> str:
        return path if "/" in path or ".so" in path or path == "*" else self._machine.library(path)

    def _function(self, module: str, function: str, *, is_return: bool) -> Place:
        kind = PlaceKind.RETURN if is_return else PlaceKind.ENTRY if "+" not in function else PlaceKind.OTHER
        return Place(f"{'return ' if is_return else ''}{module}:{function}", kind, self._written, function.strip('"'))

    def _of_program(self, path: str, function: str, *, is_return: bool) -> Iterator[Place]:
        if path == "*" or _WILD.search(path):
            self._wrong(
                "a pattern of programs has no equivalent in DProbes C",
                "name the library: its probes are in all programs",
            )
        elif function[0].isdigit():
            self._wrong("an address of a program has no equivalent in DProbes C", "write FUNCTION+OFFSET")
        else:
            yield self._function(_quoted(self._library(path)), _quoted(function), is_return=is_return)

    def _system_calls(self, pattern: str) -> Iterator[Place]:
        names = self._machine.tracepoints("syscalls", pattern) if _WILD.search(pattern) else [pattern]
        for name in names:
            match = _SYSTEM_CALL.fullmatch(name)
            if match is None:
                self._wrong(f"'{name}' is not a tracepoint of a system call", "write sys_enter_NAME or sys_exit_NAME")
            else:
                is_return = match[1] == "exit"
                call = _CALLS.get(match[2], match[2])
                kind = PlaceKind.CALL_RETURN if is_return else PlaceKind.CALL_ENTRY
                yield Place(
                    f"{'return ' if is_return else ''}syscall {call}", kind, f"tracepoint:syscalls:{name}", name
                )
        if not names:
            self._none_match()

    def _tracepoints(self, subsystem: str, pattern: str) -> Iterator[Place]:
        names = self._machine.tracepoints(subsystem, pattern) if _WILD.search(pattern) else [pattern]
        for name in names:
            written = f"tracepoint:{subsystem}:{name}"
            yield Place(f"tracepoint {subsystem}:{name}", PlaceKind.TRACEPOINT, written, name, subsystem)
        if not names:
            self._none_match()

    def _none_match(self) -> None:
        self._wrong(f"no tracepoint of this machine matches '{self._written}'")

    def _sampler(self, unit: str, number: int) -> Iterator[Place]:
        rate, rest = (number, 0) if unit == "hz" else divmod(_PERIODS.get(unit, 0), number)
        if rest or not rate:
            self._wrong(f"'{self._written}' is not a whole number of samples a second", "write profile:hz:99")
        else:
            yield Place(f"sample {rate}hz", PlaceKind.OTHER)

    def _event(self, event: str, written: str) -> Iterator[Place]:
        if event not in _EVENTS:
            self._wrong(f"'{self._written}' has no equivalent in DProbes C: there is no such counter")
            return
        counter, usual = _EVENTS[event]
        period = int(written) if written.isdecimal() and len(written) < _DIGITS_MAX else 0 if written else usual
        if (problem := period_problem(period, counter)) is not None:
            self._wrong(problem, f"write {':'.join(self._point.parts[:2])}:NUMBER")
        else:
            yield Place(f"sample {counter}:{period}", PlaceKind.OTHER)

    def _watchpoint(self, address: str, size: str, access: str) -> Iterator[Place]:
        type_ = _TYPES.get(int(size) if size.isdigit() and len(size) < 3 else 0)
        if type_ is None or access not in ("w", "rw", "x"):
            form = "write watchpoint:ADDRESS:8:w, with 1, 2, 4 or 8 bytes"
            self._wrong(f"'{self._written}' is not a watchpoint", form)
        else:
            yield Place(f"watch {access} ({type_}){address}", PlaceKind.OTHER)


def _quoted(name: str) -> str:
    """Return a name in the syntax of places: in quotes if it has brackets or blanks."""
    return f'"{name}"' if re.search(r"[\s(){},;]", name) else name
