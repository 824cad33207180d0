"""What later stages say of programs in C, in the words of C."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_source, in_c
from dprobes.engines.engine_capabilities import requirements
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import CompileOptions, check_program
from dprobes.source_text import SourceFile, Span

MODULE = 'module "m"; '


def said_of(text: str, *, allow_write: bool = True) -> str:
    """Return all that is said of a program, by any stage that needs no module."""
    diagnostics = Diagnostics()
    options = CompileOptions(allow_write=allow_write)
    try:
        (program,) = compile_source(SourceFile("a.dpc", text), diagnostics, options).programs
        check_program(program, architecture("x86_64"), diagnostics, options)
    except SourceError:
        pass
    return diagnostics.render()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ('printf("%k", kstack());', "'kstack()' needs a probe in the kernel"),
        ("@[kstack(5)] = count();", "the key 'kstack()' of table '@' needs a probe in the kernel"),
        ("@x[kstack()] = count();", "the key 'kstack()' of table '@x' needs a probe in the kernel"),
        ('printf("%d", reg("zip"));', "x86_64 has no register 'zip'"),
        ('reg("rip") = 5;', "'reg(\"rip\")' cannot be changed"),
        ("crash();", "'crash()' is for kernel probes; here it only ends the hit"),
        ("@[str(arg0, 512)]++;", "a string in a table has at most 511 bytes, not 512"),
    ],
)
def test_constructs_are_called_as_they_are_written(statement: str, message: str) -> None:
    said = said_of(f"{MODULE}f {{ {statement} }}")
    assert message in said
    assert "a.dpc:1:" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tracepoint a:b { printf("%p", pc); }', "a tracepoint has no registers of its own"),
        ('tracepoint a:b { printf("%p", pc); }', "hint: write the name of a field"),
        ("return tracepoint a:b { @++; }", "there is no return of a 'tracepoint'"),
        ("return sample 9hz { @++; }", "there is no return of a 'sample'"),
        ("return watch w m:x { @++; }", "there is no return of a 'watch'"),
        ("m:f { @++; } [minor 65536] m:g { @++; }", "'minor 65536' is outside 0 to 65535"),
        ("[opcode 256] m:g { @++; }", "'opcode 256' is outside 0 to 255"),
        ("[maxhits 2147483648] m:g { @++; }", "'maxhits 2147483648' is outside 0 to 2147483647"),
        ('module "m", major 65536; f { @++; }', "'major 65536' is outside 0 to 65535"),
        ('module "m", jmpmax 65536; f { @++; }', "'jmpmax 65536' is outside 0 to 65535"),
        ("watch w (struct gone)m:x { @++; }", "'struct gone' has no size that is known: it cannot be watched"),
        ("usdt m:x { @++; }", "hint: write 'usdt MODULE:PROVIDER:NAME'"),
        ("[opcode 5] watch w m:x { @++; }", "a watchpoint has no opcode"),
        (
            "static long a[65537]; m:f { a[pid]++; }",
            "a program has room for 65536 numbers in its 'static' variables, and with 'a' there are more",
        ),
        (
            "thread long a[65536], b; m:f { a[pid] = b; }",
            "a program has room for 65536 numbers in its 'thread' variables, and with 'b' there are more",
        ),
    ],
)
def test_programs_are_told_in_their_own_words(text: str, message: str) -> None:
    said = said_of(text)
    assert message in said
    assert "is not defined" not in said
    assert "<compiled>" not in said


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('f { printf("%d", reg("cr3")); }', ["'reg(\"cr3\")'"]),
        ("f { core(); }", ["'core()'"]),
        ("f { debugger(); }", ["'debugger()'"]),
        ("f { *(int *)arg0 = 5; }", ["'*p = …'"]),
        ('f { printf("%k", ustack(5)); }', ["'ustack(5)'"]),
        ("return f { @++; }", ["'return'"]),
        ("f* { @++; }", ["'f*'"]),
        ("watch rw x { @++; }", ["'watch rw'"]),
        ("sample 9hz { @++; }", ["'sample'"]),
        ("f { skip(1); }", ["'skip'"]),
        ("kernel:f { @++; }", ["'kernel:'"]),
        ("tracepoint a:b { @++; }", ["'tracepoint'"]),
    ],
)
def test_what_an_engine_lacks_is_called_so(text: str, what: list[str]) -> None:
    compiled = compile_source(SourceFile("a.dpc", text), Diagnostics(), CompileOptions(allow_write=True), module="m")
    (program,) = compiled.programs
    assert [in_c(f"'{each.what}'") for each in requirements(program, architecture("x86_64"))] == what


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("the place is right: write 'opcode = 0x55'", "the place is right: write '[opcode 0x55]' before the place"),
        ("'return = yes' needs the start of a function", "'return' needs the start of a function"),
        ("to see accesses to it, write 'address = x' and 'watchpoint = w' (or rw)",
         "to see accesses to it, write 'watch w x' (or rw)"),
        ("'offset = usdt:a:b' raises the semaphore", "'usdt MODULE:a:b' raises the semaphore"),
        ("write 'offset =' with the function's name", "write a place with the function's name"),
        ("write 'address = errors + 0x1'", "write '(char)errors+0x1' as what is watched"),
        ("write 'address = errors : errors + 0x7'", "write '(long)errors' as what is watched"),
        ("write 'address = errors + 0x4 : errors + 0x7'", "write '(int)errors+0x4' as what is watched"),
        ("write 'address = 0x1000 : 0x1003'", "write '0x1000 : 0x1003' after 'watch'"),
        ('load it, or name its file by a path: name = "/PATH/NAME.ko"',
         "load it, or name its file by a path: 'kmod \"/PATH/NAME.ko\":' before the place"),
        ("'push tp, prev_pid' is not there", "'prev_pid' is not there"),
        ("'push usdt, 3' is not there", "'arg2' is not there"),
        ("'push entry, arg1', 'push elapsed', 'push time'", "'arg1', 'elapsed', 'nsecs'"),
        ("write 'gvars = 4' or less", "write at most 4 global variables or less"),
        ("there is no 'push r' here", "there is no 'push r' here"),
    ],
)  # fmt: skip
def test_words(message: str, expected: str) -> None:
    assert in_c(message) == expected


def test_only_what_is_said_of_a_text_in_c_is_changed() -> None:
    diagnostics = Diagnostics()
    for wording in (None, in_c):
        source = SourceFile("a", "text", wording=wording)
        diagnostics.error(Span(source, 0, 4), "'sampler =' is no 'return = yes'", hint="write 'opcode = 5'")
    assert [(each.message, each.hint) for each in diagnostics] == [
        ("'sampler =' is no 'return = yes'", "write 'opcode = 5'"),
        ("'sample' is no 'return'", "write '[opcode 5]' before the place"),
    ]
