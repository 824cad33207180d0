"""
Tracepoints and system calls of the running kernel, and the paths to their fields.

A tracepoint has two sets of fields. Its *record*, which perf and tracefs use, has fields that the tracepoint computes,
such as ``prev_pid``. Its *arguments* are the arguments of the call in the kernel's code, such as ``prev``, a pointer to
a ``struct task_struct``. Members are reached from them: ``prev.mm.pgd``. tracefs describes the records, the kernel's
type information (BTF) the arguments. Each description may be inaccessible. A handler can use one of the two sets, not
both.

A system call is recognised by its number at ``raw_syscalls:sys_enter`` and ``sys_exit``. Its arguments are in the saved
user registers (``struct pt_regs``), which are available at the end, too.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.diagnostics import first_of, near_names
from dprobes.errors import FormatError, TargetError, reason_of
from dprobes.target.btf import KERNEL_BTF, Btf, Kind
from dprobes.target.kernel.traced_fields import (
    SYSTEM_CALL_END,
    SYSTEM_CALL_ENTRY,
    Form,
    Source,
    SystemCallNumbers,
    TracedEvent,
    TracedField,
)
from dprobes.target.kernel.tracefs import open_trace_files, parse_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dprobes.target.kernel.tracefs import RecordField, TraceFormat

__all__ = ["FieldError", "KernelTracepoints", "system_calls"]

ARGUMENT_COUNT = 6
"""Maximum number of arguments of a system call."""


@dataclass(frozen=True, slots=True)
class SystemCall:
    """System call: its numbers in x86-64 and in i386 (None if missing), and (type, name) of each parameter."""

    name: str
    wide: int | None
    narrow: int | None
    parameters: tuple[tuple[str, str], ...]


@cache
def system_calls() -> Mapping[str, SystemCall]:
    """Return all system calls of x86-64 and i386, by name."""
    text = resources.files(__package__).joinpath("systemcalls.txt").read_text(encoding="ascii")
    calls = (_call(line) for line in text.splitlines() if not line.startswith("#"))
    return {call.name: call for call in calls}


def _call(line: str) -> SystemCall:
    name, wide, narrow, *rest = line.split(" ", 3)
    parameters = tuple(_parameter(text) for text in rest[0].split(", ")) if rest else ()
    return SystemCall(name, _number(wide), _number(narrow), parameters)


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


def _parameter(text: str) -> tuple[str, str]:
    type_name, _, name = text.rpartition(" ")
    return type_name, name


_WORD = 8
_LISTED = 12
_FORMS = {"": Form.ADDRESS, "__data_loc": Form.PLACED, "__rel_loc": Form.PLACED_BEHIND}

_MADE_OF_CALLS = re.compile(r"\A(?:__(?:x64|ia32)_)?(?:sys|ksys|do_sys|compat_sys)_")
"""Prefixes of the names of functions that implement system calls."""
_NO_TRACEPOINTS = ("ftrace",)
"""Subsystems whose formats describe ftrace's own records. Nothing can attach to them."""

_ENTRY, _END = SYSTEM_CALL_ENTRY, SYSTEM_CALL_END
"""The tracepoints ``(struct pt_regs *regs, long id)`` and ``(struct pt_regs *regs, long ret)``."""

_NUMBERS = {
    **dict.fromkeys(
        ("int", "pid_t", "clockid_t", "timer_t", "mqd_t", "key_t", "key_serial_t", "rwf_t", "__s32"), (4, True)
    ),
    **dict.fromkeys(
        ("unsigned int", "unsigned", "uid_t", "gid_t", "qid_t", "u32", "__u32", "enum landlock_rule_type"), (4, False)
    ),
    **dict.fromkeys(("long", "loff_t", "off_t"), (_WORD, True)),
    "umode_t": (2, False),
}
"""
Size in bytes and signedness of a system call's parameter, by its type. The rest of the register is ignored.

Other types are unsigned words, such as ``size_t`` and pointers.
"""

_WIDE_REGISTERS = ("di", "si", "dx", "r10", "r8", "r9")
_NARROW_REGISTERS = ("bx", "cx", "dx", "si", "di", "bp")
"""The members of ``struct pt_regs`` with a system call's arguments, for 64-bit and for 32-bit processes."""


