"""Whoever is killed while it attaches or detaches uprobes leaves no breakpoint in any process."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.engines.ebpf.kernel.bpf_links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.bpf_objects import load
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.platform.linux.bpf_calls import ProgramType
from dprobes.platform.linux.call_proxy import call_in_proxy, close_in_proxy
from integration.ebpf.kernel import require_bpf
from integration.support import await_true

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLACES = 2000
MAPPERS = 4
PUSH, BREAKPOINT = b"\x50", b"\xcc"

pytestmark = pytest.mark.usefixtures("leaves_no_descriptor")


class Mapper:
    """A process that maps the code and waits."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        self._address = _address_of(path)
        self.pid = os.fork()
        if self.pid == 0:
            signal.pause()
            os._exit(0)
        memory.close()

    def breakpoints(self) -> int:
        with Path(f"/proc/{self.pid}/mem").open("rb") as file:
            file.seek(self._address)
            return file.read(PLACES).count(BREAKPOINT)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _address_of(path: Path) -> int:
    with Path("/proc/self/maps").open(encoding="ascii") as file:
        return next(int(line.partition("-")[0], 16) for line in file if line.rstrip().endswith(str(path)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    code.write_bytes(PUSH * PLACES + b"\xc3")
    return code


@pytest.fixture
def mappers(path: Path) -> Iterator[list[Mapper]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Mapper(path))) for _ in range(MAPPERS)]


def attach_and_detach(path: Path) -> None:
    features = Features()
    asm = Assembler()
    asm.mov(Register.R0, 0)
    asm.exit()
    program = load(asm.assemble(), {}, ProgramType.KPROBE, attach_type=uprobe_attach_type(features))
    attach_uprobes(program, str(path), [(offset, offset) for offset in range(PLACES)], features).close()


def kill_when(happens: Callable[[], bool], work: Callable[[], None]) -> None:
    """Do something in a process, and kill that as soon as something happens."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    try:
        until = time.monotonic() + 10
        while not happens() and time.monotonic() < until:
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("moment", ["attaching", "detaching"])
def test_a_kill_leaves_no_breakpoint(path: Path, mappers: list[Mapper], moment: str) -> None:
    require_bpf()
    if Feature.UPROBE_MULTI not in Features():
        pytest.skip("one by one they are too few to be hit by a kill in their midst")
    first = mappers[0]

    for _ in range(5):
        seen = [0]

        def is_amidst() -> bool:
            before, seen[0] = seen[0], first.breakpoints()  # noqa: B023 - called before the next turn
            return seen[0] > 0 if moment == "attaching" else seen[0] < before  # noqa: B023 - as above

        kill_when(is_amidst, lambda: attach_and_detach(path))
        await_true(lambda: not any(mapper.breakpoints() for mapper in mappers), "the original code")


def test_what_a_proxy_makes_is_a_descriptor_of_ours() -> None:
    number = call_in_proxy(_SYS_EVENTFD, 7, os.EFD_CLOEXEC)
    assert os.read(number, 8) == (7).to_bytes(8, "little")
    os.close(number)


def test_what_the_kernel_answers_a_proxy_is_raised() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        call_in_proxy(_SYS_CLOSE, 1 << 20)


def test_what_is_closed_is_gone_and_the_rest_is_not() -> None:
    pipes = [os.pipe() for _ in range(5)]
    close_in_proxy([writer for _, writer in pipes[1:]])
    for reader, _ in pipes[1:]:
        assert os.read(reader, 1) == b""  # nobody holds the other end
    os.write(pipes[0][1], b"x")
    assert os.read(pipes[0][0], 1) == b"x"
    for descriptor in (*pipes[0], *(reader for reader, _ in pipes[1:])):
        os.close(descriptor)


def test_descriptors_are_closed_where_no_process_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OSError(1, "no")

    monkeypatch.setattr("dprobes.platform.linux.call_proxy._entry", refused)
    reader, writer = os.pipe()
    close_in_proxy([writer])
    assert os.read(reader, 1) == b""
    os.close(reader)
    number = call_in_proxy(_SYS_EVENTFD, 7, os.EFD_CLOEXEC)
    assert os.read(number, 8) == (7).to_bytes(8, "little")
    os.close(number)


_SYS_CLOSE, _SYS_EVENTFD = 3, 290
