"""Programs built in Python: the same as written ones, and errors at the lines of Python."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import dprobes
from dprobes import ProgramBuilder, SourceError
from dprobes.api.mnemonics import Instructions
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.instruction_set import ROWS, OperandKind
from dprobes.rpn.program_text import Header, keywords_of
from dprobes.source_text import SourceFile

OPERANDS = {
    OperandKind.LABEL: "here",
    OperandKind.PROCEDURE: "helper",
    OperandKind.REGISTER: "arg0",
    OperandKind.EXTENSION: "fingerprint",
    OperandKind.FIELD: "prev_pid",
    OperandKind.TEXT: 'a "text"; // and more',
    OperandKind.TABLE: "hits",
    OperandKind.COUNTER: "page-faults",
}


def parsed(text: str) -> dprobes.Program:
    return parse_source(SourceFile("test.rpn", text), Diagnostics())


def test_a_built_program_equals_the_written_one() -> None:
    program = ProgramBuilder("libc.so.6", major=7, vars=2, groupdef=["memory"], typedef=["enter", "leave"])
    with program.procedure("note") as note:
        note.push_lv(1).log(1).ret()
    with program.probe("malloc", minor=1, group="memory", type="enter", maxhits=5) as handler:
        handler.push_r("arg0")
        handler.label("again").jz("done").loop("again")
        handler.label("done").call("note").do("log str; ux", "exit")
    program.probe("free", minor=2, at_return=True, type=["enter", "leave"]).push("errno + 4").push_mem_u32().log(1)
    program.watch("counter : counter + 7", "rw", minor=3, passcount=2).push(-1).exit(3)
    program.sample(50, minor=4).abort()
    assert program.build() == parsed(
        """
        name = "libc.so.6"; major = 7; vars = 2; groupdef = memory; typedef = enter leave
        proc note
            push lv, 1; log 1; ret
        endproc
        offset = malloc; minor = 1; group = memory; type = enter; maxhits = 5
            push r, arg0
            again: jz done
            loop again
            done: call note
            log str
            ux
            exit
        offset = free; minor = 2; return = yes; type = enter leave
            push errno + 4
            push mem, u32
            log 1
        address = counter : counter + 7; watchpoint = rw; minor = 3; passcount = 2
            push -1
            exit 3
        sampler = 50hz; minor = 4
            abort
        """
    )
    assert parsed(program.text) == program.build()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.syntax)
def test_there_is_a_method_for_every_instruction(row: dprobes.api.mnemonics.Row) -> None:  # type: ignore[name-defined]
    name = "_".join([row.operator, *(o for o in row.operands if isinstance(o, str))])
    method = "and_" if name == "and" else "or_" if name == "or" else "not_" if name == "not" else name
    program = ProgramBuilder("test", vars=8, gvars=8, cvars=8, table=["hits, count"])
    program.procedure("helper").ret()
    handler = program.probe("main").label("here").nop()
    kind = row.operand_kind
    getattr(handler, method)(*([] if kind is None else [OPERANDS.get(kind, 3)]))
    assert program.build().definitions[0].handler.instructions[1].row == row


def test_no_method_is_without_an_instruction() -> None:
    names = {name for name, _ in inspect.getmembers(Instructions, inspect.isfunction) if not name.startswith("_")}
    words = {re.sub(r"<.*>", "", row.syntax).strip(", ").replace(", ", "_").replace(" ", "_") for row in ROWS}
    assert {name.rstrip("_") for name in names} == words


def test_every_header_statement_is_an_argument() -> None:
    file = set(inspect.signature(ProgramBuilder).parameters)
    assert file == set(keywords_of(Header.FILE))
    point = set[str]()
    for method in (ProgramBuilder.probe, ProgramBuilder.watch, ProgramBuilder.sample):
        point |= set(inspect.signature(method).parameters)
    spelled = {"return": "at_return", "watchpoint": "access", "sampler": "number"}
    assert {spelled.get(keyword, keyword) for keyword in keywords_of(Header.POINT)} <= point


def test_errors_name_the_lines_of_python_all_at_once() -> None:
    program = ProgramBuilder("libc.so.6", major=70000)
    handler = program.probe("malloc", minor=1)
    handler.push_lv("one")  # type: ignore[arg-type]
    handler.push_r("arg0").log(70000)
    handler.do("psuh 3")
    line = inspect.getsourcelines(test_errors_name_the_lines_of_python_all_at_once)[1]
    with pytest.raises(SourceError) as caught:
        program.build()
    assert str(caught.value) == (
        f"{__file__}:{line + 1}:15: error: 'major = 70000' is outside 0 to 65535\n"
        '        program = ProgramBuilder("libc.so.6", major=70000)\n'
        "                  ^~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~\n"
        f"{__file__}:{line + 3}:5: error: expected a number, found 'one'\n"
        '        handler.push_lv("one")  # type: ignore[arg-type]\n'
        "        ^~~~~~~~~~~~~~~~~~~~~~\n"
        f"{__file__}:{line + 4}:5: error: 70000 is outside 0 to 65535\n"
        '        handler.push_r("arg0").log(70000)\n'
        "        ^~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~\n"
        f"{__file__}:{line + 5}:5: error: unknown instruction 'psuh'\n"
        '        handler.do("psuh 3")\n'
        "        ^~~~~~~~~~~~~~~~~~~~\n"
        "hint: did you mean 'push'?"
    )


def test_errors_of_meaning_name_the_lines_too() -> None:
    program = ProgramBuilder("libc.so.6")
    program.probe("mallok").push_r("nonsense").jmp("nowhere")
    line = inspect.getsourcelines(test_errors_of_meaning_name_the_lines_too)[1]
    with pytest.raises(SourceError) as caught:
        program.compile()
    assert f"{__file__}:{line + 2}:5: error: " in str(caught.value)
    assert "'nonsense'" in str(caught.value)
    assert "'nowhere'" in str(caught.value)


def test_code_without_a_file_is_named_by_its_statement() -> None:
    namespace: dict[str, ProgramBuilder] = {}
    exec("import dprobes\np = dprobes.ProgramBuilder('a')\np.probe('b').log(-1)", namespace)
    with pytest.raises(SourceError) as caught:
        namespace["p"].build()
    assert str(caught.value) == "<string>:3:1: error: -1 is outside 0 to 65535\n    log -1\n    ^~~~~~"


def test_an_operand_cannot_smuggle_statements_in() -> None:
    handler = ProgramBuilder("a").probe("b")
    with pytest.raises(ValueError, match="'arg0; exit' is more than one operand"):
        handler.push_r("arg0; exit")
    program = ProgramBuilder("a")
    program.probe("b").do("exit", "offset = c")
    with pytest.raises(SourceError, match=r"a text that was given to do\(\) begins a probe definition of its own"):
        program.build()


def test_a_module_may_have_any_name() -> None:
    program = ProgramBuilder('/opt//a "b" \\c;d')
    program.probe(0x10).exit()
    assert program.build().name == '/opt//a "b" \\c;d'


def test_public_names_are_there_and_are_documented() -> None:
    for name in dprobes.__all__:
        if name not in ("__version__", "ALL_ITEMS"):
            assert getattr(dprobes, name).__doc__, name
    assert set(dprobes.__all__) <= set(dir(dprobes))
    with pytest.raises(AttributeError, match="module 'dprobes' has no attribute 'probe'"):
        dprobes.probe  # noqa: B018  # type: ignore[attr-defined]


def test_importing_the_package_imports_nothing_else() -> None:
    import subprocess
    import sys

    code = "import sys; before = set(sys.modules); import dprobes; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(Path(dprobes.__file__).parents[1])})  # fmt: skip
    assert done.stdout.split() == ["__future__", "dprobes", "dprobes.version"]