class FieldError(TargetError):
    """Error of a program with a ``field`` that a tracepoint or system call lacks, or that no BPF program can load."""

    def __init__(self, field: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field


class KernelTracepoints:
    """Tracepoints of the running kernel. Their descriptions are read once, when they are first used."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, str], tuple[TraceFormat | None, OSError | None]] = {}

    def find(self, subsystem: str, name: str, fields: Iterable[str]) -> TracedEvent:
        """
        Return a tracepoint with the paths to the fields.

        Raise ``TargetError`` if the tracepoint does not exist, or the user may not read its description. Raise
        ``FieldError`` if it lacks a field.
        """
        wanted = list(fields)
        shape, problem = self._shape(subsystem, name)
        if shape is not None and all(each in shape.fields for each in wanted):
            ways = {each: _way_in_record(shape.fields[each]) for each in wanted}
            return TracedEvent(Source.RECORD, name, shape.number, ways)
        no_types: OSError | None = None
        try:
            parameters = self._parameters(name)
        except (OSError, TargetError) as error:
            if shape is None:
                raise self._unknown(subsystem, name, problem, error) from error
            no_types = error if isinstance(error, OSError) else None
            parameters = {}
        known = [*(shape.fields if shape is not None else ()), *parameters]
        ways = {}
        for each in wanted:
            first = each.partition(".")[0]
            if first not in parameters:
                raise self._no_field(f"{subsystem}:{name}", each, wanted, known, shape, problem, no_types)
            ways[each] = self._way_from(parameters, each)
        return TracedEvent(Source.ARGUMENTS, name, fields=ways)

    def ways_to(self, subsystem: str, name: str, field: str) -> list[TracedField]:
        """
        Return the paths to a field of a tracepoint, in its record and from its arguments.

        The result is empty for an unknown field. Raise ``TargetError`` if the description of the record is malformed.
        """
        shape, _ = self._shape(subsystem, name)
        ways = [_way_in_record(shape.fields[field])] if shape is not None and field in shape.fields else []
        with suppress(OSError, TargetError):
            if field.partition(".")[0] in (parameters := self._parameters(name)):
                ways.append(self._way_from(parameters, field))
        return ways

    def find_system_call(self, name: str, fields: Iterable[str], *, at_return: bool) -> TracedEvent:
        """
        Return a system call, or the end of one, with the paths to these fields.

        Raise the same errors as ``find``.
        """
        calls = system_calls()
        call = calls.get(name)
        if call is None:
            plain = _MADE_OF_CALLS.sub("", name)
            near = [plain] if plain in calls else near_names(name, calls, 2)
            hint = f"did you mean {' or '.join(repr(each) for each in near)}?" if near else None
            raise TargetError(f"there is no system call '{name}'", hint=hint)
        try:
            known = self.system_call_fields(call, at_return=at_return)
            status = self._types.member_offset("task_struct", "thread_info.status")
            registers = self._register("orig_ax")
        except OSError as error:
            raise TargetError(
                f"system calls cannot be recognised: the kernel shows no types ({KERNEL_BTF}: {reason_of(error)})",
                hint="a kernel with CONFIG_DEBUG_INFO_BTF is needed",
            ) from error
        for each in fields:
            if each not in known:
                where = f"the end of the system call '{name}'" if at_return else f"the system call '{name}'"
                raise FieldError(
                    each, f"{where} has no field '{each}'", f"its fields are {first_of(list(known), _LISTED)}"
                )
        ways = {each: known[each] for each in fields}
        number = TracedField("long", 0, 4, (registers,))
        numbers = SystemCallNumbers(call.wide, call.narrow, number, status)
        return TracedEvent(Source.SYSTEM_CALL, _END if at_return else _ENTRY, fields=ways, system_call=numbers)

    def system_call_fields(self, call: SystemCall, *, at_return: bool) -> Mapping[str, TracedField]:
        """Return the fields of a system call by name; OSError if the kernel's type information is not readable."""
        fields: dict[str, TracedField] = {}
        pairs = zip(_WIDE_REGISTERS, _NARROW_REGISTERS, strict=True)
        ways = [((self._register(wide),), (self._register(narrow),)) for wide, narrow in pairs]
        for number, (path, narrow_path) in enumerate(ways[:ARGUMENT_COUNT]):
            fields[f"arg{number}"] = TracedField("long", 0, _WORD, path, is_signed=True, narrow_path=narrow_path)
        for number, (type_name, name) in enumerate(call.parameters):
            path, narrow_path = ways[number]
            size, is_signed = _NUMBERS.get(type_name.removeprefix("const "), (_WORD, False))
            fields.setdefault(name, TracedField(type_name, 0, size, path, is_signed=is_signed, narrow_path=narrow_path))
        if at_return:
            fields["ret"] = TracedField("long", _WORD, _WORD, is_signed=True)
        return fields

    def subsystems(self) -> list[str]:
        """Return the subsystems that have tracepoints; raise OSError if they cannot be read."""
        with open_trace_files() as files:
            return [name for name in files.names("events") if name not in _NO_TRACEPOINTS]

    def names(self, subsystem: str) -> list[str]:
        """Return the tracepoints of a subsystem; raise OSError if they cannot be read."""
        with open_trace_files() as files:
            return files.names(f"events/{subsystem}")

    def record_fields(self, subsystem: str, name: str) -> Mapping[str, RecordField]:
        """Return the fields of a tracepoint's record. The mapping is empty if they cannot be read."""
        shape, _ = self._shape(subsystem, name)
        return {} if shape is None else shape.fields

    def arguments(self, name: str) -> list[tuple[str, str]]:
        """Return type and name of each argument of a tracepoint. The list is empty if they cannot be read."""
        try:
            return [(self._types.type_name(number), each) for each, (_, number) in self._parameters(name).items()]
        except (OSError, TargetError):
            return []

    @cached_property
    def _types(self) -> Btf:
        return Btf(Path(KERNEL_BTF).read_bytes())

    def _shape(self, subsystem: str, name: str) -> tuple[TraceFormat | None, OSError | None]:
        """Return the format of a tracepoint's record, or None and the error that prevents reading it."""
        if (subsystem, name) not in self._shapes:
            self._shapes[subsystem, name] = self._read_shape(subsystem, name)
        return self._shapes[subsystem, name]

    @staticmethod
    def _read_shape(subsystem: str, name: str) -> tuple[TraceFormat | None, OSError | None]:
        try:
            with open_trace_files() as files:
                return parse_format(files.read(f"events/{subsystem}/{name}/format")), None
        except OSError as error:
            return None, error
        except FormatError as error:
            raise TargetError(f"the kernel's description of '{subsystem}:{name}' is not understood: {error}") from error

    def _parameters(self, name: str) -> dict[str, tuple[int, int]]:
        """Return the arguments of a tracepoint by name, each with its index and the id of its type."""
        self._types.find(Kind.TYPEDEF, f"btf_trace_{name}")
        # The function that calls the probes has a first parameter for their data (DEFINE_TRACE in linux/tracepoint.h).
        parameters = self._types.parameters(f"__traceiter_{name}")[1:]
        return {each: (place, number) for place, (each, number) in enumerate(parameters)}

    def _way_from(self, parameters: Mapping[str, tuple[int, int]], text: str) -> TracedField:
        """Return the path from an argument through members: ``prev.mm.pgd``."""
        first, *members = text.split(".")
        place, number = parameters[first]
        path: list[int] = []
        types, shown, width, bits = self._types, first, 0, 0
        for member in members:
            value = types.value_type(number)
            if value.kind is Kind.PTR:
                path.append(0)
                number = value.target
            found = types.member(number, member) if path else None
            if found is None:
                kind = types.type_name(number)
                raise FieldError(text, f"'{shown}', of the type '{kind}', has no member '{member}'")
            shown, number, width, bits = f"{shown}.{member}", found.type, found.width, found.bits
            path[-1] += bits // 8
        if width or bits % 8:
            raise FieldError(text, f"'{shown}' is a bit field, which no program can load")
        value = types.value_type(number)
        type_name = types.type_name(number)
        if value.kind in (Kind.INT, Kind.PTR) and value.size in (1, 2, 4, 8):
            return TracedField(type_name, _WORD * place, value.size, tuple(path), value.is_signed)
        if not path:
            raise FieldError(text, f"'{shown}', of the type '{type_name}', is not a number")
        return TracedField(type_name, _WORD * place, _WORD, tuple(path), form=Form.ADDRESS)

    def _register(self, name: str) -> int:
        return self._types.member_offset("pt_regs", name)

    def _unknown(self, subsystem: str, name: str, problem: OSError | None, other: Exception) -> TargetError:
        if isinstance(other, OSError) and problem is not None and not isinstance(problem, FileNotFoundError):
            return TargetError(
                f"the kernel does not show its tracepoints: tracefs: {reason_of(problem)}; "
                f"{KERNEL_BTF}: {reason_of(other)}",
                hint="run dprobes as root; where lockdown closes tracefs, CONFIG_DEBUG_INFO_BTF is needed",
            )
        try:
            names = [f"{subsystem}:{each}" for each in self.names(subsystem)]
        except OSError:
            names = []
        near = near_names(f"{subsystem}:{name}", names, 2)
        hint = f"did you mean {' or '.join(repr(each) for each in near)}?" if near else None
        return TargetError(f"this kernel has no tracepoint '{subsystem}:{name}'", hint=hint)

    def _no_field(
        self,
        place: str,
        name: str,
        wanted: Iterable[str],
        known: Iterable[str],
        shape: TraceFormat | None,
        problem: OSError | None,
        no_types: OSError | None,
    ) -> FieldError:
        if shape is not None and name in shape.fields:
            others = next(each for each in wanted if each not in shape.fields)
            return FieldError(
                name,
                f"'{name}' is a field of the record of '{place}', and '{others}' is not: a handler sees either the "
                "record or the arguments",
                f"the record has {first_of(list(shape.fields), _LISTED)}",
            )
        hidden = "" if problem is None else f"; its record is not shown here (tracefs: {reason_of(problem)})"
        if no_types is not None:
            hidden = f"; its arguments are not shown here ({KERNEL_BTF}: {reason_of(no_types)})"
        return FieldError(
            name, f"'{place}' has no field '{name}'{hidden}", f"there are {first_of(list(known), _LISTED)}"
        )


def _way_in_record(found: RecordField) -> TracedField:
    if found.is_array:
        return TracedField(found.type_name, found.offset, min(found.size, _WORD), form=_FORMS[found.place])
    return TracedField(found.type_name, found.offset, found.size, is_signed=found.is_signed)
