"""The RPN that points become."""

from __future__ import annotations

import re

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_source
from dprobes.errors import SourceError
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.rpn.rpn_program import Address, Expression
from dprobes.source_text import SourceFile


def offsets_of(text: str) -> list[str]:
    compiled = compile_source(SourceFile("test.dpc", text), Diagnostics(), CompileOptions(), module="server")
    return re.findall(r"^offset = (.*)$", compiled.rpn, re.MULTILINE)


@pytest.mark.parametrize(
    ("place", "offset"),
    [
        ("net/http.serverHandler.ServeHTTP", '"net/http.serverHandler.ServeHTTP"'),
        ("net/http.serverHandler.ServeHTTP+0x10", '"net/http.serverHandler.ServeHTTP"+0x10'),
        ("net/http.Handler.ServeHTTP-fm", '"net/http.Handler.ServeHTTP-fm"'),
        ('"net/http.(*conn).serve"', '"net/http.(*conn).serve"'),
        ('server:"net/http.(*conn).serve"+8', '"net/http.(*conn).serve"+8'),
        ("handle_*", "handle_*"),
        ("handle+8", "handle+8"),
    ],
)
def test_names_of_go_stand_in_quotes(place: str, offset: str) -> None:
    assert offsets_of(f'{place} {{ printf("hit") }}') == [offset]


def test_a_watched_address_without_a_module_is_one_of_every_process() -> None:
    source = SourceFile("test.dpc", 'watch w (char[8])0x5000 { printf("%d", pid); }')
    (program,) = compile_source(source, Diagnostics(), CompileOptions()).programs
    assert space_of(program) is Space.PROCESSES
    assert program.definitions[0].location == Address(Expression(0x5000), Expression(0x5007))


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("sample 99hz { @ = count(); }", ["*"]),
        ("sample 99hz python3 { @ = count(); }", ["python3"]),
        ('module "libz.so.1"; sample 99hz { @ = count(); }', ["libz.so.1"]),
        ("sample 99hz { @ = count(); } f { @f = count(); }", ["*", "server"]),
    ],
)
def test_a_sampler_without_a_module_is_of_whatever_runs(text: str, modules: list[str]) -> None:
    programs = compile_source(SourceFile("test.dpc", text), Diagnostics(), CompileOptions(), module="server").programs
    assert [each.name for each in programs] == modules


def test_a_record_that_may_be_too_long_is_an_error() -> None:
    text = 'f(p, q) { printf("%s %s", str(p, 40000), str(q, 40000)); }'
    with pytest.raises(SourceError) as caught:
        compile_source(SourceFile("test.dpc", text), Diagnostics(), CompileOptions(), module="server")
    (error,) = caught.value.diagnostics
    assert error.message == "this may print 80008 bytes in one record, which has at most 65535"
    assert error.hint == "print less: str(p, n) or mem(p, n) with a smaller n"
