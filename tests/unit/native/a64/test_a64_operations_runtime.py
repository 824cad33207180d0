"""
Code of a handler runs in a process of AArch64, under QEMU: it counts, and writes records to a ring.

The process is generated too, as an executable without a C library. What it shares with the tool it writes out.
"""

from __future__ import annotations

import errno
import shutil
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Register, Size
from dprobes.bpf.map_layouts import MapName
from dprobes.native.a64.a64_assembler import A64Assembler, Condition, Gpr, Operation
from dprobes.native.a64.a64_operations import A64Operations
from dprobes.native.generated_code import MapPlace, MapShape, Part, ProcessFacts, Surroundings
from dprobes.native.handler_trampoline import make_trampoline
from dprobes.native.process_page import CLOCK_READING, CLOCK_READINGS, PROCESS_PID
from dprobes.native.routines.handler_ring import DATA, ENTRY_HEADER, PRODUCER, RingShape
from dprobes.native.runtime_routines import fault_entry, make_runtime

if TYPE_CHECKING:
    from pathlib import Path

R = Register
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
needs_qemu = pytest.mark.skipif(QEMU is None, reason="qemu-aarch64 is not installed (Debian: qemu-user)")

CODE, DATA_AT = 0x40_0000, 0x80_0000
HEADERS = 64 + 2 * 56
PAGE_OF_PROCESS, CLOCK_PAGE, VALUES, RINGS = DATA_AT, DATA_AT + 64, DATA_AT + 128, DATA_AT + 4096
RING = RingShape(1, 1 << 16)
SIZE = 4096 + RING.stride
HITS = 500
PROCESS = 4711
WRITE, EXIT, SIGACTION = 64, 93, 134
"""Numbers of system calls (include/uapi/asm-generic/unistd.h)."""
SIGSEGV, SA_SIGINFO, MASK_SIZE = 11, 4, 8
ACTION = VALUES + 256
RECORD = struct.Struct("<4Q12s4x")
TEXT = b"hello world"


def handler() -> Assembled:
    """Return a handler that counts, and logs two registers, ids, the time, a string, and a word that is not there."""
    asm = Assembler()
    asm.mov(R.R6, R.R1)
    asm.load_value(R.R1, MapName.SCRATCH)
    asm.mov(R.R2, 1)
    asm.atomic(Atomic.ADD, R.R1, 0, R.R2)
    asm.load(R.R2, R.R6, 8 * 20)
    asm.store(R.R10, -48, R.R2)
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.store(R.R10, -40, R.R0)
    asm.call(Helper.KTIME_GET_NS)
    asm.store(R.R10, -32, R.R0)
    asm.mov(R.R1, R.R10)
    asm.alu(Alu.ADD, R.R1, -24)
    asm.mov(R.R2, 8)
    asm.mov(R.R3, 0x10)
    asm.call(Helper.PROBE_READ_USER)
    asm.store(R.R10, -24, R.R0)
    asm.store(R.R10, -16, 0, Size.DW)
    asm.store(R.R10, -8, 0, Size.DW)
    asm.mov(R.R1, R.R10)
    asm.alu(Alu.ADD, R.R1, -16)
    asm.mov(R.R2, 12)
    asm.load(R.R3, R.R6, 8 * 21)
    asm.call(Helper.PROBE_READ_USER_STR)
    asm.load_map(R.R1, MapName.RING)
    asm.mov(R.R2, R.R10)
    asm.alu(Alu.ADD, R.R2, -48)
    asm.mov(R.R3, RECORD.size)
    asm.mov(R.R4, 0)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.mov(R.R0, 0)
    asm.exit()
    return asm.assemble()


