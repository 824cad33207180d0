"""Programs that the tests of ``dprobes.target`` compile, and what binutils says about files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

MAIN = """
#include <stdio.h>
static int helper(int x) { return x + 1; }
int global_value = 3;
int zeroed[100];
__thread int per_thread;
int work(int x) { return helper(x) * global_value + zeroed[0] + per_thread; }
int main(void) { printf("%d\\n", work(2)); return 0; }
"""
OTHER = """
static int helper(int x) { return x - 1; }
int other(int x) { return helper(x) * 2; }
"""
CHOSEN = """
static int fast(void) { return 1; }
static int chosen_fast(void) { return fast(); }
static void *choose(void) { return chosen_fast; }
int chosen(void) __attribute__((ifunc("choose")));
int use(void) { return chosen(); }
"""
VERSIONED = """
int old_work(void) { return 1; }
int new_work(void) { return 2; }
__asm__(".symver old_work, work@V1");
__asm__(".symver new_work, work@@V2");
"""


class Toolbox:
    """Run the compiler and binutils in one directory; skip the test where a tool is missing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, *command: str | Path) -> str:
        if shutil.which(str(command[0])) is None:
            pytest.skip(f"{command[0]} is not installed")
        done = subprocess.run(
            [str(c) for c in command], cwd=self.directory, capture_output=True, text=True, errors="replace", check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def build(self, name: str, sources: dict[str, str], *flags: str) -> Path:
        for file, text in sources.items():
            (self.directory / file).write_text(text)
        self.run("gcc", "-O1", "-fno-inline", *sources, "-o", name, *flags)
        return self.directory / name


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Toolbox:
    return Toolbox(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def pie(tools: Toolbox) -> Path:
    return tools.build("pie", {"main.c": MAIN}, "-pie", "-fPIE", "-Wl,--build-id")


@pytest.fixture(scope="session")
def fixed(tools: Toolbox) -> Path:
    return tools.build("fixed", {"main.c": MAIN}, "-no-pie", "-fno-pie", "-Wl,-Map=fixed.map", "-ffunction-sections")


@pytest.fixture(scope="session")
def static(tools: Toolbox) -> Path:
    return tools.build("static", {"main.c": MAIN}, "-static")


@pytest.fixture(scope="session")
def stripped(tools: Toolbox, pie: Path) -> Path:
    path = tools.directory / "stripped"
    tools.run("strip", "-o", path, pie)
    return path


@pytest.fixture(scope="session")
def debug_file(tools: Toolbox, pie: Path) -> Path:
    path = tools.directory / "pie.debug"
    tools.run("objcopy", "--only-keep-debug", pie, path)
    return path


@pytest.fixture(scope="session")
def twice(tools: Toolbox) -> Path:
    return tools.build("twice", {"main.c": MAIN, "other.c": OTHER})


@pytest.fixture(scope="session")
def versioned(tools: Toolbox) -> Path:
    (tools.directory / "v.map").write_text("V1 { global: work; local: *; };\nV2 { global: work; } V1;\n")
    flags = ("-shared", "-fPIC", "-Wl,--version-script=v.map", "-Wl,-soname,libversioned.so.1")
    return tools.build("libversioned.so", {"versioned.c": VERSIONED}, *flags)


@pytest.fixture(scope="session")
def chosen(tools: Toolbox) -> Path:
    return tools.build("libchosen.so", {"chosen.c": CHOSEN}, "-shared", "-fPIC")


@pytest.fixture(scope="session")
def i386(tools: Toolbox) -> Path:
    """A 32-bit program without libraries, which needs no 32-bit C library to build."""
    (tools.directory / "small.c").write_text(
        "static int add(int a) { return a + 1; }\nint _start(int a) { return add(a); }\n"
    )
    tools.run("gcc", "-m32", "-O1", "-fno-inline", "-fno-pic", "-c", "small.c", "-o", "small32.o")
    tools.run("ld", "-m", "elf_i386", "--eh-frame-hdr", "--build-id", "small32.o", "-o", "small32")
    return tools.directory / "small32"


@pytest.fixture(scope="session")
def libc() -> Path:
    for path in (Path("/lib/x86_64-linux-gnu/libc.so.6"), Path("/lib64/libc.so.6"), Path("/usr/lib/libc.so.6")):
        if path.exists():
            return path
    pytest.skip("no libc.so.6 at a known place")


@pytest.fixture(scope="session")
def system_files(libc: Path) -> list[Path]:
    """Real files of the distribution: the C library, a large program, the dynamic loader."""
    candidates = [libc, Path("/usr/bin/python3"), Path("/lib64/ld-linux-x86-64.so.2"), Path("/bin/ls")]
    return [path for path in candidates if path.exists()]


@pytest.fixture
def error_of() -> Callable[[Callable[[], object]], tuple[str, str | None]]:
    """Return message and hint of the TargetError that a call raises."""
    from dprobes.errors import TargetError

    def error(call: Callable[[], object]) -> tuple[str, str | None]:
        with pytest.raises(TargetError) as raised:
            call()
        return raised.value.message, raised.value.hint

    return error
