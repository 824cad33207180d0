"""
Hints for users of bpftrace, SystemTap, DTrace, GDB and C: terms of those tools, and their equivalents in DProbes C.

The terms are not part of the language: hints appear in the errors of rejected programs. A suggestion is valid DProbes
C. Terms without an equivalent in DProbes C have a hint, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.rpn.performance_counters import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "call_hint",
    "cast_hint",
    "condition_of",
    "name_hint",
    "operator_hint",
    "place_hint",
    "place_of_systemtap",
    "prefix_hint",
    "type_hint",
]

_SHORT = {
    "u": "uprobe", "ur": "uretprobe", "k": "kprobe", "kr": "kretprobe", "t": "tracepoint", "U": "usdt", "i": "interval",
    "p": "profile", "w": "watchpoint", "s": "software", "h": "hardware", "rt": "rawtracepoint",
}  # fmt: skip
"""Long names of bpftrace's probe types by their short names; before a single part, these may be names of modules."""

_GENERAL = {
    "uprobe": "MODULE:FUNCTION",
    "uretprobe": "return MODULE:FUNCTION",
    "kprobe": "kernel:FUNCTION",
    "kretprobe": "return kernel:FUNCTION",
    "kfunc": "kernel:FUNCTION",
    "kretfunc": "return kernel:FUNCTION",
    "fentry": "kernel:FUNCTION",
    "fexit": "return kernel:FUNCTION",
    "tracepoint": "tracepoint SUBSYSTEM:NAME",
    "rawtracepoint": "tracepoint SUBSYSTEM:NAME",
    "interval": "every 1s",
    "usdt": "usdt MODULE:PROVIDER:NAME",
    "profile": "sample 99hz",
    "watchpoint": "watch w MODULE:variable",
    "software": "sample page-faults:100",
    "hardware": "sample cycles:1000000",
}
"""The form of a place in DProbes C, by the kind of a bpftrace probe."""

_EVENTS = {
    "faults": "page-faults",
    "cs": "context-switches",
    "cpu-cycles": "cycles",
    "branch-instructions": "branches",
    **{counter.name: counter.name for counter in COUNTERS},
}
"""Performance counters, keyed by bpftrace's names of them."""

_TYPES_OF_SIZES = {"1": "char", "2": "short", "4": "int", "8": "long"}

_PREFIXES = {
    **dict.fromkeys(("probe", "break", "tbreak", "hbreak", "b", "trace", "uprobe", "entry"), ""),
    **dict.fromkeys(("ret", "retprobe", "uretprobe", "kretprobe", "exit"), "return "),
    "kprobe": "kernel:",
}
"""Words before a place, and their replacements."""

_SYSTEMTAP = (
    (r'kernel\.function\("([^"]+)"\)(?:\.call)?', r"kernel:\1"),
    (r'kernel\.function\("([^"]+)"\)\.return', r"return kernel:\1"),
    (r'kernel\.trace\("([^":]+:[^"]+)"\)', r"tracepoint \1"),
    (r'module\("([^"]+)"\)\.function\("([^"]+)"\)(?:\.call)?', r"kmod \1:\2"),
    (r'module\("([^"]+)"\)\.function\("([^"]+)"\)\.return', r"return kmod \1:\2"),
    (r'process\("([^"]+)"\)\.function\("([^"]+)"\)(?:\.call)?', r"\1:\2"),
    (r'process\("([^"]+)"\)\.function\("([^"]+)"\)\.return', r"return \1:\2"),
    (r'process\("([^"]+)"\)\.(?:provider\("([^"]+)"\)\.)mark\("([^"]+)"\)', r"usdt \1:\2:\3"),
    (r'process\("([^"]+)"\)\.mark\("([^"]+)"\)', r"usdt \1:PROVIDER:\2"),
    (r"syscall\.(\w+)", r"syscall \1"),
    (r"syscall\.(\w+)\.return", r"return syscall \1"),
    (r"timer\.(s|ms)\(([0-9]+)\)", r"every \2\1"),
    (r"timer\.profile", "sample 99hz"),
    (r"(begin|end)", r"\1"),
)
"""Points of SystemTap, and their equivalents."""

_WHENS = (("entry", ""), ("return", "return "))

