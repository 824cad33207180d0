"""What a comma before ``## __VA_ARGS__`` becomes."""

from __future__ import annotations

import pytest

from .support import output


@pytest.mark.parametrize(
    ("use", "expected"),
    [("P(a)", "q(a)"), ("P(a, b, c)", "q(a, b, c)"), ("P(a,)", "q(a,)"), ("C()", "x"), ("C(1, 2)", "x1, 2")],
)
def test_a_comma_goes_with_the_arguments_that_are_missing(use: str, expected: str) -> None:
    macros = "#define P(f, ...) q(f, ## __VA_ARGS__)\n#define C(...) x ## __VA_ARGS__\n"
    assert "".join(output(f"{macros}{use}\n").split()) == expected.replace(" ", "")
