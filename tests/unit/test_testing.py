"""The helpers for users' tests."""

from __future__ import annotations

import pytest

from dprobes import ProgramBuilder, compile_source
from dprobes.errors import DprobesError, SourceError
from dprobes.extensions import Extension
from dprobes.testing import FakeContext, record_of, run_handler
from dprobes.vm import AddressFault, Context, Ending

PROGRAM = """
name = appln
vars = 1
offset = main
minor = 1
push 11
log b, 1
exit
offset = main + 4
minor = 2
inc lv, 0
push 22
log b, 1
"""


def test_the_example_of_the_module_is_true() -> None:
    context = FakeContext("x86_64", registers={"rdi": 0x1000}, memory={0x1000: b"/etc/passwd\0"})
    outcome = run_handler("\npush 64\npush r, arg0\nlog str\n", context)
    assert outcome.log == b"\x01" + (11).to_bytes(2, "little") + b"/etc/passwd"


def test_a_fake_context_is_a_context() -> None:
    context: Context = FakeContext()
    assert context.pid() == 0


def test_a_lone_handler_takes_header_statements() -> None:
    outcome = run_handler("push 1\nlog d, 1", logmax=2, ex_mask=0x1FFF, major=5, minor=6, autostacktrace=True)
    assert (outcome.major, outcome.minor, outcome.log) == (5, 6, b"")
    assert outcome.trace != b""


def test_a_lone_handler_may_call_procedures() -> None:
    assert run_handler("call p\nexit\nproc p\npush 1\nlog b, 1\nret\nendproc").log == b"\1"


def test_the_first_handler_of_a_program_runs_or_the_one_with_the_minor() -> None:
    context = FakeContext()
    assert run_handler(PROGRAM, context).log == b"\x0b"
    assert run_handler(PROGRAM, context, minor=2).log == b"\x16"
    assert context.local_variables == [1]
    with pytest.raises(DprobesError, match="the program has no handler with minor 3"):
        run_handler(PROGRAM, context, minor=3)


def test_a_program_takes_no_header_statements_from_elsewhere() -> None:
    with pytest.raises(DprobesError, match="header statements are given beside a program"):
        run_handler(PROGRAM, logmax=5)


def test_variables_of_the_context_are_declared() -> None:
    context = FakeContext(local_variables=[5], global_variables=[6], cpu_variables=[7])
    assert run_handler("push lv, 0\npush gv, 0\npush cv, 0\nlog b, 3", context).log == b"\x07\x06\x05"


def test_mistakes_in_the_text_are_shown_with_their_lines() -> None:
    with pytest.raises(SourceError) as caught:
        run_handler("\npush 1\npusj 1\n")
    assert str(caught.value).startswith("handler.rpn:3:1: error: unknown instruction 'pusj'")


def test_writing_may_be_forbidden() -> None:
    assert run_handler("push 1\npop r, eax").ending is Ending.EXIT
    with pytest.raises(SourceError):
        run_handler("push 1\npop r, eax", allow_write=False)


def test_the_architecture_decides_on_word_and_order() -> None:
    assert run_handler("push 1\nlog 1", architecture="s390").log == b"\0\0\0\1"


def test_memory_is_there_by_pages() -> None:
    context = FakeContext(memory={0x1FFE: b"abcd"}, read_only={0x5000: b"x"})
    assert context.read(0x1FFD, 6) == b"\0abcd\0"
    context.write(0x1FFF, b"BC")
    assert context.read(0x1FFE, 4) == b"aBCd"
    with pytest.raises(AddressFault) as caught:
        context.read(0x2FFF, 2)
    assert caught.value.address == 0x3000
    with pytest.raises(AddressFault):
        context.write(0x5000, b"y")
    with pytest.raises(AddressFault):
        context.write(0x2FFF, b"yz")
    assert context.read(0x2FFF, 1) == b"\0"


def test_registers_are_named_and_may_be_looked_at() -> None:
    context = FakeContext("i386", registers={"EAX": 1}, user_registers={"ebx": 2})
    run_handler("push u, ebx\npop r, ecx", context)
    assert context.value_of("ecx") == 2
    with pytest.raises(DprobesError, match="i386 has no register 'rax'"):
        FakeContext("i386", registers={"rax": 1})


def test_an_unknown_symbol_is_an_error_of_the_test() -> None:
    with pytest.raises(DprobesError, match="the context has no symbol 'buffer'"):
        run_handler("push buffer\nlog 1")


def test_extensions_run_and_are_noted() -> None:
    context = FakeContext(
        extensions={
            "sample": Extension(interpret=lambda view: view.push(7)),
            "other": Extension(interpret=lambda view: view.push(8)),
        }
    )
    assert run_handler("callk sample\ncallk\nlog b, 3", context).log == b"\x08\x07\x07"
    assert context.extension_calls == ["sample", None]


def test_built_and_compiled_programs_run_and_give_records() -> None:
    program = ProgramBuilder("libc.so.6", major=7)
    program.probe("malloc", minor=1).push_r("arg0").log(1).exit()
    program.probe("free", minor=2).abort()
    context = FakeContext(registers={"rdi": 42, "rip": 0x401000, "rsp": 0x7FFE0000}, pid=12, tid=13, uid=14, time=15)
    record = record_of(run_handler(program, context), context)
    assert record is not None
    assert (record.major, record.minor, record.words()) == (7, 1, (42,))
    assert (record.pid, record.tid, record.uid, record.time) == (12, 13, 14, 15)
    assert (record.ip, record.sp) == (0x401000, 0x7FFE0000)
    assert record_of(run_handler(program.build(), context, minor=2), context) is None
    compiled = compile_source(PROGRAM.replace("name = appln", 'name = "no-such-module.so"'))
    record = record_of(run_handler(compiled, context, minor=2), context)
    assert record is not None
    assert record.data == bytes([22])