_DTRACE = (
    (r"syscall:(?:|freebsd|linux):(?:|\*):entry", "tracepoint raw_syscalls:sys_enter"),
    (r"syscall:(?:|freebsd|linux):(?:|\*):return", "tracepoint raw_syscalls:sys_exit"),
    (r"syscall:([^\W\d]\w*)", r"syscall \1"),
    (r"syscalls:sys_enter_(\w+)", r"syscall \1"),
    (r"syscalls:sys_exit_(\w+)", r"return syscall \1"),
    (r"vmlinux:([^:]+)", r"kernel:\1"),
    (r"dtrace:[^:]*:[^:]*:BEGIN", "begin"),
    (r"dtrace:[^:]*:[^:]*:END", "end"),
    *(
        (rf"{point}:{when}", f"{before}{ours}")
        for when, before in _WHENS
        for point, ours in (
            (r"syscall::([^:]*)", r"syscall \1"),
            (r"pid(?:\$target|[0-9]+):libc:([^:]*)", r"libc.so.6:\1"),
            (r"pid(?:\$target|[0-9]+)::([^:]*)", r"MODULE:\1"),
            (r"pid(?:\$target|[0-9]+):([^:]*):([^:]*)", r"\1:\2"),
            (r"fbt:[^:]*:([^:]*)", r"kernel:\1"),
        )
    ),
)
"""Points of DTrace and events of perf, and their equivalents."""

_BPFTRACE = (
    (r"uprobe:([^:]+:[^:]+)", r"\1"),
    (r"uretprobe:([^:]+:[^:]+)", r"return \1"),
    (r"(?:kprobe|kfunc|fentry):(?:vmlinux:)?([^:]+)", r"kernel:\1"),
    (r"(?:kretprobe|kretfunc|fexit):(?:vmlinux:)?([^:]+)", r"return kernel:\1"),
    (r"(?:kprobe|kfunc|fentry):([^:]*:[^:]+)", r"kmod \1"),
    (r"(?:kretprobe|kretfunc|fexit):([^:]*:[^:]+)", r"return kmod \1"),
    (r"tracepoint:syscalls:sys_enter_(\w+)", r"syscall \1"),
    (r"tracepoint:syscalls:sys_exit_(\w+)", r"return syscall \1"),
    (r"tracepoint:([^:]+:[^:]+)", r"tracepoint \1"),
    (r"usdt:([^:]+:[^:]+:[^:]+)", r"usdt \1"),
    (r"profile:hz:(\d+)", r"sample \1hz"),
    (r"interval:(s|ms|us):(\d+)", r"every \2\1"),
    (r"interval:([0-9]+(?:s|ms|us))", r"every \1"),
    (r"software:cpu(?:-clock)?(?::.*)?", "sample 99hz"),
    *((rf"(?:soft|hard)ware:{event}:([0-9]+)", rf"sample {ours}:\1") for event, ours in _EVENTS.items()),
    *((rf"(?:soft|hard)ware:{event}(?::.*)?", f"sample {ours}:100000") for event, ours in _EVENTS.items()),
    *((rf"watchpoint:([^:]*):{size}:(x|w|rw)", rf"watch \2 ({type_})\1") for size, type_ in _TYPES_OF_SIZES.items()),
)
"""Probes of bpftrace, by the long names of their kinds, and their equivalents."""

_OPERATORS = {
    "and": "write &&", "or": "write ||", "eq": "write ==", "ne": "write !=", "is": "write ==",
    "in": "an entry that is not there reads as 0: if (@name[key]); tables are printed whole: end { print(@name); }",
}  # fmt: skip

_REGISTERS = r"[re]?(?:ax|bx|cx|dx|si|di|bp)|r(?:8|9|1[0-5])|[er]?flags|xmm[0-9]+"

