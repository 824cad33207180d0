"""Assembled programs into the kernel: the descriptors of maps come in the place of their names."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING

from dprobes.bpf.asm.insn import INSN_SIZE, encode
from dprobes.engines.linux.bpfcalls import AttachType, Program, ProgramFlag, ProgramType, load_btf, load_program
from dprobes.target.btf import encode_functions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.layout import MapName

__all__ = ["load", "loadable", "with_descriptors"]

_IMMEDIATE = struct.Struct("=i")
_IMMEDIATE_OFFSET = 4  # in struct bpf_insn
_FUNCTION_RECORD = struct.Struct("=II")  # struct bpf_func_info


def with_descriptors(assembled: Assembled, maps: Mapping[MapName, int]) -> bytes:
    """Return the bytes of a program that uses these maps."""
    code = bytearray(encode(assembled.code))
    for reference in assembled.maps:
        _IMMEDIATE.pack_into(code, reference.index * INSN_SIZE + _IMMEDIATE_OFFSET, maps[reference.map])
    return bytes(code)


def load(
    assembled: Assembled,
    maps: Mapping[MapName, int],
    kind: ProgramType,
    *,
    attach_type: AttachType = AttachType.NONE,
    flags: ProgramFlag = ProgramFlag.NONE,
    attach_btf_id: int = 0,
    name: str = "",
) -> int:
    """Load a program and return its descriptor."""
    with loadable(assembled, maps, kind, attach_type, flags, attach_btf_id, name) as program:
        return load_program(program)


@contextlib.contextmanager
def loadable(
    assembled: Assembled,
    maps: Mapping[MapName, int],
    kind: ProgramType,
    attach_type: AttachType = AttachType.NONE,
    flags: ProgramFlag = ProgramFlag.NONE,
    attach_btf_id: int = 0,
    name: str = "",
) -> Iterator[Program]:
    """Give what the kernel is to load; one with several functions has the type information that it needs meanwhile."""
    code = with_descriptors(assembled, maps)
    if len(assembled.functions) == 1:
        yield Program(kind, code, attach_type, flags, name, attach_btf_id=attach_btf_id)
        return
    called = {index + 1 + insn.imm for index, insn in enumerate(assembled.code) if insn.is_local_call}
    blob, ids = encode_functions(
        [f"f{number}" for number in range(len(assembled.functions))],
        [number for number, start in enumerate(assembled.functions) if start in called],
    )
    functions = b"".join(_FUNCTION_RECORD.pack(*pair) for pair in zip(assembled.functions, ids, strict=True))
    btf = load_btf(blob)
    try:
        yield Program(kind, code, attach_type, flags, name, btf, functions, attach_btf_id)
    finally:
        os.close(btf)
