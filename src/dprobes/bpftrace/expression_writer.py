"""Expressions of a script in DProbes C. One without an equivalent is reported, and written as 0."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpftrace import script_tree
from dprobes.bpftrace.script_place import PlaceKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.bpftrace.script_place import Place
    from dprobes.diagnostics import Diagnostics
    from dprobes.source_text import Span

__all__ = [
    "AGGREGATIONS",
    "PREFIX",
    "ExpressionWriter",
    "Fields",
    "Form",
    "Kept",
    "MapUses",
    "expressions_in",
    "expressions_of",
    "statements_of",
]

PRECEDENCE = {
    "||": 2, "&&": 3, "|": 4, "^": 5, "&": 6, "==": 7, "!=": 7, "<": 8, ">": 8, "<=": 8, ">=": 8, "<<": 9, ">>": 9,
    "+": 10, "-": 10, "*": 11, "/": 11, "%": 11,
}  # fmt: skip
"""Precedences of operators, as in C."""

CONDITIONAL, PREFIX, ATOM = 1, 12, 13


class Form(enum.Enum):
    """The form of a script's value; values other than numbers can only be printed, compared, or be keys of a map."""

    NUMBER = "a number"
    TEXT = "a string"
    LITERAL = "a text in quotes"
    SYMBOL = "a symbol"
    STACK = "a call stack"
    BYTES = "bytes"
    NETWORK = "a network address"


@dataclass(frozen=True, slots=True)
class Value:
    """
    A script's value in DProbes C.

    ``text`` is the expression, and ``precedence`` that of its outermost operator. ``type`` is the C type of a pointer
    after a cast, else empty.
    """

    text: str
    precedence: int = ATOM
    form: Form = Form.NUMBER
    type: str = ""

    def within(self, precedence: int) -> str:
        """Return the text as an operand of an operator with this precedence, in parentheses if required."""
        return self.text if self.precedence >= precedence else f"({self.text})"

    @property
    def number(self) -> str:
        """The text for use as a number: for a symbol, its address."""
        return "pc" if self.form is Form.SYMBOL and self.text in ("func", "probe") else self.text

    @property
    def key(self) -> str:
        """The text for use as a key field of a table."""
        return f"sym({self.text})" if self.form is Form.SYMBOL and self.text not in ("func", "probe") else self.text


AGGREGATIONS = {"count": 0, "sum": 1, "min": 1, "max": 1, "avg": 1, "stats": 1, "hist": 1, "lhist": 4}
"""Aggregations that bpftrace can keep in a map, and the numbers of their arguments."""

_WIDENING = ("+", "-", "*", "<<")
"""The operators whose result may need more bits than their operands."""

_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z|j|t)?([a-zA-Z%])")

_SYMBOLS = frozenset({"ksym", "usym", "sym"})
_TEXTS = frozenset({"str", "strftime", "ntop", "buf", "path"})


class Kept(enum.Enum):
    """The kind of values in a map; ``NAMES`` means that string literals are assigned to its keys."""

    NUMBER = "numbers"
    SYMBOL = "symbols"
    NAMES = "names"
    TEXT = "strings"
    STACK = "call stacks of the kernel"
    USER_STACK = "call stacks of programs"
    TUPLE = "tuples"


@dataclass(frozen=True, slots=True)
class MapUses:
    """The kind of values in each map of a script, and the numbers of the probes that write to the map, by map name."""

    kept: Mapping[str, Kept]
    makers: Mapping[str, Sequence[int]]
    literal_keys: dict[tuple[str, int], bool] = field(default_factory=dict)
    """True where the first use of a map has a string literal as a key, by the map's name and the key's position."""

    @classmethod
    def of(cls, script: script_tree.Script) -> MapUses:
        """Return the kinds of values that a script assigns to each map, and the probes that do so."""
        kept: dict[str, Kept] = dict.fromkeys(_strings_of_fields(script), Kept.TEXT)
        makers: dict[str, list[int]] = {}
        for number, probe in enumerate(script.probes):
            strings: dict[str, Kept] = {}
            for statement in statements_of(probe.body):
                match statement:
                    case script_tree.Assignment(script_tree.Variable(name), _, value):
                        strings[name] = _kept_by(value, strings)
                    case script_tree.Assignment(script_tree.Map(name), _, value):
                        found = _kept_by(value, strings)
                        if kept.get(name, Kept.NUMBER) is Kept.NUMBER:
                            kept[name] = found
                        makers.setdefault(name, []).append(number)
                    case script_tree.Do(script_tree.Step(_, script_tree.Map(name))):
                        kept.setdefault(name, Kept.NUMBER)
                        makers.setdefault(name, []).append(number)
        return cls(kept, makers)