def program() -> bytes:
    """Return an executable that comes to a probed instruction ``HITS`` times, and writes the shared memory out."""
    start = CODE + HEADERS
    runtime = make_runtime(A64Operations(start), ProcessFacts(PAGE_OF_PROCESS, CLOCK_PAGE), RING, {})
    maps = {MapName.SCRATCH: MapPlace(VALUES, MapShape.VALUES, 64), MapName.RING: MapPlace(RINGS, MapShape.RINGS)}
    around = Surroundings(maps, runtime.routines, runtime.map_routines, rings=RING)
    trampoline = make_trampoline(A64Operations(runtime.code.end), 0, [Part(handler(), around)], lambda asm: asm.ret())
    on_fault = fault_entry(A64Operations(trampoline.end), runtime.code.fixups, 0)
    asm = A64Assembler(trampoline.end + len(on_fault))
    system_call(asm, SIGACTION, SIGSEGV, ACTION, 0, MASK_SIZE)
    again, wrong = asm.label(), asm.label()
    asm.mov_number(Gpr.X20, 0)
    asm.mov_number(Gpr.X21, VALUES + 64)
    asm.place(again)
    asm.compare(Gpr.X20, Gpr.X20)  # flags that the trampoline has to keep
    asm.call_at(trampoline.address)
    asm.jump_if(Condition.NE, wrong)
    asm.calculate(Operation.ADD, Gpr.X20, Gpr.X20, 1)
    asm.compare(Gpr.X20, HITS)
    asm.jump_if(Condition.NE, again)
    system_call(asm, WRITE, 1, DATA_AT, SIZE)
    system_call(asm, EXIT, 0)
    asm.place(wrong)
    system_call(asm, EXIT, 1)
    code = runtime.code.code + trampoline.code + on_fault + asm.assemble()
    data = bytearray(SIZE)
    CLOCK_READING.pack_into(data, CLOCK_PAGE - DATA_AT + CLOCK_READINGS, 0, 0, 1 << 32)
    struct.pack_into("<I", data, PAGE_OF_PROCESS - DATA_AT + PROCESS_PID, PROCESS)
    data[VALUES + 64 - DATA_AT : VALUES + 64 - DATA_AT + len(TEXT)] = TEXT
    struct.pack_into("<4Q", data, ACTION - DATA_AT, trampoline.end, SA_SIGINFO, 0, 0)
    return elf(asm.address, code, bytes(data))


def system_call(asm: A64Assembler, number: int, *arguments: int) -> None:
    for register, value in zip((Gpr.X0, Gpr.X1, Gpr.X2, Gpr.X3), arguments, strict=False):
        asm.mov_number(register, value)
    asm.mov_number(Gpr.X8, number)
    asm.system_call()


def elf(entry: int, code: bytes, data: bytes) -> bytes:
    """Return a static executable for AArch64 (ELF-64, gABI chapters 4 and 5)."""
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 183, 1, entry, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    offset = -(-(HEADERS + len(code)) // 0x1000) * 0x1000
    size = HEADERS + len(code)
    first = struct.pack("<IIQQQQQQ", 1, 5, 0, CODE, CODE, size, size, 0x1000)
    second = struct.pack("<IIQQQQQQ", 1, 6, offset, DATA_AT, DATA_AT, len(data), len(data), 0x1000)
    return (header + first + second + code).ljust(offset, b"\0") + data


@needs_qemu
def test_a_process_is_probed(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(program())
    path.chmod(0o755)
    assert QEMU is not None
    done = subprocess.run([QEMU, path], capture_output=True, timeout=60, check=False)
    assert (done.returncode, len(done.stdout)) == (0, SIZE), done.stderr
    memory = done.stdout
    pids = set()
    (count,) = struct.unpack_from("<Q", memory, VALUES - DATA_AT)
    assert count == HITS
    ring = RINGS - DATA_AT
    entry = ENTRY_HEADER + RECORD.size
    assert struct.unpack_from("<Q", memory, ring + PRODUCER) == (HITS * entry,)
    last = 0
    for number in range(HITS):
        at = ring + DATA + number * entry
        assert struct.unpack_from("<Q", memory, at) == (RECORD.size,)
        counter, ids, now, result, text = RECORD.unpack_from(memory, at + ENTRY_HEADER)
        assert (counter, text) == (number, TEXT + b"\0")
        assert result == (1 << 64) - errno.EFAULT
        assert now >= last
        last = now
        pids.add(ids)
    (ids,) = pids
    assert ids == PROCESS << 32
