"""
Slips of those who know other tracers, or C: what is said of each, and that what is suggested is accepted.

Each is a text, what is said of it, and the text with what was suggested.
"""

from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_source
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.source_text import SourceFile

M = "libc.so.6:malloc"
R = "libc.so.6:realloc"

POINTS = [
    ("kprobe:vfs_read { @[comm] = count(); }", "1:1: error: 'kprobe' is not a module", "write 'kernel:vfs_read'",
     "kernel:vfs_read { @[comm] = count(); }"),
    ("uretprobe:/bin/bash:readline { @ = count(); }", "1:1: error: 'uretprobe' is not a module",
     "write 'return /bin/bash:readline'", "return /bin/bash:readline { @ = count(); }"),
    ("tracepoint:syscalls:sys_enter_openat { @ = count(); }", "1:1: error: 'tracepoint' is not a module",
     "write 'syscall openat'", "syscall openat { @ = count(); }"),
    ("syscall:read { @ = count(); }", "1:1: error: 'syscall' is not a module", "write 'syscall read'",
     "syscall read { @ = count(); }"),
    ("return syscall:read { @ = count(); }", "1:8: error: 'syscall' is not a module", "write 'return syscall read'",
     "return syscall read { @ = count(); }"),
    ("syscall::read:entry { @ = count(); }", "1:1: error: 'syscall' is not a module", "write 'syscall read'",
     "syscall read { @ = count(); }"),
    ("syscall:::entry { @ = count(); }", "1:1: error: 'syscall' is not a module",
     "write 'tracepoint raw_syscalls:sys_enter'", "tracepoint raw_syscalls:sys_enter { @ = count(); }"),
    ("vmlinux:vfs_read { @ = count(); }", "1:1: error: 'vmlinux' is not a module", "write 'kernel:vfs_read'",
     "kernel:vfs_read { @ = count(); }"),
    ("syscalls:sys_exit_read { @ = count(); }", "1:1: error: 'syscalls' is not a module", "write 'return syscall read'",
     "return syscall read { @ = count(); }"),
    ("pid$target:libc:malloc:entry { @ = count(); }", "1:1: error: 'pid$target' is not a module",
     f"write '{M}'", f"{M} {{ @ = count(); }}"),
    ("pid12:libc.so.6:malloc:return { @ = count(); }", "1:1: error: 'pid12' is not a module",
     f"write 'return {M}'", f"return {M} {{ @ = count(); }}"),
    ('probe kernel.function("vfs_read") { @ = count(); }', "1:1: error: 'probe' must precede a place",
     "write 'kernel:vfs_read'", "kernel:vfs_read { @ = count(); }"),
    ('probe process("/bin/bash").function("readline").return { @ = count(); }',
     "1:1: error: 'probe' must precede a place", "write 'return /bin/bash:readline'",
     "return /bin/bash:readline { @ = count(); }"),
    ("probe syscall.open { @ = count(); }", "1:1: error: 'probe' must precede a place", "write 'syscall open'",
     "syscall open { @ = count(); }"),
    (f"{M} {{ @ = count(); }} probe timer.s(1) {{ print(@); }}", "1:35: error: 'probe' must precede a place",
     "write 'every 1s'", f"{M} {{ @ = count(); }} every 1s {{ print(@); }}"),
    (f"break {M} {{ @ = count(); }}", "1:1: error: 'break' must precede a place", f"write '{M}'",
     f"{M} {{ @ = count(); }}"),
    (f"retprobe {M} {{ @ = count(); }}", "1:1: error: 'retprobe' must precede a place", f"write 'return {M}'",
     f"return {M} {{ @ = count(); }}"),
    (f"{M}:return {{ @ = count(); }}", "1:1: error: a function has no ':return'", f"write return {M}",
     f"return {M} {{ @ = count(); }}"),
    (f"{M} return {{ @ = count(); }}", "1:18: error: expected '{' at the start of a block, found 'return'",
     f"write return {M}", f"return {M} {{ @ = count(); }}"),
    ("libc.so.6!malloc { @ = count(); }", "1:1: error: a module and a function are joined by ':'", f"write {M}",
     f"{M} {{ @ = count(); }}"),
    ("libc.so.6::malloc { @ = count(); }", "1:1: error: a module and a function are joined by ':'", f"write {M}",
     f"{M} {{ @ = count(); }}"),
    ("libc.so.6.malloc { @ = count(); }", "1:1: error: a module and a function are joined by ':'", f"write {M}",
     f"{M} {{ @ = count(); }}"),
    ("libc.so.6 malloc { @ = count(); }", "1:11: error: expected '{' at the start of a block, found 'malloc'",
     f"write {M} {{ … }}", f"{M} {{ @ = count(); }}"),
    (f"{M}, free {{ @ = count(); }}", "1:19: error: the module of 'free' is not known",
     "write each place in full: libc.so.6:free", f"{M}, libc.so.6:free {{ @ = count(); }}"),
    ("syscall open, openat { @ = count(); }", "1:15: error: the module of 'openat' is not known",
     "write each place in full: syscall openat", "syscall open, syscall openat { @ = count(); }"),
    (f"{M}|free {{ @ = count(); }}", "1:1: error: several places are separated by ','",
     f"write {M}, libc.so.6:free", f"{M}, libc.so.6:free {{ @ = count(); }}"),
    ("libc.so.6:/^mal.*/ { @ = count(); }", "1:1: error: functions are not named in slashes",
     "write libc.so.6:mal*", "libc.so.6:mal* { @ = count(); }"),
    ("libc*:malloc { @ = count(); }", "1:1: error: a module is named without '*' and '?'",
     f"name the program or library: {M}", f"{M} {{ @ = count(); }}"),
    ("./a:b:f { @ = count(); }", "1:1: error: write names with a ':' in double quotes", 'write "./a:b":f',
     '"./a:b":f { @ = count(); }'),
    ("return /tmp/a:b.so:f+4 { @ = count(); }", "1:8: error: write names with a ':' in double quotes",
     'write return /tmp/a:"b.so:f+4"', 'return /tmp/a:"b.so:f"+4 { @ = count(); }'),
    ("./lib.so:one.c:twin { @ = count(); }", "1:1: error: write names with a ':' in double quotes",
     'write ./lib.so:"one.c:twin"', './lib.so:"one.c:twin" { @ = count(); }'),
    ("./a b:f { @ = count(); }", "1:5: error: expected '{' at the start of a block, found 'b'",
     'write "./a b":f { … }', '"./a b":f { @ = count(); }'),
    ("usdt /usr/lib/a:b.so:libc:setjmp { @ = count(); }", "1:6: error: write names with a ':' in double quotes",
     'write usdt "/usr/lib/a:b.so":libc:setjmp', 'usdt "/usr/lib/a:b.so":libc:setjmp { @ = count(); }'),
    ("usdt { @ = count(); }", "1:6: error: expected a statically defined probe of a module, found '{'",
     "write usdt MODULE:PROVIDER:NAME", "usdt libc.so.6:libc:setjmp { @ = count(); }"),
    ("watch bash:x { @ = count(); }", "1:7: error: expected x, w, rw, io, in or out after 'watch', found 'bash'",
     "write watch w bash:x", "watch w bash:x { @ = count(); }"),
    ("sample 49 { @ = count(); }", "1:8: error: '49' is not a number of samples a second", "write sample 49hz",
     "sample 49hz { @ = count(); }"),
    ("syscall openat(dfd, name) { @ = count(); }", "1:15: error: a system call has no parameters",
     "fields have names, as in args.NAME: 'dprobes locate syscall:openat' lists them",
     "syscall openat { @ = sum(args.dfd); }"),
    (f"int {M}(s) {{ @ = count(); }}", "1:9: error: expected ';' after a declaration, found '.'",
     "a probe has no type or word before its place: MODULE:FUNCTION { … }", f"{M}(s) {{ @ = count(); }}"),
]  # fmt: skip