def _strings_of_fields(script: script_tree.Script) -> set[str]:
    """Return the maps that keep character arrays: values read from a field and printed as a string."""
    assigned: dict[str, list[script_tree.Expression]] = {}
    printed: set[str] = set()
    for probe in script.probes:
        for statement in statements_of(probe.body):
            match statement:
                case script_tree.Assignment(script_tree.Map(name), "", value):
                    assigned.setdefault(name, []).append(value)
                case script_tree.Do(script_tree.Call("printf", [script_tree.String(format_), *arguments])):
                    letters = [match[1] for match in _CONVERSION.finditer(format_) if match[1] != "%"]
                    pairs = zip(letters, arguments, strict=False)
                    printed |= {
                        each.name for letter, each in pairs if letter == "s" and isinstance(each, script_tree.Map)
                    }
    return {name for name in printed if all(isinstance(each, script_tree.Field) for each in assigned.get(name, [None]))}


def statements_of(body: Sequence[script_tree.Statement]) -> Iterator[script_tree.Statement]:
    """Return the statements of a block and of all blocks in it."""
    return (each for statement in body for each in statement.walk() if isinstance(each, script_tree.Statement))


def expressions_of(probe: script_tree.Probe) -> Iterator[script_tree.Expression]:
    """Iterate over all expressions of a probe and their operands, except maps that are assigned to."""
    if probe.condition is not None:
        yield from _parts_of(probe.condition)
    yield from expressions_in(probe.body)


def expressions_in(body: Sequence[script_tree.Statement]) -> Iterator[script_tree.Expression]:
    """Iterate over the expressions of a block, as ``expressions_of`` does."""
    for statement in statements_of(body):
        match statement:
            case script_tree.Assignment(script_tree.Map(_, keys), operator, value) as assignment:
                if operator:
                    yield assignment.target
                for each in (*keys, value):
                    yield from _parts_of(each)
            case script_tree.Assignment(_, _, value):
                yield from _parts_of(value)
            case script_tree.Do(expression):
                yield from _parts_of(expression)
            case script_tree.If(condition) | script_tree.While(condition):
                yield from _parts_of(condition)


def _parts_of(expression: script_tree.Expression) -> Iterator[script_tree.Expression]:
    """Iterate over an expression and, recursively, its operands; a map's keys are operands."""
    return (each for each in expression.walk() if isinstance(each, script_tree.Expression))


def _kept_by(value: script_tree.Expression, strings: Mapping[str, Kept]) -> Kept:
    match value:
        case script_tree.String():
            return Kept.NAMES
        case script_tree.Tuple():
            return Kept.TUPLE
        case script_tree.Name("func" | "probe"):
            return Kept.SYMBOL
        case script_tree.Name("comm" | "username"):
            return Kept.TEXT
        case script_tree.Name("kstack") | script_tree.Call("kstack"):
            return Kept.STACK
        case script_tree.Name("ustack") | script_tree.Call("ustack"):
            return Kept.USER_STACK
        case script_tree.Variable(name):
            return strings.get(name, Kept.NUMBER)
        case script_tree.Call(function) if function in _SYMBOLS:
            return Kept.SYMBOL
        case script_tree.Call(function) if function in _TEXTS:
            return Kept.TEXT
        case script_tree.Conditional(_, then, _):
            return _kept_by(then, strings)
    return Kept.NUMBER


_SAME = frozenset({"pid", "tid", "uid", "cpu", "nsecs"})
_CAPTURED = _SAME | {"elapsed", "pc", "sp", "retval", "watched", "line", "comm", "func", "probe"}
"""Names that have a meaning in every probe, even if a parameter of its function has the same name."""

