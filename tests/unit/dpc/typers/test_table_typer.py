"""Tables of durations have the unit of nanoseconds, whatever the durations are computed from."""

from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.preprocessor import preprocess
from dprobes.rpn.keyed_tables import TableKind, Unit
from dprobes.rpn.rpn_parser import parse
from dprobes.source_text import SourceFile


def table_of(text: str) -> tuple[TableKind, Unit]:
    """Return the kind and the unit of a program's first table."""
    diagnostics = Diagnostics()
    (compilation,), _ = compile_text(preprocess(SourceFile("p.dpc", text), diagnostics), diagnostics)
    program = parse(compilation.preprocessed(), diagnostics)
    diagnostics.raise_if_errors()
    assert program is not None
    return program.tables[0].kind, program.tables[0].unit


@pytest.mark.parametrize(
    ("text", "kind", "unit"),
    [
        ("return m:f { @ = hist(elapsed); }", TableKind.HIST, Unit.NANOSECONDS),
        ("thread long t; m:f { t = nsecs; } return m:f { @ = hist(nsecs - t); }", TableKind.HIST, Unit.NANOSECONDS),
        ("m:f(since) { long d = nsecs - since; @ = max(d); }", TableKind.MAX, Unit.NANOSECONDS),
        ("m:f(since) { @ += (long)(nsecs - since); }", TableKind.SUM, Unit.NANOSECONDS),
        ("return m:f { @ = lhist(retval ? elapsed : 0, 0, 100, 10); }", TableKind.LHIST, Unit.NANOSECONDS),
        ("return m:f { long d = 0; d += elapsed; @ = last(d); }", TableKind.LAST, Unit.NANOSECONDS),
        ("return m:f { @ = hist(elapsed / 1000); }", TableKind.HIST, Unit.NONE),
        ("m:f { @ = last(nsecs); }", TableKind.LAST, Unit.NONE),
        ("return m:f { @ = min(nsecs - elapsed); }", TableKind.MIN, Unit.NONE),
        ("m:f { @ = min(nsecs - 5); }", TableKind.MIN, Unit.NONE),
        ("return m:f { long d = elapsed; d = retval; @ = hist(d); }", TableKind.HIST, Unit.NONE),
        ("return m:f { long d = elapsed; d++; @ = hist(d); }", TableKind.HIST, Unit.NONE),
        ("return m:f { long d = elapsed; d *= 2; @ = hist(d); }", TableKind.HIST, Unit.NONE),
        ("return m:f { @ = count(); }", TableKind.COUNT, Unit.NONE),
    ],
)
def test_a_table_of_durations_has_their_unit(text: str, kind: TableKind, unit: Unit) -> None:
    assert table_of(text) == (kind, unit)