ATTRIBUTES = [
    (f"{M} [maxhits 3] {{ @ = count(); }}", "1:18: error: expected '{' at the start of a block, found '['",
     f"write attributes before the place: [maxhits 3] {M}", f"[maxhits 3] {M} {{ @ = count(); }}"),
    (f"{M}(s) [maxhits=3, minor=4] {{ @ = count(); }}",
     "1:21: error: expected '{' at the start of a block, found '['",
     f"write attributes before the place: [maxhits 3, minor 4] {M}(s)",
     f"[maxhits 3, minor 4] {M}(s) {{ @ = count(); }}"),
    (f"{M}(s) when (s > 3) [maxhits 3] {{ @ = count(); }}",
     "1:34: error: expected '{' at the start of a block, found '['",
     f"write attributes before the place: [maxhits 3] {M}(s) when (s > 3)",
     f"[maxhits 3] {M}(s) when (s > 3) {{ @ = count(); }}"),
    (f"[minor 4] {M} [maxhits 3] {{ @ = count(); }}", "1:28: error: expected '{' at the start of a block, found '['",
     f"write attributes before the place: [maxhits 3, minor 4] {M}",
     f"[maxhits 3, minor 4] {M} {{ @ = count(); }}"),
    (f"{M} maxhits 3 {{ @ = count(); }}", "1:18: error: expected '{' at the start of a block, found 'maxhits'",
     f"write attributes before the place: [maxhits 3] {M}", f"[maxhits 3] {M} {{ @ = count(); }}"),
    (f"maxhits 3 {M} {{ @ = count(); }}", "1:1: error: expected a place to probe, found 'maxhits'",
     "write attributes in brackets before the place: [maxhits 3] MODULE:FUNCTION",
     f"[maxhits 3] {M} {{ @ = count(); }}"),
    (f"return [maxhits 3] {M} {{ @ = count(); }}", "1:8: error: write attributes before the place",
     "write [maxhits 5] return MODULE:FUNCTION", f"[maxhits 5] return {M} {{ @ = count(); }}"),
    (f"{M} {{ @ = count(); }} [maxhits 3]",
     "1:35: error: expected a place to probe, found the end of the program", "write attributes before the place",
     f"[maxhits 3] {M} {{ @ = count(); }}"),
    (f"[maxhits 3 minor 4] {M} {{ @ = count(); }}",
     "1:12: error: expected ']' after the attributes, found 'minor'",
     "write [maxhits 5, minor 3]: with ',' between them", f"[maxhits 5, minor 3] {M} {{ @ = count(); }}"),
]  # fmt: skip