_ARGUMENT = re.compile(r"arg([0-9]+)")
_DIGITS_MAX = 24
_ARGUMENTS_MAX, _USDT_ARGUMENTS_MAX = 6, 12
_NTOP_MAX = 2
_ABSENT_NAMES = {
    "gid": "the group of a process", "cgroup": "the cgroup of a process", "curtask": "the kernel's task in samplers",
    "rand": "random numbers", "cpid": "the process of the command", "username": "names of users",
    "numaid": "NUMA nodes", "jiffies": "jiffies", "ctx": "the context of the BPF program", "ncpus": "counts of CPUs",
}  # fmt: skip
_CONSTANTS = {
    "TASK_RUNNING": 0, "TASK_INTERRUPTIBLE": 1, "TASK_UNINTERRUPTIBLE": 2, "AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10,
    "IPPROTO_TCP": 6, "IPPROTO_UDP": 17, "TCP_ESTABLISHED": 1, "TCP_SYN_SENT": 2, "TCP_SYN_RECV": 3, "TCP_FIN_WAIT1": 4,
    "TCP_FIN_WAIT2": 5, "TCP_TIME_WAIT": 6, "TCP_CLOSE": 7, "TCP_CLOSE_WAIT": 8, "TCP_LAST_ACK": 9, "TCP_LISTEN": 10,
}  # fmt: skip
"""Stable constants of kernel headers that user programs are also compiled with (include/uapi/linux, sched.h)."""

_NAME_HINTS = {
    "curtask": "sample the kernel: sample 99hz kernel { … curtask->pid … }",
    "cgroup": "run it with --cgroup PATH",
    "cpid": "run it on a command: -- COMMAND",
    "username": "use uid",
}
_ABSENT_CALLS = {
    "kaddr": "addresses of the kernel's variables", "uaddr": "addresses by their names", "cgroupid": "cgroups",
    "strftime": "times as text", "macaddr": "network addresses as text",
    "path": "paths of files of the kernel", "strerror": "names of errors", "pton": "network addresses",
    "strcontains": "strings within strings", "len": "lengths",
    "skboutput": "packets",
}  # fmt: skip
_CALL_HINTS = {
    "uaddr": "declare the variable, extern int NAME, and write &NAME",
    "cgroupid": "run it with --cgroup PATH",
    "kaddr": "a block of the tool reads no memory, but prints the kernel's files, as cat('/proc/loadavg')",
    "strerror": "print the number with %e",
}
_TYPES = {
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long", "uint8": "unsigned char",
    "uint16": "unsigned short", "uint32": "unsigned int", "uint64": "unsigned long", "bool": "_Bool",
}  # fmt: skip
_REGISTERS = {
    name: f"r{name}" for name in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp", "ip")
} | {f"r{number}": f"r{number}" for number in range(8, 16)}  # fmt: skip
_WORDS = """
    pid tid uid cpu nsecs elapsed pc sp retval watched comm func probe arg0 arg1 arg2 arg3 arg4 arg5 args reg str
    mem sym ntop bswap ntohs ntohl htons htonl curtask ustack kstack startswith printf debugger crash core remove
    print clear delete skip count sum min max avg stats hist lhist last module
    return if else while do for switch case default break continue try catch when
    static global percpu thread extern typedef struct union enum sizeof int long short char unsigned signed void
    const volatile goto float double begin end every usdt watch sample tracepoint syscall kmod inline
"""
_RESERVED = frozenset(_WORDS.split())
_C_TYPE = re.compile(r"void|char|short|int|long|unsigned|signed|_?[Bb]ool|size_t|u?int\d+_t|[us](?:8|16|32|64)|__\w+")
_NOTHING = Value("0")


class Fields(NamedTuple):
    """Properties of a tracepoint's fields: sizes of arrays in bytes, and C types of pointers to structures."""

    arrays: Mapping[str, int] = {}
    pointers: Mapping[str, str] = {}


