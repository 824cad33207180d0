from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.cache_files import cache_directory
from dprobes.target.kernel import running_kernel
from dprobes.target.kernel.running_kernel import read_list

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CORE = b"".join(b"%016x T function%d\n" % (0xFFFFFFFF81000000 + 16 * number, number) for number in range(100))
MODULES = "loop 40960 {uses} - Live 0xffffffffc0101000\n"
MODULE = b"ffffffffc0101000 t loop_open\t[loop]\n"
GENERATED = b"ffffffffc0202000 t bpf_prog_0123456789abcdef_handler\t[bpf]\n"
TRAMPOLINE = b"ffffffffc0303000 t ftrace_trampoline\t[__builtin__ftrace]\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One module is loaded; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    listed = tmp_path / "modules"
    listed.write_text(MODULES.format(uses=0))
    (tmp_path / "loop").mkdir()
    monkeypatch.setattr(running_kernel, "_PROC_MODULES", listed)
    monkeypatch.setattr(running_kernel, "_SYS_MODULE", str(tmp_path))
    return listed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "kallsyms"
    made.write_bytes(CORE + MODULE + GENERATED)
    return made


def test_a_list_is_read_once_and_lacks_generated_code(path: Path) -> None:
    path.write_bytes(CORE + TRAMPOLINE + MODULE + GENERATED)
    assert read_list(path) == CORE + MODULE
    path.write_bytes(CORE)
    assert read_list(path) == CORE + MODULE


def test_a_list_of_no_modules(path: Path) -> None:
    path.write_bytes(CORE)
    assert read_list(path) == CORE


def use(modules: Path) -> None:
    modules.write_text(MODULES.format(uses=1))


def unload(modules: Path) -> None:
    modules.write_text("")


def move(modules: Path) -> None:
    modules.write_text(MODULES.format(uses=0).replace("101000", "102000"))


def load_again(modules: Path) -> None:
    """At the same place, by another loading: its directory in sysfs is another one."""
    (modules.parent / "other").mkdir()
    (modules.parent / "loop").rmdir()
    (modules.parent / "other").rename(modules.parent / "loop")


@pytest.mark.parametrize(
    ("change", "is_kept"), [(use, True), (unload, False), (move, False), (load_again, False)]
)  # fmt: skip
def test_a_list_is_read_again_if_modules_have_changed(
    path: Path, modules: Path, change: Callable[[Path], None], *, is_kept: bool
) -> None:
    read_list(path)
    change(modules)
    path.write_bytes(CORE)
    assert (read_list(path) != CORE) == is_kept


def test_a_list_is_read_again_after_a_boot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_list(path)
    path.write_bytes(CORE)
    monkeypatch.setattr(running_kernel, "boot_id", lambda: "another one")
    assert read_list(path) == CORE


def test_addresses_that_are_hidden_since_stay_hidden(path: Path) -> None:
    read_list(path)
    hidden = b"".join(b"0" * 16 + line[16:] + b"\n" for line in CORE.splitlines())
    path.write_bytes(hidden)
    assert read_list(path) == hidden
    path.write_bytes(b"")
    assert read_list(path) == b""


def test_a_list_that_changes_while_it_is_read_is_not_kept(
    path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_unload(data: bytes) -> bytes:
        unload(modules)
        return data

    with monkeypatch.context() as patched:
        patched.setattr(running_kernel, "_without_generated", read_and_unload)
        read_list(path)
    path.write_bytes(CORE)
    assert read_list(path) == CORE


def test_lists_without_modules_in_the_kernel_or_in_sysfs(path: Path, modules: Path) -> None:
    (modules.parent / "loop").rmdir()
    assert read_list(path) == CORE + MODULE
    modules.unlink()
    path.write_bytes(CORE)
    assert read_list(path) == CORE
    path.write_bytes(CORE + MODULE)
    assert read_list(path) == CORE


def test_where_nothing_can_be_kept_all_is_read(path: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no directory")
    assert read_list(path) == CORE + MODULE
    path.write_bytes(CORE)
    assert read_list(path) == CORE


def test_a_list_that_the_kernel_does_not_give(path: Path, tmp_path: Path) -> None:
    read_list(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_list(path)


def test_a_kept_list_is_private(path: Path) -> None:
    read_list(path)
    with open(f"{cache_directory()}/kallsyms", "rb") as file:  # noqa: PTH123
        digest, _, rest = file.read().partition(b"\n")
    assert (len(digest), rest) == (64, CORE + MODULE)