_NAMES = {
    **dict.fromkeys(("bt", "backtrace", "stack"), "write ustack(), and print it by %k"),
    **dict.fromkeys(("eip", "ip", "rip"), "write pc"),
    **dict.fromkeys(("esp", "rsp"), "write sp"),
    **dict.fromkeys(("maxhits", "passcount"), "write attributes before the place, in brackets: [maxhits 5] …"),
    "args": "at a tracepoint: args.NAME; parameters of functions have their names",
    "cgroup": "--cgroup limits a run to one cgroup",
    "cgroupid": "--cgroup limits a run to one cgroup",
    "errno": "where a system call ends, 'return syscall NAME', it is -retval",
    "execname": "write comm",
    "gid": "the group is not known at a hit; uid is the user",
    "jiffies": "nsecs is the time",
    "ppid": "in the kernel it is curtask->real_parent->tgid; -p and -c take in what a process starts",
    "probefunc": "write func",
    "rand": "there are no random numbers; 'nsecs % 10' is another one at most hits",
    "timestamp": "write nsecs",
    "username": "uid is the user's number",
    "usermode": "what is hit in the kernel is in 'kernel:FUNCTION', all else in user mode",
}
_CALLS = {
    **dict.fromkeys(
        ("backtrace", "bt", "ubacktrace", "print_ubacktrace", "print_ustack"), 'write printf("%k", ustack())'
    ),
    **dict.fromkeys(("print_backtrace", "print_stack"), 'write printf("%k", kstack())'),
    **dict.fromkeys(("echo", "log", "println", "printk", "puts", "trace", "write"), 'write printf("%v", x)'),
    **dict.fromkeys(
        ("strcontains", "strstr"), 'a string is compared whole, or by its beginning: write startswith(str(p), "text")'
    ),
    **dict.fromkeys(("copyinstr", "kernel_string", "string", "user_string"), "write str(p)"),
    "execname": "write comm",
    "gettimeofday_ns": "write nsecs",
    "kill": "debugger(), crash() and core() are the actions on a process",
    "not": "write !(…)",
    "pexecname": "write comm",
    "raise": "debugger(), crash() and core() are the actions on a process",
    "sleep": "handlers cannot wait",
    "stack": 'write printf("%k", ustack())',
    "strlen": "strings have no length here; str(p) is cut at its maximum size",
    "timestamp": "write nsecs",
    "buf": "write mem(p, n), and print it by %h",
    "cat": "handlers read no files",
    "cgroup_path": "--cgroup limits a run to one cgroup",
    "cgroupid": "--cgroup limits a run to one cgroup",
    "has_key": "an entry that is not there reads as 0",
    "join": 'write printf("%s %s", str(p[0]), str(p[1]))',
    "kaddr": "declare the symbol, 'extern char NAME;', and write &NAME",
    "ksym": "print the address by %a, or write sym(address) as a key",
    "len": "tables and stacks have no length here",
    "lquantize": "write lhist(x, min, max, step)",
    "macaddr": "write mem(p, 6), and print it by %h",
    "ntop": "write mem(p, 4), and print it by %h",
    "override": "write skip(value), with --allow-write",
    "quantize": "write hist(x)",
    "signal": "debugger(), crash() and core() are the actions on a process",
    "strcmp": 'write str(p) == "text"',
    "strerror": "print the number by %e",
    "strftime": "records show their time; nsecs is the time as a number",
    "strncmp": 'write startswith(str(p), "text"), or comm == "text"',
    "system": "handlers start no commands; 'begin', 'every' and 'end' do not either",
    "time": "records show their time; nsecs is the time as a number",
    "uaddr": "declare the symbol, 'extern char NAME;', and write &NAME",
    "unroll": "write for (int i = 0; i < 3; i++) { … }",
    "uptr": "write the pointer itself",
    "kptr": "write the pointer itself",
    "usym": "print the address by %a, or write sym(address) as a key",
    "zero": "write every 1s { clear(@name); }",
}


def place_hint(word: str) -> tuple[str, str] | None:
    """
    Return (word, place) for a place of another tracer: its first word, and the equivalent place.

    Return None for other words.
    """
    kind, *rest = word.split(":")
    if (ours := _rewritten(word, _DTRACE)) is not None:
        return kind, ours
    name = kind
    if kind in _SHORT and (len(rest) > 1 or (len(rest) == 1 and kind in ("k", "kr"))):
        name = _SHORT[kind]
    if name not in _GENERAL or not rest:
        return None
    if kind in _SHORT and "." in rest[0] and rest[-1][:1].isdecimal():
        return None  # MODULE:file.c:12
    return kind, _rewritten(":".join((name, *rest)), _BPFTRACE) or _GENERAL[name]


