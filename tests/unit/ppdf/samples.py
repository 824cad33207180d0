"""Compiled programs that hold something of everything, without a module or compiler."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.ppdf.ppdf_file import encode
from dprobes.ppdf.ppdf_model import Ppdf
from dprobes.ppdf.ppdf_sections import MINOR, pack, unpack
from dprobes.resolve.carried_ebpf import ebpf_codes
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.carried_symbols import CarriedBuild, CarriedPlace
from dprobes.target.kernel.kernel_symbols import CarriedKernel, KernelArea, KernelPlace, KernelSymbol
from dprobes.target.module_symbols import Symbol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["repacked", "sample", "sections_of", "small_sample"]

TEXT = """
#define NUMBER 5 + PART
#define PART 2
name = "libwork.so"
vars = 2
groupdef = one two
typedef = enter leave
logmax = 256
offset = work
group = one
type = enter leave
minor = 1
passcount = 3
    push NUMBER
    push -1
    push table + 8
    push r, eax
    push u, 3
    call twice
again:
here: inc lv, 1
    jz again
    jmp here
    sx caught
    log 2
    exit
caught: pop mem, u8
    exit 1
offset = "w*"
return = yes
    exit
address = table : table + 3
watchpoint = rw
    exit
sampler = 99hz
    callk sample
    exit
proc twice
    dup 2
    ret
endproc
"""

BUILDS = (
    CarriedBuild(
        "0123456789abcdef",
        "/lib/libwork.so",
        "x86_64",
        (Symbol("work", 0x1000, 12, "func", "global"), Symbol("table", 0x4000, 16, "object", "local", False)),
        (CarriedPlace(0, 0x1000, b"\x55", "work"), CarriedPlace(1, 0x1008, b"\xc3", "work", is_exit=True)),
    ),
    CarriedBuild("code-42", "old/libwork.so", "i386"),
)

KERNELS = (
    CarriedKernel(
        "fedcba98",
        "boot/vmlinux-6.1",
        "",
        (KernelArea("_text", 0xFFFFFFFF81000000, 0x2000000),),
        (KernelSymbol("_text", 0xFFFFFFFF81000000, "T"), KernelSymbol("per_cpu_count", 0x1F000, "A")),
        (KernelPlace(0, 0xFFFFFFFF81000100, b"\x55", "vfs_read"), KernelPlace(2, 0xFFFFFFFF81000200, b"", "f+1")),
    ),
    CarriedKernel("76543210", "dummy.ko", "dummy", (KernelArea(".text", 64, 32), KernelArea(".bss", 4096, 8))),
)


def sample() -> Ppdf:
    """Return a compiled program with builds, templates and eBPF."""
    small = small_sample()
    return Ppdf(
        small.program,
        small.machines,
        BUILDS,
        needs_write=True,
        templates={"0.tpl": b"fmt = %d\n", "empty": b""},
        ebpf=ebpf_codes(small.program, small.machines),
        tool="dprobes test",
        kernels=KERNELS,
    )


def small_sample() -> Ppdf:
    """Return the same without eBPF and templates."""
    program = parse_source(SourceFile("sample.rpn", TEXT), Diagnostics())
    return Ppdf(program, ("x86_64", "i386"), BUILDS, needs_write=True, tool="dprobes test", kernels=KERNELS)


def sections_of(data: bytes) -> dict[str, bytes]:
    """Return the sections of a file."""
    return {name: bytes(section.data) for name, section in unpack(data)[1].items()}


def repacked(sections: Mapping[str, bytes], minor: int = MINOR) -> bytes:
    """Return a file with right checksums, whatever is in its sections."""
    return pack(dict(sections), minor)


def with_header(data: bytes, offset: int, value: bytes) -> bytes:
    """Return a file with other bytes in its header or table, and the right checksum of these."""
    changed = bytearray(data)
    changed[offset : offset + len(value)] = value
    (count,) = struct.unpack_from("<I", data, 16)
    end = 24 + 16 * count
    changed[20:24] = zlib.crc32(changed[:20] + changed[24:end]).to_bytes(4, "little")
    return bytes(changed)


SMALL = encode(small_sample())
