"""What tests of the kernel's interfaces share."""

from __future__ import annotations

import contextlib
import gc
import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Alu, Helper, Register, Size
from dprobes.bpf.map_layouts import ENTRY_HEAD, SCOPE_VALUE, STATUS_SIZE, Entry, MapName, Status
from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, HashMap, RingBuffer
from dprobes.platform.linux.bpf_calls import (
    AttachType,
    MapType,
    Program,
    ProgramType,
    UprobeMulti,
    create_map,
    link_uprobes,
    load_program,
)
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def require_bpf() -> None:
    """Skip the test where this process may not use bpf(2)."""
    try:
        os.close(create_map(MapType.ARRAY, 4, 8, 1))
    except OSError as error:
        pytest.skip(f"bpf(2) is not to be used here: {error}")


_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in include/linux/proc_ns.h


def require_initial_namespace() -> None:
    """Skip the test where the process ids that programs see are not those that this process sees."""
    if str(Path("/proc/self/ns/pid").readlink()) != _INITIAL_PID_NAMESPACE:
        pytest.skip("this process is not in the initial PID namespace")


_POLL = "7"
"""The number of the system call on x86-64."""


def has_begun(pid: int) -> bool:
    """Return whether a run has begun: only then its first thread sleeps in poll(2)."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0] == _POLL
    except (FileNotFoundError, ProcessLookupError):
        return True


def link_count(pid: int) -> int:
    """Return how many BPF links a process holds."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(entry.readlink()) == "anon_inode:bpf_link"
    return count


def descriptors() -> set[str]:
    """Return what the open descriptors of this process are, less those of objects that nobody holds any more."""
    gc.collect()
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:
            continue
    return found


def insn(opcode: int, dst: int = 0, src: int = 0, offset: int = 0, value: int = 0) -> bytes:
    """Encode one instruction (``struct bpf_insn``)."""
    return struct.pack("<BBhi", opcode, dst | src << 4, offset, value)


def load_map(dst: int, fd: int) -> bytes:
    """Load the address of a map (BPF_PSEUDO_MAP_FD)."""
    return insn(0x18, dst, 1, value=fd) + insn(0)


def load_value(dst: int, fd: int, offset: int = 0) -> bytes:
    """Load the address of a place in an array's only element (BPF_PSEUDO_MAP_VALUE)."""
    return insn(0x18, dst, 2, value=fd) + insn(0, value=offset)


STATUS_MAPS = (MapName.STATUS, MapName.RING, MapName.SCOPE)


@dataclass
class Memory:
    """The maps that a test's programs use, and what it reads from them."""

    status: ArrayMap
    ring: RingBuffer
    scope: HashMap

    @property
    def maps(self) -> dict[MapName, int]:
        return dict(zip(STATUS_MAPS, (self.status.fd, self.ring.fd, self.scope.fd), strict=True))

    def word(self, word: Status) -> int:
        number: int = self.status.words[word // 8]
        return number

    def entries(self) -> list[tuple[Entry, int, bytes]]:
        """Return the kind, the thread id and the body of each entry."""
        found = []
        for data in self.ring.drain():
            head, tid = ENTRY_HEAD.unpack_from(data)
            found.append((Entry(head >> 24), tid, data[ENTRY_HEAD.size :]))
        return found


@contextlib.contextmanager
def memory(scope_size: int = 1024) -> Iterator[Memory]:
    with (
        ArrayMap(STATUS_SIZE) as status,
        RingBuffer(1 << 16) as ring,
        HashMap(4, SCOPE_VALUE.size, scope_size) as scope,
    ):
        yield Memory(status, ring, scope)


def hit_program(cookie: int | None = None) -> Assembled:
    """Return a program that emits a RECORD: u64 cookie (that of the link, or a fixed one), u64 ip of the context."""
    asm = Assembler()
    asm.mov(Register.R6, Register.R1)
    if cookie is None:
        asm.call(Helper.GET_ATTACH_COOKIE)
    else:
        asm.mov(Register.R0, cookie)
    asm.store(Register.R10, -16, Register.R0)
    asm.load(Register.R2, Register.R6, REGISTERS_IP)
    asm.store(Register.R10, -8, Register.R2)
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.store(Register.R10, -24, Entry.RECORD << 24, Size.W)
    asm.store(Register.R10, -20, Register.R0, Size.W)
    asm.load_map(Register.R1, MapName.RING)
    asm.mov(Register.R2, Register.R10)
    asm.alu(Alu.ADD, Register.R2, -24)
    asm.mov(Register.R3, 24)
    asm.mov(Register.R4, 1)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.mov(Register.R0, 0)
    asm.exit()
    return asm.assemble()


REGISTERS_IP = 128  # in struct pt_regs


@contextlib.contextmanager
def uprobes(path: object, offsets: Sequence[int], flags: UprobeMulti = UprobeMulti.NONE) -> Iterator[None]:
    """Have uprobes that do nothing at some offsets of a file."""
    require_bpf()
    code = insn(0xB7) + insn(0x95)
    fd = load_program(Program(ProgramType.KPROBE, code, AttachType.TRACE_UPROBE_MULTI, name="nothing"))
    try:
        link = link_uprobes(fd, str(path), offsets, range(len(offsets)), flags)
    except OSError as error:
        pytest.skip(f"the kernel has no uprobe_multi links: {error}")
    finally:
        os.close(fd)
    try:
        yield
    finally:
        os.close(link)


@contextlib.contextmanager
def waiting(*command: object, skip: str = "") -> Iterator[subprocess.Popen[str]]:
    """
    Have a program that says that it is ready, and waits for the end of its input.

    Where it says something else, the test is skipped for the reason that is given.
    """
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            assert skip, f"{words[0]} is not ready"
            pytest.skip(skip)
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(TIMEOUT)


def file_offset(program: Path, symbol: str) -> int:
    """Return where in its file a symbol of a program is, as nm(1) and readelf(1) say."""
    names = subprocess.run(["nm", str(program)], check=True, capture_output=True, text=True).stdout
    address = next(int(line.split()[0], 16) for line in names.splitlines() if line.split()[-1] == symbol)
    segments = subprocess.run(["readelf", "-lW", str(program)], check=True, capture_output=True, text=True).stdout
    for line in segments.splitlines():
        match line.split():
            case ["LOAD", offset, start, _, size, *_] if int(start, 16) <= address < int(start, 16) + int(size, 16):
                return address - int(start, 16) + int(offset, 16)
    raise AssertionError(f"{symbol} is in no segment of {program}")
