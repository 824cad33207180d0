"""The templates of records that nobody has written one for say what handlers log."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes import ProgramBuilder
from dprobes.arch import architecture
from dprobes.formatters.templates.data_extraction import fits
from dprobes.formatters.templates.derived_templates import derived_templates
from dprobes.formatters.templates.template_collection import templates_in
from dprobes.formatters.templates.template_renderer import render
from dprobes.record.log_record import LogRecord
from dprobes.rpn.instruction_set import ROWS, Group, rows_by_syntax
from dprobes.rpn.rpn_program import Code, Expression, Instruction, Offset, ProbeDefinition, Program
from dprobes.testing import FakeContext, record_of, run_definition, run_handler
from support.random_programs import RandomPrograms, random_context
from unit.formatters.templates.support import program_of

HEADER = "name = x\nvars = 4\ngvars = 4\ncvars = 4\ntvars = 4\noffset = f\nminor = 1\n"


def derived(handler: str, more: str = "", size: int = 8) -> str | None:
    """Return the strings of the template that is derived from a handler, one a line."""
    text = derived_templates(program_of(HEADER + handler + more)).get(size)
    if text is None:
        return None
    assert 1 in templates_in(text, 0)
    lines = text.splitlines()
    assert lines[:2] == ["major = 0", "minor = 1"]
    return "\n".join(line.removeprefix('fmt = "').removesuffix('"') for line in lines[2:])


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        ("push r, arg0; push r, arg1; log 2; exit", "arg1=%nv arg0=%nv"),
        ("push r, arg0; log b, 1; push u, arg1; log w, 1; push r, retval; log d, 1; exit",
         "arg0=%bv arg1=%wv retval=%dv"),
        ("push r, rip; log 1; push r, rip; log d, 1; push r, rip; log w, 1; exit", "rip=%na rip=%da rip=%wx"),
        ("push r, cr3; log 1; push r, cr0; log d, 1; push r, dr7; log w, 1; exit", "cr3=%np cr0=%dp dr7=%wx"),
        ("push pid; push tid; push uid; push procid; log 4; exit", "cpu=%nv uid=%nv tid=%nv pid=%nv"),
        ("push task; log 1; push time; log 1; push wid; log 1; exit", "task=%nv time=%nu bits=%nv"),
        ("push comm; log 2; push pid; push comm; log 3; exit", 'comm=\\"%.16s\\" comm=\\"%.16s\\" pid=%nv'),
        ("push comm; log 1; exit", "comm.0=%nv"),
        ("push lv, 0; push gv, 1; push cv, 2; log 3; exit", "cv2=%nv gv1=%nv lv0=%nv"),
        ("push tv, 3; log 1; push 0; push 2; log tv; exit", "tv3=%nv tv=%*v"),
        ("push 5; log 1; exit", "value=%nv"),
        ("push counter; log 1; push counter; push mem, u32; log 1; exit", "&counter=%nv counter=%nv"),
        ("push counter + 4; push mem, u8; log b, 1; exit", "*(&counter+4)=%bv"),
        ("push r, arg0; push mem, u64; push mem, u16; log 1; exit", "**arg0=%nv"),
        ("push 8; push r, arg0; add; push mem, u64; log 1; exit", "*(8+arg0)=%nv"),
        ("push r, arg0; push r, arg1; sub; log 1; exit", "arg1-arg0=%nv"),
        ("push r, arg0; push 10; div; log 2; exit", "arg0/10=%nv arg0%%10=%nv"),
        ("push r, arg0; neg; push 7; and; log 1; exit", "~arg0&7=%nv"),
        ("push r, arg0; shr 12; log 1; exit", "arg0=%nv"),
        ("push r, retval:s32; log 1; push r, arg0:s64; log 1; push r, arg1:u32; log 1; exit",
         "retval=%nd arg0=%nd arg1=%nv"),
        ("push r, retval:s32; dup 2; log b, 1; log d, 1; log w, 1; push r, arg0:s8; log b, 1; exit",
         "retval=%bv retval=%dd retval=%wv arg0=%bd"),
        ("push r, arg0; push mem, s32; push r, arg1:s32; xchg; log 2; exit", "*arg0=%nd arg1=%nd"),
        ("push 8; push r, arg0:s32; add; log 1; push r, arg0:s32; push mem, u8; log 1; exit",
         "8+arg0=%nv *arg0=%nv"),
        ("push 64; push r, arg0:s64; log str; exit", 'arg0=\\"%*s\\"'),
        ("push r, arg0; vfyr; log 1; exit", "invalid=%nv"),
        ("push r, arg0; push r, arg1; xchg; log 1; dup 1; log 2; exit", "arg0=%nv arg1=%nv arg1=%nv"),
        ("push r, arg0; push r, arg1; ros 1; move lv, 0; log 1; exit", "arg0=%nv"),
        ("push 64; push r, arg0; log str; exit", r'arg0=\"%*s\"'),
        ("push 16; push r, arg0; log mrf; exit", "arg0=%*02bx"),
        ("push r, arg1; push 17; push r, arg0; log mrf; log 1; exit", "arg0=%*h\narg1=%nv"),
        ("push r, arg1; push r, arg0; log mrf; exit", "arg0=%*h"),
        ("push 0; push 2; log lv; push 0; push 2; log gv; push 0; push 2; log cv; exit", "lv=%*v gv=%*v cv=%*v"),
        ("push r, arg0; log 1; log ustack; push r, arg1; log 1; log ustack, 3; exit",
         "arg0=%nv\n%*k\narg1=%nv\n%*k"),
        ("log st; push r, arg0; log 1; exit", "arg0=%nv"),
        ("exit", ""),
        ("push r, arg0; log 1; remove", "arg0=%nv"),
        ("push r, arg0; log 1; exit 3", "arg0=%nv"),
        ("push r, xmm1; log 2; exit", "xmm1.0=%nv xmm1.1=%nv"),
    ],
)  # fmt: skip
def test_what_a_straight_handler_logs(handler: str, text: str) -> None:
    assert derived(handler) == text


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        ("push r, arg0; push r, arg1; jz none; log 1; exit\nnone: log 1; exit", "arg1=%nv"),
        ("push r, arg1; jnz some; abort\nsome: log 1; exit", "arg1=%nv"),
        ("push r, arg1; jz end; inc gv, 0\nend: log 1; exit", "arg1=%nv"),
        ("push 3\nagain: inc lv, 0; push r, arg0; log 1; ros 1; jmp end\nend: exit", "arg0=%nv"),
        ("push r, arg0\nagain: jnz again; log 1; exit", "arg0=%nv"),  # no way logs more by going round
        ("push r, arg0; push r, arg1; jz end; log 1; exit\nend: ros 1; log 1; exit", None),
        ("push r, arg0; push r, arg1; jz end; log 2; exit\nend: log 1; exit", None),
        ("push 3\nagain: push r, arg0; log 1; loop again; exit", None),
        ("push 3\nagain: loop again; push r, arg0; log 1; exit", "arg0=%nv"),
        ("push 3\nagain: loop again; log 1; exit", None),  # what it was at first, or what it has become
        ("sx bad; push r, arg0; push mem, u32; log 1; exit\nbad: exit", None),
        ("push r, arg0; push 1; log; exit", None),
        ("push r, arg0; push 0; push tsp; log 2; exit", None),
        ("push r, arg0; log 1; push 0; pop lp; exit", None),
        ("push r, arg0; log 1; setmin 5; exit", None),
        ("abort", None),
    ],
)
def test_all_ways_of_a_handler_log_the_same_or_there_is_no_template(handler: str, text: str | None) -> None:
    assert derived(handler) == text


def test_what_is_logged_by_procedures_is_followed() -> None:
    procedure = (
        "\nproc one\n log 1\n call two\n ret\nendproc\nproc two\n push 64; push r, arg1; log str\n ret\nendproc\n"
    )
    assert derived("push r, arg0; call one; call two; exit", procedure) == r"arg0=%nv arg1=\"%*s\" arg1=\"%*s\""
    endless = "\nproc one\n push r, arg0; log 1; call one\n ret\nendproc\n"
    assert derived("call one; exit", endless) is None


def test_a_call_of_an_extension_may_log_anything() -> None:
    builder = ProgramBuilder("x")
    builder.probe("f").callk("sample").exit()
    assert derived_templates(builder.build()) == {}


def test_cells_are_those_of_the_word() -> None:
    handler = "push pid; push time; log 2; exit"
    assert derived(handler) == "time=%nu pid=%nv"
    assert derived(handler, size=4) == "time.0=%nv time.1=%nv"
    assert derived("push r, arg0; push mem, u64; log 1; exit", size=4) == "*arg0.0=%nv"


def test_fields_of_tracepoints_have_their_names() -> None:
    program = program_of(
        "name = vmlinux\nmodtype = tracepoint\noffset = sched:sched_switch\n"
        "push 16; push tp, prev_comm; log str; push tp, prev.mm.pgd; push tp, ip; log 2; log kstack; exit"
    )
    expected = r'fmt = "prev_comm=\"%*s\" ip=%na prev.mm.pgd=%nv"' + '\nfmt = "%*k"\n'
    assert derived_templates(program)[8] == "major = 0\nminor = 0\n" + expected


def test_probepoints_with_one_minor_code_have_a_template_if_they_log_the_same() -> None:
    text = "name = x\nmajor = 7\noffset = f\npush r, arg0; log 1; exit\noffset = g\npush r, {}; log 1; exit\n"
    assert derived_templates(program_of(text.format("arg0")))[8] == 'major = 7\nminor = 0\nfmt = "arg0=%nv"\n'
    assert derived_templates(program_of(text.format("arg1"))) == {}
    others = text.replace("offset = g", "offset = g\nminor = 2")
    assert derived_templates(program_of(others.format("arg1")))[8] == (
        'major = 7\nminor = 0\nfmt = "arg0=%nv"\nminor = 2\nfmt = "arg1=%nv"\n'
    )


def test_names_may_be_anything() -> None:
    symbol = 'a"b%d\\n\n\x1b[31m'
    rows = rows_by_syntax()
    instructions = (
        Instruction(rows["push <value>"], Expression(0, symbol)),
        Instruction(rows["push mem, u32"]),
        Instruction(rows["push <value>"], Expression(0, symbol)),
        Instruction(rows["log <count>"], 2),
    )
    program = Program("x", definitions=(ProbeDefinition(Offset(Expression(0)), Code(instructions)),))
    text = derived_templates(program)[8]
    assert "\x1b" not in text
    template = templates_in(text, 0)[0]
    record = LogRecord(data=(5).to_bytes(8, "little") * 2)
    assert render(template, record) == r'&a"b%d\n\n\x1b[31m=5 *(&a"b%d\n\n\x1b[31m)=5'


def test_long_names_and_many_ways_have_an_end() -> None:
    assert derived("push r, arg0; " + "push mem, u64; " * 60 + "log 1; exit") == "*" * 23 + "value=%nv"
    many = "".join(f"push r, arg{n % 6}; jz l{n}; push 1; pop lv, 0\nl{n}: ros 1; " for n in range(50))
    assert derived(many + "push r, arg0; log 1; exit") == "arg0=%nv"
    assert derived("push pid; " * 65 + "log 1; exit") is None
    ways = "".join(f"push r, arg0; jz l{n}; push r, arg1; log 1\nl{n}: ros 1; " for n in range(30))
    assert derived(ways + "exit") is None


def test_a_record_is_read_as_the_handler_has_logged_it() -> None:
    context = FakeContext(registers={"rdi": 0x1000, "rsi": 2**64 - 2, "rax": 0xFFFFFFFF}, memory={0x1000: b"/etc\0"})
    handler = "push 64; push r, arg0; log str; push r, retval; push r, arg1; log 2"
    record = record_of(run_handler(handler, context), context)
    assert record is not None
    template = templates_in(derived_templates(program_of(HEADER + handler))[8], 0)[1]
    assert render(template, record) == 'arg0="/etc" arg1=-2 retval=-1'


SEEDS = st.integers(0, (1 << 32) - 1)
RARE = [row for row in ROWS if row.operator in ("setmaj", "setmin", "callk", "sx", "rx")]
"""What there are no templates for, or hardly any: random programs consist of it."""


def random_program(seed: int, name: str) -> Program:
    target = architecture(name)
    programs = RandomPrograms(Random(seed), target, lambda row, _: row not in RARE and row.group is not Group.IO)
    return programs.defined() if seed % 2 else programs.wild()


@pytest.mark.parametrize(("name", "size"), [("i386", 4), ("x86_64", 8)])
@given(seed=SEEDS)
def test_a_derived_template_takes_all_of_a_record(name: str, size: int, seed: int) -> None:
    program = replace(random_program(seed, name), logmax=0xFFFF)
    templates = templates_in(derived_templates(program).get(size, ""), program.major)
    for number, definition in enumerate(program.definitions):
        template = templates.get(definition.minor)
        context = random_context(Random(seed), architecture(name))
        machine = run_definition(program, number, context)
        record = record_of(machine.outcome(), context)
        # An exception may end a handler before all is logged.
        ended_early = any(machine.last_exception) or machine.unhandled
        if template is not None and record is not None and not ended_early:
            assert fits(template, record._replace(word_size=4 if size == 4 else 8))


def test_random_programs_have_derived_templates() -> None:
    assert sum(bool(derived_templates(random_program(seed, "x86_64"))) for seed in range(500)) > 40
