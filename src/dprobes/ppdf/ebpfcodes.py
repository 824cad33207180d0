"""The eBPF of the handlers, for people to look at: a machine compiles what it loads anew."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.ppdf.model import EbpfCode, EbpfMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.ppdf.fieldcodec import Reader, Writer

__all__ = ["read_ebpf", "write_ebpf"]

_INSN_SIZE = 8
"""The size in bytes of an instruction slot (``linux/bpf.h``, ``struct bpf_insn``)."""

_CODE_SIZE, _MAP_SIZE = 29, 9


def write_ebpf(out: Writer, codes: Sequence[EbpfCode]) -> None:
    """Write the code of all handlers."""
    out.u32(len(codes))
    for code in codes:
        out.string(code.machine)
        out.u32(code.definition)
        out.string(code.loops)
        out.string(code.problem)
        out.u32(code.scratch)
        out.u8(code.sleepable)
        out.block(code.code)
        out.data += struct.pack(f"<{len(code.origins)}i", *code.origins)
        out.u32(len(code.maps))
        for reference in code.maps:
            out.u32(reference.index)
            out.string(reference.name)
            out.u8(reference.is_value)


def read_ebpf(reader: Reader, definitions: int) -> tuple[EbpfCode, ...]:
    """Return the code of all handlers; ``definitions`` is how many definitions the program has."""
    codes = []
    for _ in range(reader.count(_CODE_SIZE, "eBPF programs")):
        machine = reader.string("a processor")
        definition = reader.below(definitions, "the number of a probe definition")
        loops, problem = reader.string("a form of loops"), reader.string("a problem")
        scratch, sleepable = reader.u32("a size"), reader.flag("whether it may sleep")
        at = reader.offset
        code = reader.block("bytes of eBPF")
        count, odd = divmod(len(code), _INSN_SIZE)
        if odd:
            reader.fail(f"expected eBPF of {_INSN_SIZE} bytes for each instruction, found {len(code)} bytes", at)
        origins = struct.unpack(f"<{count}i", reader.take(4 * count, "the origins of instructions"))
        maps = tuple(
            EbpfMap(
                reader.below(count, "the number of an instruction"),
                reader.string("a map"),
                reader.flag("whether it is an address in a map"),
            )
            for _ in range(reader.count(_MAP_SIZE, "maps"))
        )
        codes.append(EbpfCode(machine, definition, loops, code, maps, origins, scratch, sleepable, problem))
    reader.end()
    return tuple(codes)
