"""The functions that calls reach, in code that gcc makes, against the calls in its source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.code.call_graph import CallGraph, Reached
from dprobes.target.code.function_exits import CallFrames
from dprobes.target.matching_functions import matching_functions
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

    from unit.target.conftest import Toolbox

SOURCE = """
#include <stdlib.h>
#define OPAQUE __attribute__((noipa, used))
extern int missing(int) __attribute__((weak));
OPAQUE static int hidden(int n) { return n * 3; }
OPAQUE int exported(int n) { return hidden(n) + 1; }
OPAQUE int tail(int n) { return exported(n * 2); }
OPAQUE int recursive(int n) { return n < 2 ? 1 : n * recursive(n - 1); }
OPAQUE int unrelated(int n) { return tail(n) + recursive(n); }
static int (*volatile chosen)(int) = unrelated;
OPAQUE int indirect(int n) { return chosen(n) + chosen(n + 1); }
OPAQUE int root(int n) { return tail(n) + recursive(n) + indirect(n) + abs(rand()) + (missing ? missing(n) : 0); }
"""

VARIANTS = {
    "lazy": ("-shared", "-fPIC", "-Wl,-z,lazy"),
    "now": ("-shared", "-fPIC", "-Wl,-z,now", "-fcf-protection=full"),
    "without a PLT": ("-shared", "-fPIC", "-fno-plt"),
}


@pytest.fixture(scope="module", params=VARIANTS)
def library(tools: Toolbox, request: pytest.FixtureRequest) -> Path:
    return tools.build("graph.so", {"graph.c": SOURCE}, *VARIANTS[request.param])


def reached(path: Path, *names: str) -> Reached:
    module = Module.load(path)
    roots = [function for name in names for function in matching_functions(module, name)[0]]
    return CallGraph(module, CallFrames(module.elf)).reached_from(roots)


def test_calls_through_the_plt_reach_functions_of_the_file_itself(library: Path) -> None:
    found = reached(library, "root")
    assert {function.name for function in found.functions} == {
        "root", "tail", "exported", "hidden", "recursive", "indirect",
    }  # fmt: skip
    assert [function.address for function in found.functions] == sorted(f.address for f in found.functions)


def test_indirect_calls_and_functions_of_other_files_are_counted(library: Path) -> None:
    found = reached(library, "root")
    assert (found.indirect, found.indirect_callers) == (2, 1)
    assert {name for name in found.elsewhere if not name.startswith("__")} == {"rand", "missing"}
    assert reached(library, "tail") == reached(library, "tail")._replace(
        indirect=0, indirect_callers=0, elsewhere=frozenset()
    )


def test_several_roots_reach_what_each_of_them_reaches(library: Path) -> None:
    both = reached(library, "exported", "recursive")
    assert {function.name for function in both.functions} == {"exported", "hidden", "recursive"}


def test_functions_without_symbols_have_names_by_their_place(library: Path, tools: Toolbox, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped.so"
    tools.run("strip", "-o", stripped, library)
    (hidden,) = (function for function in reached(library, "root").functions if function.name == "hidden")
    names = {function.name for function in reached(stripped, "root").functions}
    assert names == {"root", "tail", "exported", f"stripped.so+{hidden.offset:#x}", "recursive", "indirect"}


def test_a_file_for_another_processor_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module.load(library)
    monkeypatch.setattr(module.elf, "machine", "aarch64")
    with pytest.raises(TargetError) as caught:
        CallGraph(module, CallFrames(module.elf))
    assert caught.value.message == "--callees needs code for x86_64; 'graph.so' is for aarch64"
