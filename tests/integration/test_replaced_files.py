"""Files that a process maps and no path leads to any more: deleted, replaced by an update, never on a disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TIMEOUT = 60

LIBRARY = "__attribute__((noipa)) int triple(int n) { return n * 3; }\n"
OTHER_LIBRARY = "int first, second; int before(void) { return first + second; }\n" + LIBRARY.replace("3", "4")

PROGRAM = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <unistd.h>
__attribute__((noipa)) int own(int n) { return n + 1; }
/* The library is mapped from its path, or from memory. */
int main(int count, char **words)
{
    char path[64];
    if (count > 2) {
        int memory = memfd_create("held", 0), file = open(words[1], O_RDONLY);
        sendfile(memory, file, 0, 1 << 20);
        sprintf(path, "/proc/self/fd/%d", memory);
    }
    int (*triple)(int) = dlsym(dlopen(count > 2 ? path : words[1], RTLD_NOW), "triple");
    puts("ready");
    fflush(stdout);
    for (int n = 0;; n++) { own(n); triple(n); usleep(1000); }
}
"""


@pytest.fixture(params=["ptrace", "inline", "ebpf"])
def engine(request: pytest.FixtureRequest) -> str:
    if os.geteuid() != 0:
        pytest.skip("others may not see what a process maps but by its path")
    if request.param == "ebpf":
        require_bpf()
    return str(request.param)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replaced")
    for name, text in (("held.c", LIBRARY), ("other.c", OTHER_LIBRARY), ("holds.c", PROGRAM)):
        (directory / name).write_text(text)
    for name, output in (("held.c", "libheld.so"), ("other.c", "libother.so")):
        flags = ["-O1", "-g", "-shared", "-fPIC", "-Wl,-soname,libheld.so.1"]
        subprocess.run(["gcc", *flags, name, "-o", output], cwd=directory, check=True)
    subprocess.run(["gcc", "-O1", "-g", "holds.c", "-o", "holds", "-ldl"], cwd=directory, check=True)
    return directory


@pytest.fixture
def start(compiled: Path, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """What starts the program on copies of its files, and returns its process."""
    processes = []
    for name in ("holds", "libheld.so"):
        shutil.copy(compiled / name, tmp_path / name)

    def begin(*words: str) -> int:
        command = [str(tmp_path / "holds"), str(tmp_path / "libheld.so"), *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def check(engine: str, pid: int, place: str) -> None:
    """Insert a probe into a process, which is hit; the parameter is what debug information knows."""
    text = f'[maxhits 1] {place}(n) {{ printf("%d", n); }}'
    command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "--format", "json", "-e", text]
    done = subprocess.run([*command, "-p", str(pid)], capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, done.stdout.splitlines())
    assert record["function"] == place.rpartition(":")[2]
    assert isinstance(record["fields"]["n"], int)


@pytest.mark.parametrize("place", ["own", "/proc/{pid}/exe:own"])
def test_a_program_that_was_deleted(engine: str, start: Callable[..., int], tmp_path: Path, place: str) -> None:
    pid = start()
    (tmp_path / "holds").unlink()
    check(engine, pid, place.format(pid=pid, tmp_path=tmp_path))


@pytest.mark.parametrize(
    "place",
    ["libheld.so.1:triple", '"{tmp_path}/libheld.so":triple'],
)
def test_a_library_that_an_update_has_replaced(
    engine: str, start: Callable[..., int], compiled: Path, tmp_path: Path, place: str
) -> None:
    pid = start()
    shutil.copy(compiled / "libother.so", tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "libheld.so")
    check(engine, pid, place.format(tmp_path=tmp_path))


def test_a_library_by_a_path_through_its_process(engine: str, start: Callable[..., int], tmp_path: Path) -> None:
    pid = start()
    check(engine, pid, f'"/proc/{pid}/root{tmp_path}/libheld.so":triple')


@pytest.mark.parametrize("place", ['"/memfd:held":triple', "libheld.so.1:triple"])
def test_a_library_in_memory(engine: str, start: Callable[..., int], place: str) -> None:
    check(engine, start("memory"), place)


def test_functions_of_files_without_a_path_have_names(
    engine: str, start: Callable[..., int], compiled: Path, tmp_path: Path
) -> None:
    pid = start()
    shutil.copy(compiled / "libother.so", tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "libheld.so")
    (tmp_path / "holds").unlink()
    text = "[maxhits 1] libheld.so.1:triple { @[ustack(2)] = count(); }"
    command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    assert re.fullmatch(r"@\[\n    triple \[libheld.so.1\]\n    main\+0x[0-9a-f]+ \[holds\]\n\]: 1\n", done.stdout)