def _rewritten(word: str, table: Iterable[tuple[str, str]]) -> str | None:
    """
    Return a place translated by the first row (pattern, replacement) of ``table`` that matches it.

    Return None if none does.
    """
    for pattern, ours in table:
        if (match := re.fullmatch(pattern, word)) is not None:
            return match.expand(ours)
    return None


def prefix_hint(word: str, place: str) -> str | None:
    """
    Return the equivalent of ``word place``, such as ``kprobe vfs_read``.

    Return None if ``word`` is no word of other tracers.
    """
    if (before := _PREFIXES.get(word)) is None or not place:
        return None
    return (place_of_systemtap(place) if word == "probe" else None) or f"{before}{place}"


def place_of_systemtap(written: str) -> str | None:
    """Return the equivalent of a SystemTap probe point such as ``kernel.function("vfs_read")``; None for other text."""
    return _rewritten(written.strip(), _SYSTEMTAP)


def operator_hint(word: str) -> str | None:
    """
    Return a hint for a word of other languages, such as ``and``, where an operator is expected.

    Return None for other words.
    """
    return _OPERATORS.get(word)


def condition_of(text: str) -> str | None:
    """Return the condition in slashes before a block, ``/pid == 4/``, or None if the text is not one."""
    match = re.fullmatch(r"/(.+)/", text.strip(), re.DOTALL)
    return None if match is None else match[1].strip()


def name_hint(name: str, word_size: int = 8) -> str | None:
    """Return a hint for a name of other tracers that does not exist here, or None for other names."""
    if re.fullmatch(r"\$[0-9]+", name):
        return f"write a name, such as N, and give its value with -D N=…: there is no '{name}'"
    if name in ("$return", "$retval", "$$return"):
        return "write retval"
    if name.startswith("$$"):
        return "parameters are printed one by one, by their names"
    if (match := re.fullmatch(r"\$arg([1-9])", name)) is not None:
        return f"arguments count from 0: write arg{int(match[1]) - 1}"
    plain = name.removeprefix("$")
    if re.fullmatch(_REGISTERS, plain) is not None:
        register = f"r{plain[1:]}" if plain.startswith("e") and word_size == 8 else plain
        return f'write reg("{register}")'
    if name.startswith("$") and (_NAMES.get(plain, "").startswith("write ")):
        return _NAMES[plain]
    if name.startswith("$"):
        own = f"declare variables with a type: long {plain or 'x'} = …;"
        return f"names have no '$': write {plain}; {own}" if plain else own
    if (match := re.fullmatch(r"sarg([0-9])", name)) is not None:
        return f"the stack is read as memory: *(long *)(sp + {8 * int(match[1]) + 8})"
    return _NAMES.get(name)


def call_hint(name: str) -> str | None:
    """Return a hint for a function of other tracers that does not exist here, or None for other names."""
    return _CALLS.get(name)


_CASTS = {
    **{f"int{bits}{end}": type_ for bits, type_ in ((8, "char"), (16, "short"), (32, "int"), (64, "long"))
       for end in ("", "_t")},
    **{f"uint{bits}": f"unsigned {type_}" for bits, type_ in ((8, "char"), (16, "short"), (32, "int"), (64, "long"))},
}  # fmt: skip
"""Types of bpftrace, and their C equivalents."""


def cast_hint(name: str) -> str | None:
    """Return a hint with the C type for a word in brackets before a value, or None for other words."""
    ours = _CASTS.get(name)
    return None if ours is None else f"write ({ours})"


def type_hint(name: str) -> str | None:
    """Return a hint for a word of other languages in the place of a type, or None for other words."""
    match name:
        case "let":
            return "write a type, such as long, before the name, which has no '$'"
        case "var" | "auto" | "local" | "my" | "global" | "int64" | "uint64":
            return "write a type, such as long, before the name"
        case "function" | "def" | "fn" | "func":
            return "write the type of what it returns: long name(long x) { … }"
        case "string" | "str" | "String":
            return "variables are numbers and pointers: declare char *p, and write str(p) where it is printed or a key"
        case "probe":
            return "a probe begins with its place: MODULE:FUNCTION"
    return None