CONDITIONS = [
    (f"{M} /pid == 4/ {{ @ = count(); }}", "1:18: error: a condition is not written in slashes",
     "write when (pid == 4)", f"{M} when (pid == 4) {{ @ = count(); }}"),
    (f"{M} if (pid == 4) {{ @ = count(); }}", "1:18: error: expected '{' at the start of a block, found 'if'",
     f"write {M} when (pid == 4)", f"{M} when (pid == 4) {{ @ = count(); }}"),
    (f"{M} && pid == 4 {{ @ = count(); }}", "1:18: error: expected '{' at the start of a block, found '&&'",
     f"write {M} when (pid == 4)", f"{M} when (pid == 4) {{ @ = count(); }}"),
    (f"{M} when pid == 4 {{ @ = count(); }}", "1:23: error: expected '(' after 'when', found 'pid'",
     "write when (pid == 4)", f"{M} when (pid == 4) {{ @ = count(); }}"),
    (f"{M} {{ @ = count(); }} when (pid == 4)", "1:35: error: expected a place to probe, found 'when'",
     "write the condition between the place and its block: MODULE:FUNCTION when (…) { … }",
     f"{M} when (pid == 4) {{ @ = count(); }}"),
    (f"{M} {{ if pid == 4 {{ @ = count(); }} }}", "1:23: error: expected '(' after 'if', found 'pid'",
     "write if (pid == 4)", f"{M} {{ if (pid == 4) {{ @ = count(); }} }}"),
    (f"{M} {{ if not (pid == 4) {{ @ = count(); }} }}", "1:23: error: expected '(' after 'if', found 'not'",
     "write if (!(pid == 4))", f"{M} {{ if (!(pid == 4)) {{ @ = count(); }} }}"),
    (f"{M} {{ if (pid == 4 and tid == 4) @ = count(); }}", "1:33: error: 'and' is not an operator", "write &&",
     f"{M} {{ if (pid == 4 && tid == 4) @ = count(); }}"),
    (f"{M} {{ if (comm == ls) @ = count(); }}", "1:32: error: a string is compared with a text in double quotes",
     'write comm == "ls"', f'{M} {{ if (comm == "ls") @ = count(); }}'),
    (f"{M} when (pid == \"123\") {{ @ = count(); }}", "1:24: error: 'pid' is a number, and no string",
     "write pid == 123", f"{M} when (pid == 123) {{ @ = count(); }}"),
    (f"{M} when (comm =~ \"l.*\") {{ @ = count(); }}", "1:24: error: a condition assigns nothing: found '='",
     'strings have no patterns: write startswith(comm, "l")',
     f'{M} when (startswith(comm, "l")) {{ @ = count(); }}'),
    (f'{M} when (comm == "l*") {{ @ = count(); }}',
     "1:24: warning: a string is compared with a text as it is: '*' is not a pattern",
     'write startswith(comm, "l") for all that begin so', f'{M} when (startswith(comm, "l")) {{ @ = count(); }}'),
    (f"{M} when {{ @ = count(); }}", "1:23: error: expected '(' after 'when', found '{{'".replace("{{", "{"),
     "write when (…)", f"{M} when (pid == 1) {{ @ = count(); }}"),
    (f"{M} {{ if (comm == 'ls') @ = count(); }}", "1:32: error: write strings in double quotes",
     'write "ls"', f'{M} {{ if (comm == "ls") @ = count(); }}'),
    (f'{R}(p, n) {{ if (str(p, n) == "ab") @ = count(); }}', "1:38: error: the length of a string is a constant",
     'write startswith(str(p), "ab")', f'{R}(p, n) {{ if (startswith(str(p), "ab")) @ = count(); }}'),
    (f'{M}(p) {{ if (str(p, 2) == "abc") @ = count(); }}',
     "1:27: error: this string has at most 2 bytes: it is never equal", "leave the length out: str(p)",
     f'{M}(p) {{ if (str(p) == "abc") @ = count(); }}'),
    (f'{M}(p) {{ if (strcmp(str(p), "x") == 0) @ = count(); }}', "1:27: error: there is no function 'strcmp'",
     'write str(p) == "text"', f'{M}(p) {{ if (str(p) == "text") @ = count(); }}'),
]  # fmt: skip

