"""The names and functions that every probe has without a declaration."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.dpc.types.c_types import INT, UNSIGNED, UNSIGNED_LONG_LONG

if TYPE_CHECKING:
    from dprobes.dpc.types.c_types import CType

__all__ = [
    "ACTIONS",
    "CALL_FORMS",
    "KINDS",
    "PROVIDED",
    "RESERVED_CALLS",
    "TOOL_ACTIONS",
    "ProvidedName",
    "numbered_argument",
]


class ProvidedName(NamedTuple):
    """
    Name that every probe has.

    Either ``pushed`` is the operand of ``push``, or ``register`` is a register; a string has neither. ``type`` is None
    for a word. With ``in_functions``, functions of the program have the name, too.
    """

    name: str
    doc: str
    pushed: str = ""
    register: str = ""
    type: CType | None = None
    is_at_return: bool = False
    in_functions: bool = True

    @property
    def is_of_function(self) -> bool:
        """True if the name belongs to the probed function, such as a register."""
        return self.is_at_return or not self.in_functions


PROVIDED = {
    each.name: each
    for each in (
        ProvidedName("pid", "the process", "pid", type=INT),
        ProvidedName("tid", "the thread", "tid", type=INT),
        ProvidedName("uid", "the user", "uid", type=UNSIGNED),
        ProvidedName("cpu", "the CPU", "procid", type=INT),
        ProvidedName("curtask", "the kernel's structure of the thread", "task"),
        ProvidedName("nsecs", "CLOCK_MONOTONIC in nanoseconds", "time", type=UNSIGNED_LONG_LONG),
        ProvidedName("elapsed", "nanoseconds since this call began", "elapsed", type=UNSIGNED_LONG_LONG,
                     is_at_return=True, in_functions=False),
        ProvidedName("pc", "the address of the instruction", register="pc"),
        ProvidedName("sp", "the stack pointer", register="sp"),
        ProvidedName("retval", "what the function returns", register="retval", is_at_return=True, in_functions=False),
        *(ProvidedName(f"arg{n}", f"argument {n} of the function", register=f"arg{n}", in_functions=False)
          for n in range(6)),
        ProvidedName("watched", "the address that a watchpoint watches", in_functions=False),
        ProvidedName("line", "the line of the source where the probe is", in_functions=False),
        ProvidedName("comm", "the name of the process: a string"),
        ProvidedName("func", "the name of the function that was hit: a string"),
        ProvidedName("probe", "the name of the place that was hit: a string"),
    )
}  # fmt: skip

TOOL_ACTIONS = ("print", "clear", "cat", "exit")
"""Actions that only blocks of the tool have."""

ACTIONS = ("printf", "debugger", "crash", "core", "remove", "delete", "skip", *TOOL_ACTIONS)
"""Calls that are statements and have no value."""

KINDS = {"count": 0, "sum": 1, "min": 1, "max": 1, "avg": 1, "stats": 1, "hist": 1, "lhist": 4, "last": 1}
"""Functions for the values of tables, and the numbers of their arguments."""

RESERVED_CALLS = {
    "str": "makes a string: print it, compare it, or use it as a key",
    "mem": "makes bytes: print them, or use them as a key",
    "ustack": "is a call stack: print it, or use it as a key",
    "kstack": "is a call stack: print it, or use it as a key",
    "reg": "takes the name of a register",
    "pmc": "takes the name of a counter",
    "sym": "takes an address",
    "per_cpu": "takes a per-CPU variable of the kernel and the number of a CPU",
    "ntop": "makes a network address: print it",
    **dict.fromkeys(("bswap", "ntohs", "htons", "ntohl", "htonl"), "takes a number"),
    "startswith": "takes a string and a text",
    **dict.fromkeys(ACTIONS, "is a statement, and has no value"),
    **dict.fromkeys(KINDS, "is a value of tables: write @name[keys] = …"),
}
"""Functions that can be called, and the error message for a call in the place of a value."""

CALL_FORMS = {
    "str": "str(p), or str(p, n) for at most n bytes",
    "mem": "mem(p, n): n bytes, printed by %h, or by %s as text",
    "ustack": "ustack(), or ustack(n) for n callers",
    "kstack": "kstack(), or kstack(n) for n callers",
    "reg": 'reg("rax")',
    "pmc": 'pmc("page-faults")',
    "sym": "sym(address)",
    "per_cpu": "per_cpu(variable, cpu)",
    "ntop": "ntop(address), or ntop(family, address)",
    **{name: f"{name}(x)" for name in ("bswap", "ntohs", "htons", "ntohl", "htonl")},
    "startswith": 'startswith(str(p), "/etc")',
    "printf": 'printf("%d", x)',
    "delete": "delete(@name[keys])",
    "skip": "skip(value)",
    "print": "print(@name)",
    "clear": "clear(@name)",
    "cat": 'cat("/proc/loadavg")',
    **{name: f"{name}()" for name in ("exit", "debugger", "crash", "core", "remove", "count")},
    **{name: f"{name}(x)" for name in ("sum", "min", "max", "avg", "stats", "hist", "last")},
    "lhist": "lhist(x, min, max, step)",
}
"""Syntax of each call, for hints."""


def numbered_argument(name: str, most: int) -> ProvidedName | None:
    """Return the name ``arg0`` and so on at a place with ``most`` arguments (USDT, functions of Go), else None."""
    number = name.removeprefix("arg")
    if number == name or not number.isdecimal() or str(int(number)) != number or int(number) >= most:
        return None
    return ProvidedName(name, f"argument {number} of the probe", register=name, in_functions=False)
