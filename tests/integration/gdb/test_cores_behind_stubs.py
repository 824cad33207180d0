"""``exit 3`` behind stubs: GDB opens the core of a process on each processor, which goes on meanwhile."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING, Self

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from integration.gdb.processors import EmulatedProgram, Processor
    from integration.support import Builder, Result, Runner

    Starter = Callable[..., EmulatedProgram]

CALLS = 5
THIRD = """name = "{path}"
offset = measure
passcount = 2
minor = 1
push r, pc; push r, sp; log 2; exit 3
offset = measure
return = yes
minor = 2
exit
"""
TOTAL = "5587.50"
"""What the program prints: the sum of (n + 0.25) * n + 1000 + 'o' for five calls."""


def debugger() -> str:
    found = shutil.which("gdb-multiarch")
    if found is None:
        pytest.skip("gdb-multiarch is not installed")
    return found


def examined(path: Path, core: Path, root: str, *commands: str) -> str:
    arguments = [part for each in ("set pagination off", f"set sysroot {root}") for part in ("-iex", each)]
    arguments += [part for each in commands for part in ("-ex", each)]
    done = subprocess.run(
        [debugger(), "-nx", "-batch", *arguments, str(path), str(core)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    return done.stdout + done.stderr


COMMANDS = (
    "bt", "print n", "print weight", "print note->text", "print word", "print note->number", "print total",
    "print/x (unsigned long) $pc", "print/x (unsigned long) $sp", "info sharedlibrary", "thread apply all bt",
)  # fmt: skip


def check(path: Path, result: Result, root: str, directory: Path, words: Sequence[list[int]]) -> str:
    """Compare what GDB says of the core with what the handler logged and the program's source says."""
    assert result.status == 0, result.stderr
    assert (result.counts[1].hits, result.counts[1].passed) == (3, 2)
    assert result.counts[2].hits == CALLS
    (core,) = directory.glob("core.dprobes.*")
    said = re.search(r"note: the core of process (\d+) \((\w+)\) is in '(\S+)' \((\d+) bytes\)", result.stderr)
    assert said is not None, result.stderr
    assert said[3] == str(core)
    assert int(said[4]) == core.stat().st_size
    assert core.name == f"core.dprobes.{said[1]}"
    shown = examined(path, core, root, *COMMANDS)
    assert re.search(r"^#0  measure \(", shown, re.MULTILINE), shown
    assert re.search(r"^#1  .* in main \(", shown, re.MULTILINE), shown
    assert "$1 = 2\n" in shown, shown
    assert "$2 = 2.25\n" in shown, shown
    assert '$3 = "in the heap' in shown
    assert re.search(r'\$4 = 0x\w+ "on the stack"', shown)
    assert "$5 = 1000\n" in shown
    assert "$6 = 2223.25\n" in shown  # of two calls
    ((sp, pc),) = words
    assert f"$7 = {pc:#x}\n" in shown
    assert f"$8 = {sp:#x}\n" in shown
    assert len(re.findall(r"^Thread \d+ \(", shown, re.MULTILINE)) == 2
    return shown


@pytest.mark.parametrize("flags", [("-static",), ()], ids=["static", "dynamic"])
def test_the_core_of_a_program_of_each_processor(
    build: Builder, run: Runner, processor: Processor, start: Starter, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    path = processor.build(build, "cored.c", *flags)
    program = start(path, str(CALLS))
    directory = tmp_path / "cores"
    directory.mkdir()
    options = ["--engine", f"gdb={program.endpoint}", "--core-dir", str(directory)]
    result = run(THIRD.format(path=path), [], options)
    assert program.output() == f"{TOTAL}\n"
    words = result.words(1, processor.word_size, processor.order)
    shown = check(path, result, processor.root, directory, words)
    if processor.name != "riscv64":  # whose C library does not say how its functions are left
        assert re.search(r"in waiter \(number=", shown), shown
    assert bool(flags) == ("No shared libraries" in shown)
    assert bool(flags) != (f"{processor.root}/lib" in shown)


class Gdbserver:
    """A program that gdbserver holds at its beginning; it is gone at the end."""

    def __init__(self, path: Path, directory: Path) -> None:
        if shutil.which("gdbserver") is None:
            pytest.skip("gdbserver is not installed")
        with socket.create_server(("localhost", 0)) as server:
            self.endpoint = f"localhost:{server.getsockname()[1]}"
        self._log = directory / "gdbserver.log"
        with self._log.open("wb") as log:
            command = ["gdbserver", "--once", self.endpoint, str(path), str(CALLS)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT)

    def output(self) -> str:
        self.process.wait(TIMEOUT)
        return self._log.read_text()


def test_the_core_that_gdbserver_tells_is_as_the_kernel_would_write_it(
    build: Builder, run: Runner, tmp_path: Path
) -> None:
    path = build("cored.c")
    with Gdbserver(path, tmp_path) as server:
        directory = tmp_path / "cores"
        directory.mkdir()
        options = ["--engine", f"gdb={server.endpoint}", "--core-dir", str(directory)]
        result = run(THIRD.format(path=path), [], options)
        assert f"{TOTAL}\n" in server.output()
    assert "waiter (number=41)" in check(path, result, "/", directory, result.words(1))
    (core,) = directory.iterdir()
    # Mappings and their sizes are /proc's: the vDSO is in it, the heap and both stacks, and holes where nothing was.
    shown = examined(path, core, "/", "info proc mappings", "info auxv")
    assert re.search(rf"0x\w+ +0x\w+ +0x\w+ +0x\w+ {re.escape(str(path))}$", shown, re.MULTILINE)
    assert re.search(r"AT_ENTRY .*Entry point", shown)
    headers = subprocess.run(["readelf", "-lW", core], check=True, capture_output=True, text=True).stdout
    sizes = [int(row[5], 16) for row in map(str.split, headers.splitlines()) if row[:1] == ["LOAD"]]
    assert sum(sizes) > 8 << 20  # the stack of the other thread
    assert core.stat().st_blocks * 512 < core.stat().st_size / 3


def test_a_directory_where_nothing_can_be_written(build: Builder, run: Runner, tmp_path: Path) -> None:
    path = build("cored.c")
    with Gdbserver(path, tmp_path) as server:
        options = ["--engine", f"gdb={server.endpoint}", "--core-dir", "/proc"]
        result = run(THIRD.format(path=path), [], options)
        assert f"{TOTAL}\n" in server.output()
    assert re.search(
        r"warning: no core of process \d+ \(cored\) in '/proc/core\.dprobes\.\d+': .*; the process continues",
        result.stderr,
    )
    assert result.counts[2].hits == CALLS


def test_of_two_handlers_the_first_one_decides(build: Builder, run: Runner, tmp_path: Path) -> None:
    path = build("cored.c")
    with Gdbserver(path, tmp_path) as server:
        watch = "address = total:total + 7\nwatchpoint = {}\nexit {}\n"
        text = f'name = "{path}"\n' + watch.format("w", 3) + watch.format("rw", 1)
        options = ["--engine", f"gdb={server.endpoint}", "--core-dir", str(tmp_path), "--allow-write"]
        result = run(text, [], options)
        assert f"{TOTAL}\n" in server.output()
    assert "'exit 1' was not carried out in process" in result.stderr
    assert "another handler ended with 'exit 3' at the same moment" in result.stderr
    assert len(list(tmp_path.glob("core.dprobes.*"))) == 1
