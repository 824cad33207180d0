"""What printf prints has the name of its expression."""

from __future__ import annotations

import re

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_source
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.rpn.keyed_tables import KeyKind
from dprobes.source_text import SourceFile

WORLD = """
module "m";
struct head { int size; char name[8]; short kind : 4; };
struct req { struct head head; struct req *next; long total; int values[3]; };
static long count; static long seen[4];
long twice(long n) { return 2 * n; }
"""


def templates_of(statements: str, conversion: str = "%d") -> list[str]:
    """Return the place-holders for what is printed."""
    text = f"{WORLD} return f(struct req *req, char *path) {{ {statements} }}".replace("%?", conversion)
    diagnostics = Diagnostics()
    compiled = compile_source(SourceFile("a.dpc", text), diagnostics, CompileOptions())
    assert not diagnostics.render()
    return re.findall(r'^fmt = "(.*)"$', compiled.templates, re.MULTILINE)


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("req", "req"),
        ("arg0", "arg0"),
        ("req->total", "total"),
        ("req->next->head.size", "size"),
        ("(*req->next).total", "total"),
        ("req->values[1]", "values"),
        ("*req->values", "values"),
        ("&req->total", "total"),
        ("(int)req->total", "total"),
        ("(long)(req)", "req"),
        ("req->head.kind", "kind"),
        ("count++", "count"),
        ("(pid, tid)", "tid"),
        ("seen[2]", "seen"),
        ("twice(count)", "twice"),
        ("@x[pid]", "x"),
        ("@[pid]", "value"),
        ('reg("RAX")', "rax"),
        ("req->total + 1", "value"),
        ("-req->total", "value"),
        ("7", "value"),
        ("pid ? tid : uid", "value"),
        ("sizeof(int)", "value"),
    ],
)
def test_a_field_has_the_name_of_an_expression(expression: str, name: str) -> None:
    (template,) = templates_of(f'@x[pid] = 1; @[pid] = 1; printf("a text %?", {expression});')
    assert re.findall(r"%\((\w+)\)", template) == [name]


@pytest.mark.parametrize(
    ("conversion", "expression", "template"),
    [
        ("%s", "str(path)", "%(path)*.200~s"),
        ("%s", "path", "%(path)*.200~s"),
        ("%s", "req->head.name", "%(name)*s"),
        ("%h", "mem(req, 8)", "%(req)*h"),
        ("%k", "ustack()", "%(ustack)*k"),
        ("%s", "func", "%(func)*na"),
        ("%s", "sym(pc)", "%(pc)na"),
        ("%v", "sym(arg0)", "%(arg0)*na"),
        ("%s", "comm", "%{name}"),
        ("%-16s", "comm", "%-16{name}"),
        ("%16.4s", "comm", "%16.4{name}"),
        ("%-20s", "func", "%(func)*-20na"),
        ("%d", "req->total", "%(total)*nd"),
        ("%d", "req->values", "%(values[])*dd"),
        ("%4x", "req->values", "%(values[])*4dx"),
        ("%v", "req->head.name", "%(name[])*bv"),
        ("%h", "req->values", "%(values)*h"),
        ("%p", "req->values", "%(values)*np"),
        ("%v", "elapsed", "%(elapsed)*nT"),
        ("%d", "elapsed", "%(elapsed)*nd"),
        ("%T", "nsecs - count", "%(value)qT"),
        ("%T", "(int)count", "%(count)nT"),
        ("%T", "(short)count", "%(count)wT"),
    ],
)
def test_what_reads_memory_is_a_number_and_an_array_is_a_list(conversion: str, expression: str, template: str) -> None:
    assert templates_of(f'printf("%?", {expression});', conversion) == [template]


@pytest.mark.parametrize(
    ("conversion", "expression", "message"),
    [
        ("%-20k", "ustack()", "'ustack()' is printed without a width: its frames have lines of their own"),
        ("%.2k", "ustack()", "'ustack()' is printed without a precision"),
        ("%20.3s", "ntop(7)", "'ntop(7)' is printed without a precision"),
    ],
)
def test_a_width_without_effect_is_an_error(conversion: str, expression: str, message: str) -> None:
    text = f'module "m"; f {{ printf("{conversion}", {expression}); }}'
    with pytest.raises(SourceError) as caught:
        compile_source(SourceFile("a.dpc", text), Diagnostics(), CompileOptions())
    assert [each.message for each in caught.value.diagnostics] == [message]


def test_names_are_not_endless() -> None:
    (template,) = templates_of(f'long {"n" * 100} = pid; printf("%d", {"n" * 100});')
    assert template == f"%({'n' * 60})nd"


def test_control_registers_are_keys_as_addresses_are() -> None:
    text = 'module "m"; f { @[reg("cr3")] = count(); @b[reg("rax")] = count(); }'
    diagnostics = Diagnostics()
    compiled = compile_source(SourceFile("a.dpc", text), diagnostics, CompileOptions())
    tables = {table.name: [key.kind for key in table.keys] for table in compiled.programs[0].tables}
    assert tables["_"] == [KeyKind.ADDRESS]
    assert tables["b"] == [KeyKind.WORD]
