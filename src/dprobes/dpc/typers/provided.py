"""What every probe has without a declaration: names, and what can be called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.types.ctype import INT, UNSIGNED, UNSIGNED_LONG_LONG
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.dpc.types.ctype import CType

__all__ = ["ACTIONS", "PROVIDED", "RESERVED_CALLS", "TOOL_ACTIONS", "ProvidedName", "usdt_argument"]


@dataclass(frozen=True, slots=True)
class ProvidedName:
    """
    A name that every probe has.

    Either ``pushed`` is what ``push`` is followed by, or ``register`` is one; a string has neither. ``type`` is None
    for a word. ``in_functions`` says whether functions of the program know it, too.
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
        """Whether it is a register's, or another thing of the function that is probed."""
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
"""What the tool does in blocks of its own."""

ACTIONS = ("printf", "debugger", "crash", "core", "remove", "delete", "skip", *TOOL_ACTIONS)
"""What is a statement only."""

RESERVED_CALLS = {
    "str": "makes a string: print it, compare it, or use it as a key",
    "mem": "makes bytes: print them, or use them as a key",
    "ustack": "is a call stack: print it, or use it as a key",
    "kstack": "is a call stack: print it, or use it as a key",
    "reg": "takes the name of a register",
    "sym": "takes an address",
    "ntop": "makes a network address: print it",
    **dict.fromkeys(("bswap", "ntohs", "htons", "ntohl", "htonl"), "takes a number"),
    "startswith": "takes a string and a text",
    **dict.fromkeys(ACTIONS, "is a statement, and has no value"),
    **dict.fromkeys(
        ("count", "sum", "min", "max", "avg", "stats", "hist", "lhist", "last"),
        "is what a table keeps: write @name[keys] = …",
    ),
}
"""What can be called, and what is wrong about a call where a value is expected."""


def usdt_argument(name: str) -> ProvidedName | None:
    """Return what a name is at a USDT probe, which can have more arguments than a function has in registers."""
    from dprobes.arch.arguments import ARGUMENTS_MAX

    number = name.removeprefix("arg")
    if number == name or not number.isdecimal() or str(int(number)) != number or int(number) >= ARGUMENTS_MAX:
        return None
    return ProvidedName(name, f"argument {number} of the probe", register=name, in_functions=False)