STATEMENTS = [
    (M, "1:17: error: expected '{' at the start of a block, found the end of the program",
     f"a probe has a block: {M} {{ @ = count(); }}", f"{M} {{ @ = count(); }}"),
    (f"{M} @ = count();", "1:18: error: expected '{' at the start of a block, found '@'",
     f"write the block in braces: {M} {{ @ = count(); }}", f"{M} {{ @ = count(); }}"),
    ("@ = count()", "1:1: error: expected a place to probe, found '@'",
     "write it in the block of a probe: MODULE:FUNCTION { @ = count(); }", f"{M} {{ @ = count(); }}"),
    ('printf("hi")', "1:1: error: expected a place to probe, found 'printf'",
     'write it in the block of a probe: MODULE:FUNCTION { printf("hi"); }', f'{M} {{ printf("hi"); }}'),
    (f'{M} {{ printf "%d", pid; }}', "1:27: error: expected ';' after a statement, found '\"%d\"'",
     'write printf("%d", pid)', f'{M} {{ printf("%d", pid); }}'),
    (f"{M} {{ @ = count(); }} end {{ print @ }}", "1:47: error: expected ';' after a statement, found '@'",
     "write print(@)", f"{M} {{ @ = count(); }} end {{ print(@) }}"),
    (f"{M} {{ printf(pid); }}", "1:20: error: 'printf' takes a format in quotes, then what it prints",
     'write printf("%v", pid)', f'{M} {{ printf("%v", pid); }}'),
    (f'{M} {{ printf("%d" pid); }}', "1:32: error: expected ')' after the last one, found 'pid'",
     "write ',' before 'pid'", f'{M} {{ printf("%d", pid); }}'),
    (f'{M} {{ printf("%d", pid, tid); }}', "1:20: error: the format has 1 conversion, and there are 2 values",
     "write a conversion for each value, such as %d, or %s for a string", f'{M} {{ printf("%d %d", pid, tid); }}'),
    (f'{M} {{ printf(\u201c%d\u201d, pid); }}', "1:27: error: write strings in double quotes", 'write "%d"',
     f'{M} {{ printf("%d", pid); }}'),
    (f'{M} {{ puts("x"); }}', "1:20: error: there is no function 'puts'", 'write printf("%v", x)',
     f'{M}(x) {{ printf("%v", x); }}'),
    (f"{M} {{ @[arg0] = count(), @x++; }}", "1:20: error: statements are not joined by ','",
     "write ';' between them", f"{M} {{ @[arg0] = count(); @x++; }}"),
    (f"{M} {{ if (pid) @ = count() else @x++; }}", "1:41: error: expected ';' after a statement, found 'else'",
     "a statement before 'else' ends in ';', or in braces", f"{M} {{ if (pid) @ = count(); else @x++; }}"),
    (f"{M} {{ @x(comm) = count(); }}", "1:22: error: expected ';' after a statement, found '('",
     "write keys in square brackets: @x[comm]", f"{M} {{ @x[comm] = count(); }}"),
    (f"{M} {{ x[comm] = count(); }}", "1:20: error: 'count' is a value of tables",
     "write @x[comm] = count()", f"{M} {{ @x[comm] = count(); }}"),
    (f"{M} {{ hist(arg0); }}", "1:20: error: 'hist' is a value of tables", "write @name[keys] = hist(x)",
     f"{M}(x) {{ @name[pid] = hist(x); }}"),
    (f"{M} {{ @ = count; }}", "1:24: error: 'count' is a function: call it", "write count()",
     f"{M} {{ @ = count(); }}"),
    (f"{M} {{ @ = hist(); }}", "1:24: error: 'hist' takes 1 argument", "write hist(x)",
     f"{M}(x) {{ @ = hist(x); }}"),
    (f"{M} {{ @x <<< arg0; }}", "1:25: error: expected an expression, found '<'",
     "assign the function to a table: @x = avg(y)", f"{M}(y) {{ @x = avg(y); }}"),
    (f"{M} {{ for $i in 0..3 {{ @++; }} }}", "1:24: error: expected '(' after 'for', found '$i'",
     "write for (int i = 0; i < 3; i++) { … }", f"{M} {{ for (int i = 0; i < 3; i++) {{ @++; }} }}"),
    (f"{M} {{ # all of them\n @ = count(); }}", "1:20: error: unexpected character '#'",
     "a comment begins with //", f"{M} {{ // all of them\n @ = count(); }}"),
    ("-c", "1:3: error: expected '{' at the start of a block, found the end of the program",
     "-e takes the text of a program, in single quotes: -e 'MODULE:FUNCTION { … }'",
     f"{M} {{ @ = count(); }}"),
]  # fmt: skip

