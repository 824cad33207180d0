"""
What later stages say of a program in DProbes C, in the words of C.

A program is compiled to RPN, and all that is checked from then on, by the parser of RPN, the checker, the resolution
and the engines, speaks of instructions and of header statements. Their messages about a text in C call these as C does.
"""

from __future__ import annotations

import re

__all__ = ["in_c"]

_ENDINGS = {"1": "debugger()", "2": "crash()", "3": "core()"}
_NAMES = {"procid": "cpu", "time": "nsecs"}
"""What is pushed by other names."""
_VARIABLES = {"vars": "static", "gvars": "global", "cvars": "percpu", "tvars": "thread"}

_OF_SIZE = {1: "char", 2: "short", 4: "int", 8: "long"}
"""Types by the bytes that are watched."""


def _watched(match: re.Match[str]) -> str:
    """Return what is watched in a range of addresses as C writes it."""
    name, first, last = match[1], match[2] or "", match[3] or match[2] or ""
    size = int(last or "0", 16) - int(first or "0", 16) + 1
    return f"'({_OF_SIZE.get(size, 'char')}){name}{first and '+'}{first}' as what is watched"


_WORDS = (
    # instructions, which stand in quotes
    (r"'pop [ru]' is not allowed for register '(\w+)' of \w+", r"""'reg("\1")' cannot be changed"""),
    (r"'push [ru]' is not allowed for register '(\w+)' of \w+", r"""'reg("\1")' cannot be read"""),
    (r"^allowed: ('[^']+'(?:, '[^']+')*)$", r"RPN has \1 for it"),
    (r"'push (?:[ru]|entry), (arg[0-5]|retval|pc|sp)'", r"'\1'"),
    (r"'push (?:[ru]|entry), (\w+)'", r"""'reg("\1")'"""),
    (r"'pop r, (\w+)'", r"""'reg("\1") = …'"""),
    (r"'push tp, FIELD', or 'reg\(\"\w+\"\)' for that of the program", "the name of a field"),
    (r"'push tp, FIELD', or '\w+' for that of the program", "the name of a field"),
    (r"'push tp, FIELD': a system call has its arguments at its end as well",
     "the name of a field: a system call has its arguments at its end as well"),
    (r"'push tp, (\w+)'", r"'\1'"),
    (r"'push usdt, (\d+)'", lambda match: f"'arg{int(match[1]) - 1}'"),
    (r"'push (pid|tid|uid|procid|time|elapsed)'", lambda match: f"'{_NAMES.get(match[1], match[1])}'"),
    (r"'push mem, [us]\d+'", "'*p'"),
    (r"'pop mem, [us]\d+'", "'*p = …'"),
    (r"'log ([ku])stack(?:, (\d+))?'", lambda match: f"'{match[1]}stack({match[2] or ''})'"),
    (r"'log str'", "'str(p)'"),
    (r"'log mrf'", "'mem(p, n)'"),
    (r"'match str[^']*'", "a comparison of strings"),
    (r"'exit ([123])'(?: \([^)]*\))?", lambda match: f"'{_ENDINGS[match[1]]}'"),
    (r"; here it acts as 'exit'", "; here it only ends the hit"),
    (r"'tally' cannot look at table", "there is no looking at table"),
    # table keys
    (r"\bthe key 'kstack' of table", "the key 'kstack()' of table"),
    (r"'ustack\[(\d+)\]'", r"'ustack(\1)'"),
    (r"\btable '_'", "table '@'"),
    (r"\btable '(\w+)'", r"table '@\1'"),
    (r"; give it a smaller 'room ='", ""),
    # header statements
    (r"the program has no '(group|type)def ='", r"no probe has a '\1'"),
    (r"write name = (\"[^\"]*/[^\"]*\")", r"write \1: before the place"),
    (r"name = (\"[^\"]+\")", r"'kmod \1:' before the place"),
    (r"'address = ([^']+)' and 'watchpoint = w' \(or rw\)", r"'watch w \1' (or rw)"),
    (r"'address = ([A-Za-z_]\w*)(?: \+ (0x\w+))?(?: : \1(?: \+ (0x\w+))?)?'", _watched),
    (r"'address = ([^']+)'", r"'\1' behind 'watch'"),
    (r"'opcode ='", "'opcode'"),
    (r"'opcode = (\w+)'", r"'[opcode \1]' before the place"),
    (r"'(minor|maxhits|passcount|major|jmpmax|logmax) = (\w+)'", r"'\1 \2'"),
    (r"'offset = usdt:PROVIDER:NAME'", "'usdt MODULE:PROVIDER:NAME'"),
    (r"'offset = usdt:([^']+)'", r"'usdt MODULE:\1'"),
    (r"'offset = SUBSYSTEM:NAME' or 'offset = syscall:NAME'", "'tracepoint SUBSYSTEM:NAME' or 'syscall NAME'"),
    (r"'offset = ([^']+)'", r"'\1'"),
    (r"\boffset = (\"(?:[^\"\\]|\\.)*\"|0x[0-9a-f]+)", r"\1"),
    (r"'offset ='", "a place"),
    (r"'return = yes'", "'return'"),
    (r"'sampler ='", "'sample'"),
    (r"'watchpoint = (\w+)'", r"'watch \1'"),
    (r"'modtype = kernel' and 'name = vmlinux' in the file header", "'kernel:' before the place"),
    (r"'modtype = tracepoint' and 'name = vmlinux' in the file header", "'tracepoint' before the place"),
    (r"'modtype = tracepoint'( in the file header)?", "'tracepoint'"),
    (r"'name = vmlinux' and 'modtype = kernel'", "'kernel:' before the place"),
    (r"'name = (\w+)' and 'modtype = kmod'", r"'kmod \1:' before the place"),
    (r"'name = vmlinux', or 'modtype = kmod' for a module of the kernel",
     "'kernel:', or 'kmod NAME:' for a module of the kernel"),
    (r"'modtype = kernel'", "'kernel:'"),
    (r"'modtype = kmod'", "'kmod'"),
    (r"a program of the type 'user' is hit outside of the kernel", "a probe in a program is hit outside of the kernel"),
    (r"a program about the kernel", "a probe in the kernel"),
    (r"'(g|c|t|)vars = (\d+)'", lambda match: f"at most {match[2]} {_VARIABLES[match[1] + 'vars']} variables"),
    # exceptions
    (r"catch it with 'sx', or see where it is raised with 'autostacktrace = yes'", "catch it with 'try'"),
)  # fmt: skip


def in_c(message: str) -> str:
    """Return a message with C's words for those of RPN."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message
