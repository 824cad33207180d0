"""Files that other users execute under the probed name keep nobody from records, answers and the end of a run."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from dprobes.engines.ebpf.attach.file_spec import module_files
from dprobes.engines.foreign_users import FILES_MAX, ForeignUsers
from integration.ebpf.kernel import require_bpf
from integration.support import TIMEOUT, await_true
from support.foreign_files import DYNSYM, SYMTAB, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

Text = TypeVar("Text", str, bytes)

USER = 54321
NAME = "libforeign.so.1"
MAPPER = f"""
import ctypes, os, sys, time
os.setgid({USER}), os.setuid({USER})
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDONLY)
    assert libc.mmap(None, 4096, 5, 2, file, 4096) not in (None, 2**64 - 1)
    os.close(file)
print("mapped", flush=True)
time.sleep(1000)
"""
PATIENCE = 8.0
"""Seconds without a record that are far from both: a fifth of a second at most, and 18 s and more without limits."""


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: files are given to another user")
    require_bpf()


@pytest.fixture
def ticking(tmp_path: Path) -> Iterator[Path]:
    """Run a program that calls a function of a library of root's a thousand times a second; return the library."""
    tmp_path.chmod(0o755)
    library = tmp_path / NAME
    compile_ = ("gcc", "-O1", "-x", "c", "-")
    tick = '__attribute__((noinline)) void tick(void) { __asm__ volatile("nop"); }'
    shared = ("-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", library)
    subprocess.run([*compile_, *shared], input=tick, text=True, check=True)
    call = "#include <unistd.h>\nvoid tick(void);\nint main(void) { for (;;) { tick(); usleep(1000); } }"
    program = tmp_path / "program"
    linked = ("-o", program, "-x", "none", library, f"-Wl,-rpath,{tmp_path}")
    subprocess.run([*compile_, *linked], input=call, text=True, check=True)
    with ended(subprocess.Popen([program])):
        yield library


@contextlib.contextmanager
def ended(process: subprocess.Popen[Text]) -> Iterator[subprocess.Popen[Text]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def mapped(*paths: Path) -> Iterator[int]:
    """Let another user, to whom the files are given, map them as code."""
    for path in paths:
        os.chown(path, USER, USER)
        for directory in path.parents[:3]:  # pytest makes them for one user alone
            directory.chmod(0o755)
    command = [sys.executable, "-c", MAPPER, *map(str, paths)]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        yield process.pid


class Run:
    """A run about all processes; ``gap`` is for how many seconds at most no record has come."""

    def __init__(self, directory: Path) -> None:
        program = directory / "program.rpn"
        program.write_text(f'name = "{NAME}"\noffset = tick\nminor = 1\nexit\n')
        self._messages = directory / "messages"
        with self._messages.open("w") as messages:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dprobes", "run", program, "--engine", "ebpf", "--format", "csv"],
                stdout=subprocess.PIPE,
                stderr=messages,
            )
        self.gap = 0.0
        self.memory = 0
        self._last: float | None = None

    @property
    def messages(self) -> str:
        return self._messages.read_text()

    def read_until(self, text: str, seconds: float) -> None:
        """Take records until the run has said something, and for some seconds more."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        until = time.monotonic() + TIMEOUT
        said = False
        while time.monotonic() < until:
            now = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                if os.read(self.process.stdout.fileno(), 1 << 20):
                    self._last = now
            if self._last is not None:
                self.gap = max(self.gap, now - self._last)
            assert self.gap < PATIENCE, "no records come"
            self.memory = max(self.memory, memory_of(self.process.pid))
            if not said and text in self.messages:
                said, until = True, now + seconds
            time.sleep(0.01)
        assert said, self.messages

    def end(self) -> str:
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), True)
        while self.process.stdout.read(1 << 20):
            pass
        assert self.process.wait(TIMEOUT) == 0
        assert time.monotonic() - began < PATIENCE
        self.process.stdout.close()
        return self.messages


def memory_of(pid: int) -> int:
    """Return how many bytes of memory a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.process.kill()
    run.process.wait()


ACTIVE = "1 probepoint is active"


@pytest.mark.parametrize("kind", [SYMTAB, DYNSYM])
def test_a_file_that_claims_to_be_huge_keeps_no_record_back(ticking: Path, run: Run, tmp_path: Path, kind: int) -> None:
    run.read_until(ACTIVE, 0.5)
    (tmp_path / "foreign").mkdir()
    path = tmp_path / "foreign" / NAME
    claim(ticking, path, kind, 20 << 30)
    with mapped(path):
        run.read_until(f"{path}: '{path}' is a hole for the most part", 0.5)
        assert run.memory < 500 << 20
        messages = run.end()
    assert "0  " in messages.splitlines()[-1], messages


