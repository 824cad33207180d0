"""Files that provide a function are those in which nm finds it defined."""

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.target.probed_module import providers_of

if TYPE_CHECKING:
    from unit.target.conftest import Toolbox

LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")


def test_files_that_only_use_a_function_or_keep_it_for_themselves_do_not_count(tools: Toolbox, tmp_path: Path) -> None:
    own = tools.build("own", {"own.c": "int putenv(char *text) { return *text; } int main(void) { return 0; }"})
    user = tools.build("user", {"user.c": 'int putenv(char *); int main(void) { return putenv("A=B"); }'})
    private = "static int putenv(char *text) { return *text; } int main(void) { return putenv(__FILE__); }"
    keeper = tools.build("keeper", {"keeper.c": private}, "-O0")
    (tmp_path / "text").write_text("putenv")
    files = [tmp_path / "text", tmp_path / "missing", keeper, user, own, LIBC, own]
    expected = {"putenv": [own, LIBC], "main": [keeper, user, own], "getenv": [LIBC]}
    assert expected == providers_of(["putenv", "no_such_function", "getenv", "main"], files)
    assert {} == providers_of(["no_such_function"], files)
