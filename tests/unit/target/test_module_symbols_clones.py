"""The names that compilers give to clones and parts of functions, and what is said where there is nothing else."""

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.target.module_symbols import clones_among, is_clone, only_clones
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.target.conftest import Toolbox

    ErrorOf = Callable[[Callable[[], object]], tuple[str, str | None]]

SOURCE = """
#include <stdlib.h>
__attribute__((noinline)) static int work(int n, int k)
{
    for (int i = 0; i < n; i++) {
        __asm__ volatile("" : "+r"(k));
        k += i;
    }
    return k;
}
int main(int argc, char **argv) { (void)argv; return work(argc, 3) + work(argc + 1, 3); }
"""
MOVED = "arguments that it does not need may be left out, and the others moved up"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("work.constprop.0", True),
        ("work.part.0.isra.1", True),
        ("work.cold", True),
        ("work.llvm.1234567", True),
        ("_ZN4shop4workEii.isra.0", True),
        ("work", False),
        ("counter.0", False),
        ("main.work", False),
        ("runtime.part.parse", False),
    ],
)
def test_clones_are_known_by_their_names(name: str, expected: bool) -> None:
    assert expected == is_clone(name)


def test_what_is_called_comes_before_what_is_jumped_to() -> None:
    names = ["work.cold", "worker.isra.0", "work.part.0", "work.constprop.1", "work"]
    assert ["work.constprop.1", "work.part.0", "work.cold"] == clones_among(names, "work")


def test_one_clone_and_several_have_their_hints() -> None:
    error = only_clones("'libx.so'", "work", [f"work.constprop.{n}" for n in range(5)])
    assert error.message == (
        "'libx.so' has no symbol 'work', but variants that the compiler made: 'work.constprop.0', 'work.constprop.1', "
        "'work.constprop.2', 'work.constprop.3' and 1 more"
    )
    assert f"write 'work.constprop.0', or the pattern 'work.*' for all of them; {MOVED}" == error.hint
    cold = only_clones("'libx.so'", "work", ["work.cold"])
    assert cold.message == "'libx.so' has no symbol 'work', but parts that the compiler split off: 'work.cold'"
    assert cold.hint == ("the function itself was inlined, or has no symbol; such code is jumped to in rare cases")


def test_a_function_of_which_gcc_left_a_clone_is_found_in_it(tools: Toolbox, error_of: ErrorOf) -> None:
    program = tools.build("clones", {"clones.c": SOURCE}, "-O2")
    module = Module.load(program)
    assert (
        f"'{program}' has no symbol 'work', but variants that the compiler made: 'work.constprop.0'",
        f"write 'work.constprop.0'; {MOVED}",
    ) == error_of(lambda: module.address_of("work"))
    assert module.address_of("work.constprop.0") > 0
