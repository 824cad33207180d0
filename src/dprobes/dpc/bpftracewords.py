"""
What people write who know bpftrace, and what is written here: hints for errors, and no rule of the language.

What has no like is said as well.
"""

from __future__ import annotations

import re

__all__ = ["call_hint", "condition_of", "name_hint", "place_hint", "type_hint"]

_SHORT = {
    "u": "uprobe", "ur": "uretprobe", "k": "kprobe", "kr": "kretprobe", "t": "tracepoint", "U": "usdt", "i": "interval",
    "p": "profile", "w": "watchpoint", "s": "software", "h": "hardware", "rt": "rawtracepoint",
}  # fmt: skip
"""Kinds of points by their short names; with less behind them they may be names of modules."""

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
    "software": "tracepoint SUBSYSTEM:NAME",
    "hardware": "sample 99hz",
}
"""What stands here for each kind of point."""

_SOFTWARE = {
    "page-faults": "tracepoint exceptions:page_fault_user",
    "faults": "tracepoint exceptions:page_fault_user",
    "context-switches": "tracepoint sched:sched_switch",
    "cs": "tracepoint sched:sched_switch",
    "cpu-migrations": "tracepoint sched:sched_migrate_task",
    "cpu-clock": "sample 99hz",
    "cpu": "sample 99hz",
    "task-clock": "sample 99hz",
}
"""Events of the kernel (perf_event_open(2), PERF_TYPE_SOFTWARE), and where they can be probed."""

_TYPES_OF_SIZES = {"1": "char", "2": "short", "4": "int", "8": "long"}

_NAMES = {
    "args": "at a tracepoint: args.NAME; parameters of functions have their names",
    "cgroup": "with --cgroup a run is about one cgroup",
    "cgroupid": "with --cgroup a run is about one cgroup",
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
    "buf": "write mem(p, n), and print it by %h",
    "cat": "handlers read no files",
    "cgroup_path": "with --cgroup a run is about one cgroup",
    "cgroupid": "with --cgroup a run is about one cgroup",
    "has_key": "an entry that is not there reads as 0",
    "join": 'write printf("%s %s", str(p[0]), str(p[1]))',
    "kaddr": "declare the symbol, 'extern char NAME;', and write &NAME",
    "ksym": "print the address by %a, or write sym(address) as a key",
    "len": "tables and stacks do not tell their length",
    "lquantize": "write lhist(x, min, max, step)",
    "macaddr": "write mem(p, 6), and print it by %h",
    "ntop": "write mem(p, 4), and print it by %h",
    "override": "write skip(value), with --allow-write",
    "quantize": "write hist(x)",
    "signal": "debugger(), crash() and core() are what can be done to a process",
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
    """Return the word of a place that is no module, and what is written here; None for a place that is no such one."""
    kind, *rest = word.split(":")
    name = kind
    if kind in _SHORT and (len(rest) > 1 or (len(rest) == 1 and kind in ("k", "kr"))):
        name = _SHORT[kind]
    if name not in _GENERAL or not rest:
        return None
    if kind in _SHORT and "." in rest[0] and rest[-1][:1].isdecimal():
        return None  # MODULE:file.c:12
    return kind, _place(name, rest) or _GENERAL[name]


def _place(kind: str, rest: list[str]) -> str | None:
    """Return what a place is written as here; None if it is too little, or of a kind that is not the same here."""
    match kind, rest:
        case ("uprobe", [path, function]) if path and function:
            return f"{path}:{function}"
        case ("uretprobe", [path, function]) if path and function:
            return f"return {path}:{function}"
        case ("kprobe" | "kfunc" | "fentry", [function]) if function:
            return f"kernel:{function}"
        case ("kretprobe" | "kretfunc" | "fexit", [function]) if function:
            return f"return kernel:{function}"
        case ("kprobe" | "kretprobe" | "kfunc" | "kretfunc" | "fentry" | "fexit", [module, function]) if function:
            is_return = kind in ("kretprobe", "kretfunc", "fexit")
            where = f"kernel:{function}" if module == "vmlinux" else f"kmod {module}:{function}"
            return f"return {where}" if is_return else where
        case ("tracepoint", ["syscalls", name]) if (call := re.fullmatch(r"sys_(enter|exit)_(\w+)", name)) is not None:
            return f"syscall {call[2]}" if call[1] == "enter" else f"return syscall {call[2]}"
        case ("tracepoint", [subsystem, name]) if subsystem and name:
            return f"tracepoint {subsystem}:{name}"
        case ("usdt", [path, provider, name]) if path and provider and name:
            return f"usdt {path}:{provider}:{name}"
        case ("profile", ["hz", rate]) if rate.isdecimal():
            return f"sample {rate}hz"
        case ("interval", [unit, number]) if number.isdecimal() and unit in ("s", "ms", "us"):
            return f"every {number}{unit}"
        case ("interval", [time]) if re.fullmatch(r"[0-9]+(s|ms|us)", time):
            return f"every {time}"
        case ("software", [event, *_]):
            return _SOFTWARE.get(event)
        case ("watchpoint", [address, size, access]) if size in _TYPES_OF_SIZES and access in ("x", "w", "rw"):
            return f"watch {access} ({_TYPES_OF_SIZES[size]}){address}"
    return None


def condition_of(text: str) -> str | None:
    """Return the condition in what stands before a block, ``/pid == 4/``; None if it is none."""
    match = re.fullmatch(r"/(.+)/", text.strip(), re.DOTALL)
    return None if match is None else match[1].strip()


def name_hint(name: str) -> str | None:
    """Return a hint for a name that is known to bpftrace and not here."""
    if re.fullmatch(r"\$[0-9]+", name):
        return f"write a name, such as N, and give its value with -D N=…: there is no '{name}'"
    if name.startswith("$"):
        return f"variables have no '$', and are declared with a type: long {name[1:] or 'x'} = …;"
    if (match := re.fullmatch(r"sarg([0-9])", name)) is not None:
        return f"what lies on the stack is memory: *(long *)(sp + {8 * int(match[1]) + 8})"
    return _NAMES.get(name)


def call_hint(name: str) -> str | None:
    """Return a hint for a function of bpftrace that there is not."""
    return _CALLS.get(name)


def type_hint(name: str) -> str | None:
    """Return a hint for a word of bpftrace that stands where a type is expected."""
    return "write a type, such as long, before the name, which has no '$'" if name == "let" else None