class ExpressionWriter:
    """
    Writer of the expressions of a script's probe in DProbes C.

    ``variables`` has the values of variables that are not numbers, such as strings. DProbes C has no variables for
    these, so the value is written in place of the variable.
    """

    def __init__(
        self,
        places: Sequence[Place],
        maps: MapUses,
        fields: Fields,
        structures: frozenset[str],
        constants: frozenset[str],
        diagnostics: Diagnostics,
        parameters: frozenset[str] = frozenset(),
    ) -> None:
        self._parameters = parameters
        """The names of the used parameters of the probed functions."""
        self._has_names = bool(places) and all(place.has_names for place in places)
        self._places = places
        self._kinds = {place.kind for place in places}
        self._knows_kernel = bool(places) and all(place.knows_kernel for place in places)
        is_usdt = bool(places) and all(place.is_usdt for place in places)
        self._arguments_max = _USDT_ARGUMENTS_MAX if is_usdt else _ARGUMENTS_MAX
        self._maps = maps
        self._arrays = fields.arrays
        self._pointers = fields.pointers
        self._structures = structures
        self._constants = constants
        self._diagnostics = diagnostics
        self.variables: dict[str, Value] = {}
        self.fields: dict[str, str] = {}
        """The fields that were assigned to variables, as text, by variable: only the field itself has its type."""
        self.options: list[str] = []
        """The command-line options that the program needs."""

    def value(self, expression: script_tree.Expression) -> Value:
        """Return a script's expression in DProbes C; report one without an equivalent, and return 0 for it."""
        match expression:
            case script_tree.Number(value):
                return Value(str(value))
            case script_tree.String(text):
                return Value(f'"{text}"', form=Form.LITERAL)
            case script_tree.Name(name):
                return self._name(name, expression.span)
            case script_tree.Variable(name):
                return self.variables.get(name) or Value(self.variable_name(name))
            case script_tree.Parameter(name):
                return self._parameter(name, expression.span)
            case script_tree.Map():
                return self._map(expression)
            case script_tree.Call():
                return self._call(expression)
            case script_tree.Field():
                return self._field(expression)
            case script_tree.Index(base, index):
                return Value(f"{self.number(base, ATOM)}[{self.number(index)}]")
            case script_tree.Unary(operator, operand):
                inner = self.number(operand, PREFIX)
                return Value(f"{operator}{' ' if inner[0] == operator else ''}{inner}", PREFIX)
            case script_tree.Step():
                return self.wrong(expression.span, f"'{expression.operator}' is a statement", "write it on its own")
            case script_tree.Binary():
                return self._binary(expression)
            case script_tree.Conditional(condition, then, otherwise):
                return self._conditional(condition, then, otherwise)
            case script_tree.Cast(type_, operand):
                return self._cast(type_, operand, expression.span)
            case script_tree.SizeOf(type_):
                return Value(f"sizeof({self._type(type_, expression.span)})")
            case script_tree.Tuple():
                return self.wrong(
                    expression.span, "tuples have no equivalent in DProbes C", "as keys, write them one by one"
                )

    def variable_name(self, name: str) -> str:
        """Return the name in DProbes C of a variable ``$name``: ``_`` is appended to a name with another meaning."""
        return f"{name}_" if name in _RESERVED or name in self._parameters else name

    def number(self, expression: script_tree.Expression, precedence: int = 0) -> str:
        """Return the text of a number, as an operand of an operator with this precedence; report other values."""
        value = self.value(expression)
        if value.form not in (Form.NUMBER, Form.SYMBOL):
            return self.wrong(expression.span, f"{value.form.value} is not a number in DProbes C").text
        if value.text in ("func", "probe") and PlaceKind.RETURN in self._kinds:
            hint = "keep it at the entry, in a map by tid"
            return self.wrong(expression.span, f"'{value.text}' is not a number at a return", hint).text
        return Value(value.number, value.precedence).within(precedence)

    def wrong(self, span: Span, message: str, hint: str | None = None) -> Value:
        """Report a construct at ``span`` without an equivalent; return the value 0, which is written in its place."""
        self._diagnostics.error(span, message, hint=hint)
        return _NOTHING

    def note(self, span: Span, message: str) -> None:
        """Report at ``span`` that the program will differ from the script in behaviour."""
        self._diagnostics.note(span, message)

    def table(self, map_: script_tree.Map) -> str:
        """Return a map in DProbes C, ``@name[key, …]``; report string literals and other strings in the same place."""
        keys = list[str]()
        flat = [part for key in map_.keys for part in (key.values if isinstance(key, script_tree.Tuple) else (key,))]
        for position, key in enumerate(flat):
            value = self.value(key)
            is_choice = value.form is Form.TEXT and value.precedence == CONDITIONAL
            is_literal = value.form is Form.LITERAL or is_choice
            if value.form is Form.BYTES:
                self.wrong(key.span, "bytes are not a key of a table", "use str(p, n)")
            elif self._maps.literal_keys.setdefault((map_.name, position), is_literal) != is_literal:
                message = f"the keys of '@{map_.name}' are string literals and other strings"
                self.wrong(key.span, message, "use a second map for the string literals")
            keys.append(value.text if is_literal else value.key)
        return f"@{map_.name}" + (f"[{', '.join(keys)}]" if keys else "")

    def _name(self, name: str, span: Span) -> Value:
        if name in _SAME or name in self._constants:
            return Value(name)
        match = _ARGUMENT.fullmatch(name)
        if match is not None and len(match[1]) < _DIGITS_MAX and int(match[1]) < self._arguments_max:
            return Value(name)
        match name:
            case "true" | "false":
                return Value("1" if name == "true" else "0")
            case "comm":
                return Value("comm", form=Form.TEXT)
            case "func" | "probe":
                return self._own_name(name, span)
            case "retval" if self._has_names:
                return Value("retval")  # has the type of the function's result
            case "retval":
                return Value("(long)retval", PREFIX)
            case "elapsed":
                self.note(span, "'elapsed' counts from another moment here: from the start of the machine")
                return Value("nsecs")
            case "kstack" | "ustack":
                return Value(f"{name}()", form=Form.STACK)
            case "curtask" if self._knows_kernel:
                return Value("curtask")
            case "args":
                return self.wrong(span, "'args' is not a value", "write args.FIELD")
        if name in _CONSTANTS:
            return Value(str(_CONSTANTS[name]))
        if name in _ABSENT_NAMES:
            message = f"'{name}' has no equivalent in DProbes C: {_ABSENT_NAMES[name]}"
            return self.wrong(span, message, _NAME_HINTS.get(name))
        if self._knows_kernel and name.isupper():
            return Value(name)  # an enumerator of the kernel
        hint = f"define it in the script: #define {name} 1"
        return self.wrong(span, f"'{name}' is not known; it may be a constant of a header of the kernel", hint)

    def _own_name(self, name: str, span: Span) -> Value:
        """Return ``func`` or ``probe`` (``name``) in DProbes C: a symbol in code, elsewhere a string literal."""
        if self._kinds <= {PlaceKind.ENTRY, PlaceKind.RETURN, PlaceKind.OTHER}:
            return Value(name, form=Form.SYMBOL)
        if len(self._places) == 1 and "*" not in self._places[0].written:
            place = self._places[0]
            return Value(f'"{place.written if name == "probe" else place.function}"', form=Form.LITERAL)
        return self.wrong(span, f"'{name}' is not known here for several places", "write a probe for each")

    def _parameter(self, name: str, span: Span) -> Value:
        if name == "$#":
            return self.wrong(span, "the number of parameters has no equivalent in DProbes C")
        if (option := f"-D ARG{name[1:]}=VALUE") not in self.options:
            self.options.append(option)
        return Value(f"ARG{name[1:]}")

    def _map(self, map_: script_tree.Map) -> Value:
        match self._maps.kept.get(map_.name):
            case Kept.SYMBOL:
                return Value(self.table(map_), form=Form.SYMBOL)
            case None:
                return self.wrong(map_.span, f"'@{map_.name}' is never assigned")
            case Kept.NUMBER:
                return Value(self.table(map_))
            case Kept.TEXT | Kept.NAMES:
                return Value(self.table(map_), form=Form.TEXT)
            case Kept.STACK:
                return Value(self.table(map_), form=Form.STACK)
            case Kept.USER_STACK:
                message = f"'@{map_.name}' keeps call stacks of programs, which only printing the table shows"
                return self.wrong(map_.span, message, "have 'ustack' as a key where you print or count")
        return _NOTHING  # its assignment reports the error

    def _field(self, field: script_tree.Field) -> Value:
        if not isinstance(field.base, script_tree.Name) or field.base.name != "args":
            return Value(f"{self.number(field.base, ATOM)}{'->' if field.is_arrow else '.'}{field.name}")
        if self._has_names:
            if field.name in _CAPTURED or _ARGUMENT.fullmatch(field.name):
                hint = "write kprobe:FUNCTION, and arg0, arg1 for its arguments"
                return self.wrong(field.span, f"'{field.name}' is something else in DProbes C", hint)
            return Value(field.name)
        if PlaceKind.CALL_RETURN in self._kinds and field.name == "ret":
            return Value("(long)retval", PREFIX)
        if not self._kinds & {PlaceKind.CALL_ENTRY, PlaceKind.CALL_RETURN, PlaceKind.TRACEPOINT}:
            return self.wrong(field.span, "only tracepoints and system calls have fields", "write arg0, arg1 …")
        if field.name in self._arrays:
            size = self._arrays[field.name]
            return Value(f"str(args.{field.name}{f', {size}' if size else ''})", form=Form.TEXT)
        if (type_ := self._pointers.get(field.name)) is not None:
            return Value(f"({type_})args.{field.name}", PREFIX, type=type_)
        return Value(f"args.{field.name}")

    def _binary(self, binary: script_tree.Binary) -> Value:
        precedence = PRECEDENCE[binary.operator]
        if binary.operator in ("==", "!="):
            left, right = self.value(binary.left), self.value(binary.right)
            if Form.LITERAL in (left.form, right.form) and Form.TEXT in (left.form, right.form):
                if CONDITIONAL in (left.precedence, right.precedence):
                    return self.wrong(binary.span, "a string that a condition chooses cannot be compared", "use 'if'")
                return Value(f"{left.text} {binary.operator} {right.text}", precedence)
            if not {left.form, right.form} <= {Form.NUMBER, Form.SYMBOL}:
                return self.wrong(binary.span, "only a string and a text in quotes can be compared")
            sides = [Value(each.number, each.precedence) for each in (left, right)]
            return Value(
                f"{sides[0].within(precedence)} {binary.operator} {sides[1].within(precedence + 1)}", precedence
            )
        left_text, right_text = self.number(binary.left, precedence), self.number(binary.right, precedence + 1)
        if binary.operator in _WIDENING and isinstance(binary.left, script_tree.Number):
            left_text += "L"  # all numbers of a script have 64 bits
        return Value(f"{left_text} {binary.operator} {right_text}", precedence)

    def _conditional(
        self, condition: script_tree.Expression, then: script_tree.Expression, otherwise: script_tree.Expression
    ) -> Value:
        test, one, other = self.number(condition, CONDITIONAL + 1), self.value(then), self.value(otherwise)
        if one.form is other.form is Form.LITERAL and self._places:  # blocks of the tool choose between numbers only
            return Value(f"{test} ? {one.text} : {other.text}", CONDITIONAL, Form.TEXT)
        for value, expression in ((one, then), (other, otherwise)):
            if value.form is not Form.NUMBER:
                return self.wrong(expression.span, f"{value.form.value} cannot be chosen by a condition", "use 'if'")
        return Value(f"{test} ? {one.within(CONDITIONAL)} : {other.within(CONDITIONAL)}", CONDITIONAL)

    def _cast(self, type_: str, operand: script_tree.Expression, span: Span) -> Value:
        written = self._type(type_, span)
        inner = self.value(operand)
        if inner.form is not Form.NUMBER:
            return self.wrong(span, f"{inner.form.value} cannot be cast")
        return Value(f"({written}){inner.within(PREFIX)}", PREFIX, type=written if "*" in written else "")

    def _type(self, type_: str, span: Span) -> str:
        words = type_.removesuffix("*").rstrip(" *").split()
        stars = type_.count("*")
        if len(words) == 1 and words[0].removesuffix("_t") in _TYPES:
            words = [_TYPES[words[0].removesuffix("_t")]]
        elif words[0] in ("struct", "union", "enum"):
            if f"{words[0]} {words[1]}" not in self._structures and not self._knows_kernel:
                self.wrong(
                    span, f"'{words[0]} {words[1]}' is not declared in the script",
                    "declare it with the fields that are used: its place in memory counts",
                )  # fmt: skip
        elif len(words) == 1 and (f"struct {words[0]}" in self._structures or (stars and self._is_structure(words[0]))):
            words = ["struct", *words]
        return " ".join(words) + (f" {'*' * stars}" if stars else "")

    def _is_structure(self, name: str) -> bool:
        """Return whether a name without ``struct`` is that of a kernel structure."""
        return self._knows_kernel and _C_TYPE.fullmatch(name) is None

    def _call(self, call: script_tree.Call) -> Value:
        match call.function, call.arguments:
            case "str", [pointer, *rest] if len(rest) <= 1:
                return self._string(pointer, rest, call.span)
            case "buf", [pointer, size]:
                return Value(f"mem({self.number(pointer)}, {self.number(size)})", form=Form.BYTES)
            case "ksym" | "usym" | "sym", [address]:
                value = self.value(address)
                return Value(value.number, value.precedence, Form.SYMBOL)
            case "kstack" | "ustack" as name, arguments:
                frames = [self.number(each) for each in arguments if not isinstance(each, script_tree.Name)]
                return Value(f"{name}({', '.join(frames[:1])})", form=Form.STACK)
            case "ntop", [*_, address] as arguments if len(arguments) <= _NTOP_MAX:
                parts = [*(self.number(each) for each in arguments[:-1]), self.number(address)]
                return Value(f"ntop({', '.join(parts)})", form=Form.NETWORK)
            case "bswap", [number]:
                return self._swapped(number)
            case "reg", [script_tree.String(name)] if name in _REGISTERS:
                return Value(f'reg("{_REGISTERS[name]}")')
            case "strncmp", [one, other, script_tree.Number(size)]:
                return self._comparison(one, other, size, call.span)
            case "nsecs", _:
                return Value("nsecs")
            case name, () if name in _SAME or name == "comm":
                return self._name(name, call.span)
            case name, _ if name in AGGREGATIONS:
                return self.wrong(call.span, f"'{name}' is what a map keeps", f"write @name = {name}(…)")
            case name, _ if name in _ABSENT_CALLS:
                message = f"'{name}' has no equivalent in DProbes C: {_ABSENT_CALLS[name]}"
                return self.wrong(call.span, message, _CALL_HINTS.get(name))
        return self.wrong(call.span, f"'{call.function}' cannot be called so in DProbes C")

    def _swapped(self, number: script_tree.Expression) -> Value:
        """Return ``bswap(number)`` in DProbes C; report a variable whose size in bytes is not known."""
        if not isinstance(number, script_tree.Variable):
            return Value(f"bswap({self.number(number)})")
        field = self.fields.get(number.name)
        if field is None:
            hint = f"write how large it is: bswap((uint16)${number.name})"
            return self.wrong(number.span, f"how many bytes '${number.name}' has is not known", hint)
        return Value(f"bswap({field})")

    def _string(self, pointer: script_tree.Expression, rest: Sequence[script_tree.Expression], span: Span) -> Value:
        inner = self.value(pointer)
        if inner.form is Form.TEXT:
            return inner
        if inner.form is not Form.NUMBER or isinstance(pointer, script_tree.Parameter):
            return self.wrong(span, "only what is at an address becomes a string")
        size = "".join(f", {self.number(each)}" for each in rest)
        text = inner.text.removeprefix("(long)") if inner.text == "(long)retval" else inner.text
        return Value(f"str({text}{size})", form=Form.TEXT)

    def _comparison(self, one: script_tree.Expression, other: script_tree.Expression, size: int, span: Span) -> Value:
        """
        Return a value that is 0 if the first ``size`` characters of two strings are equal, as for strncmp.

        Else not 0.
        """
        left, right = self.value(one), self.value(other)
        if left.form is Form.LITERAL:
            left, right = right, left
        if left.form is not Form.TEXT or right.form is not Form.LITERAL:
            return self.wrong(span, "only a string and a text in quotes can be compared")
        text = right.text.strip('"')
        if size > len(text):
            return Value(f"{left.text} != {right.text}", PRECEDENCE["!="])
        return Value(f'!startswith({left.text}, "{text[:size]}")', PREFIX)