def test_many_files_of_a_user_are_probed_a_few_at_a_time(ticking: Path, run: Run, tmp_path: Path) -> None:
    run.read_until(ACTIVE, 0.5)
    copies = [tmp_path / "foreign" / str(number) / NAME for number in range(400)]
    for copy in copies:
        copy.parent.mkdir(parents=True)
        shutil.copy(ticking, copy)
    said = (
        f"warning: user {USER} has more files executed as '{NAME}' than are searched: {FILES_MAX} at once, and 12 a "
        "minute; the others are probed later\n"
    )
    with mapped(*copies):
        run.read_until(said, 4)
        messages = run.end()
    assert messages.count(said) == 1
    probed = messages.count("appeared after the run began")
    assert 1 <= probed <= 2 * FILES_MAX
    assert messages.count("no room") <= 1


def test_a_file_of_another_user_is_probed_as_any_other(ticking: Path, run: Run, tmp_path: Path) -> None:
    run.read_until(ACTIVE, 0.1)
    (tmp_path / "foreign").mkdir()
    library, program = tmp_path / "foreign" / NAME, tmp_path / "foreign" / "program"
    shutil.copy(ticking, library)
    shutil.copy(ticking.parent / "program", program)
    os.chown(library, USER, USER)
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    # The run path of the program comes behind the variable, unless it is a DT_RPATH.
    with ended(subprocess.Popen([program], env=environment, user=USER)) as process:
        await_true(lambda: str(library) in Path(f"/proc/{process.pid}/maps").read_text(), "the library")
        run.read_until(f"{library} appeared after the run began", 1.0)
        messages = run.end()
    row = next(line for line in messages.splitlines() if f"tick in {library} " in line)
    assert int(row.split()[4]) > 100, messages


def test_files_of_other_users_that_are_there_already_are_probed_from_the_beginning(
    ticking: Path, tmp_path: Path
) -> None:
    (tmp_path / "foreign").mkdir()
    path = tmp_path / "foreign" / NAME
    shutil.copy(ticking, path)
    with mapped(path):
        run = Run(tmp_path)
        try:
            run.read_until("probepoints are active", 0.1)
            messages = run.end()
        finally:
            run.process.kill()
            run.process.wait()
    assert "2 probepoints are active" in messages


def test_files_are_left_for_later_when_a_user_has_had_enough(ticking: Path, tmp_path: Path) -> None:
    copies = [tmp_path / str(number) / NAME for number in range(FILES_MAX + 5)]
    for copy in copies:
        copy.parent.mkdir()
        shutil.copy(ticking, copy)
    users = ForeignUsers(NAME)
    with mapped(*copies) as pid:
        found = module_files(NAME, (), [pid], users=users)
        for file in found:
            for descriptor in file.descriptors:
                os.close(descriptor)
        assert len(found) == FILES_MAX
        assert {file.owner for file in found} == {f"user {USER}"}
        assert [notice.message.partition(" has")[0] for notice in users.notices()] == [f"user {USER}"]
        assert module_files(NAME, (), [pid], users=users) == []
        assert list(users.notices()) == []


def test_processes_of_a_user_are_passed_over_who_has_had_his_time(
    monkeypatch: pytest.MonkeyPatch, ticking: Path
) -> None:
    users = ForeignUsers(NAME)
    with mapped(ticking) as first, mapped(ticking) as second:
        os.chown(ticking, 0, 0)
        seen = []
        clock = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        for pid, limit in users.bounded([first, os.getpid(), second]):
            seen.append((pid, limit is None))
            clock[0] += 5
        assert seen == [(first, False), (os.getpid(), True)]
        (notice,) = users.notices()
        assert notice.message == (
            f"what the processes of user {USER} map takes longer to look through than the 2 s that each user has: "
            f"files that they execute as '{NAME}' may not be probed"
        )


def test_a_process_that_hides_its_owner_is_found_out(ticking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one that cannot be dumped has in /proc seems to be root's."""
    hide = MAPPER.replace('print("mapped"', 'libc.prctl(4, 0, 0, 0, 0)\nprint("mapped"')
    command = [sys.executable, "-c", hide, str(ticking)]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        (first, second), clock = (process.pid, process.pid), [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        seen = []
        for pid, _ in ForeignUsers(NAME).bounded([first, second]):
            seen.append(pid)
            clock[0] += 5
        assert seen == [first]