NAMES = [
    (f"{M} {{ x = arg0; }}", "1:20: error: 'x' is not defined", "a variable is declared with its type: long x = …;",
     f"{M} {{ long x = arg0; }}"),
    (f"{M}(size) {{ @ = sum($size); }}", "1:34: error: '$size' is not defined",
     "names have no '$': write size; declare variables with a type: long size = …;",
     f"{M}(size) {{ @ = sum(size); }}"),
    (f"return {M} {{ @ = sum($return); }}", "1:35: error: '$return' is not defined", "write retval",
     f"return {M} {{ @ = sum(retval); }}"),
    (f"{M} {{ @ = sum(rax); }}", "1:28: error: 'rax' is not defined", 'write reg("rax")',
     f'{M} {{ @ = sum(reg("rax")); }}'),
    (f"{M} {{ @ = sum(%rax); }}", "1:28: error: expected an expression, found '%'", 'write reg("rax")',
     f'{M} {{ @ = sum(reg("rax")); }}'),
    (f"{M} {{ @ = sum(arg7); }}", "1:28: error: 'arg7' is not defined",
     "arg0 to arg5 are in registers; this one is in memory: *(long *)(sp + 16)",
     f"{M} {{ @ = sum(*(long *)(sp + 16)); }}"),
    (f"{M} {{ @ = sum(pid()); }}", "1:28: error: there is no function 'pid'", "write pid",
     f"{M} {{ @ = sum(pid); }}"),
    (f"{M} {{ @[execname] = count(); }}", "1:22: error: 'execname' is not defined", "write comm",
     f"{M} {{ @[comm] = count(); }}"),
    (f"{M} {{ @ = sum((int64)arg0); }}", "1:29: error: there is no type 'int64'", "write (long)",
     f"{M} {{ @ = sum((long)arg0); }}"),
    (f"{M} {{ @ = sum((uint32)arg0); }}", "1:29: error: there is no type 'uint32'", "write (unsigned int)",
     f"{M} {{ @ = sum((unsigned int)arg0); }}"),
    (f"{M} {{ bt; }}", "1:20: error: 'bt' is not defined", "write ustack(), and print it by %k",
     f'{M} {{ printf("%k", ustack()); }}'),
    (f"{M} {{ backtrace(); }}", "1:20: error: there is no function 'backtrace'", 'write printf("%k", ustack())',
     f'{M} {{ printf("%k", ustack()); }}'),
    (f"global x; {M} {{ @++; }}", "1:8: error: 'x' is declared without a type", "write global long x;",
     f"global long x; {M} {{ @++; }}"),
    (f"{M} {{ var x = 1; }}", "1:20: error: there is no type 'var'", "write a type, such as long, before the name",
     f"{M} {{ long x = 1; }}"),
    (f"{M} {{ @x++; }} end {{ print(@y); }}", "1:40: error: '@y' is never assigned",
     "assign it in a probe: @name[keys] = count()", f"{M} {{ @y++; }} end {{ print(@y); }}"),
]  # fmt: skip

