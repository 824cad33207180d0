"""The RPN that points become."""

from __future__ import annotations

import re

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.pipeline import compile_source
from dprobes.rpn.pipeline import CompileOptions
from dprobes.source import SourceFile


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