STRINGS = [
    (f'{R}(p, n) {{ printf("%s", str(p, n)); }}', "1:47: error: the length of a string is a constant",
     "for a length that is known at the hit write mem(p, n), printed as text by %s",
     f'{R}(p, n) {{ printf("%s", mem(p, n)); }}'),
    (f'{M}(p) {{ printf("%s", mem(p)); }}', "1:36: error: 'mem' is not called with these arguments",
     "write mem(p, n): n bytes, printed by %h, or by %s as text", f'{R}(p, n) {{ printf("%h", mem(p, n)); }}'),
    (f'{M}(p) {{ printf("%s", str(p, 1, 2)); }}', "1:36: error: 'str' is not called with these arguments",
     "write str(p), or str(p, n) for at most n bytes", f'{M}(p) {{ printf("%s", str(p, 8)); }}'),
    (f"{M}(p) {{ @[ustack(perf, 3)] = count(); }}", "1:25: error: 'ustack' is not called with these arguments",
     "write ustack(), or ustack(n) for n callers", f"{M}(p) {{ @[ustack(3)] = count(); }}"),
    (f'{M}(p) {{ printf("%h", mem(p, 70000)); }}',
     "1:1: error: this may print 70003 bytes in one record, which has at most 65535",
     "print less: str(p, n) or mem(p, n) with a smaller n", f'{M}(p) {{ printf("%h", mem(p, 700)); }}'),
    (f"{R}(p, n) {{ @[mem(p, n)] = count(); }}",
     "1:29: error: as a key, 'mem' takes a constant number of bytes, from 1 to 512",
     "use str(p, n) for a string, mem(p, 16) for bytes", f"{R}(p, n) {{ @[mem(p, 16)] = count(); }}"),
]  # fmt: skip

SLIPS = [*POINTS, *ATTRIBUTES, *CONDITIONS, *STATEMENTS, *NAMES, *STRINGS]


def said_of(text: str) -> list[str]:
    """Return what is said of a program, without the lines that show its places."""
    diagnostics = Diagnostics()
    try:
        compile_source(SourceFile("-e", text), diagnostics, CompileOptions())
    except SourceError as error:
        shown = "\n".join(each.render() for each in error.diagnostics)
    else:
        shown = diagnostics.render()
    return [line for line in shown.splitlines() if not line.startswith("    ")]


@pytest.mark.parametrize(("text", "error", "hint", "mended"), SLIPS, ids=[each[0] for each in SLIPS])
def test_a_slip_is_told_what_to_write(text: str, error: str, hint: str, mended: str) -> None:
    said = said_of(text)
    assert f"-e:{error}" in said
    assert f"hint: {hint}" == said[said.index(f"-e:{error}") + 1]
    assert said_of(mended) == []


def test_a_path_of_a_usdt_probe_is_followed_by_its_provider_and_name() -> None:
    assert said_of("usdt /usr/lib/libc.so.6:libc:setjmp { @ = count(); }") == []


@pytest.mark.parametrize("statement", ["if (x = 3) @++;", "while (x = 3) @++;", "do @++; while (x = 3);",
                                       "for (; x = 3;) @++;"])  # fmt: skip
def test_an_assignment_as_a_condition_is_a_warning(statement: str) -> None:
    said = said_of(f"{M} {{ long x; {statement} return; }}")
    assert said[0].endswith("warning: this condition assigns: found '='")
    assert said[1] == "hint: equality is '=='; if an assignment is meant, write (x = 3) != 0"
    meant = statement.replace("(x = 3", "((x = 3) != 0").replace("; x = 3;", "; (x = 3) != 0;")
    assert not any("assigns" in line for line in said_of(f"{M} {{ long x; {meant} return; }}"))


@pytest.mark.parametrize("text", [
    "long sum(long n) { return n; } libc.so.6:abs { long own = 0; own += sum(3); }",
    "static long x; libc.so.6:abs { x = 3; }",
    "./prog:shop::Cart::add { @++; }",
    "libc.so.6:abs { if (comm == \"a\" || str(arg0) == \"b\" || 'c' == arg0) @++; }",
])  # fmt: skip
def test_right_programs_stay_right(text: str) -> None:
    assert said_of(text) == []
