"""Programs on their way into the kernel; loading them: tests/integration/ebpf."""

from __future__ import annotations

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import WIDE_LOAD, Helper, Insn, Register, decode
from dprobes.bpf.map_layouts import MapName
from dprobes.engines.ebpf.kernel.bpf_objects import with_descriptors


def test_descriptors_come_in_the_place_of_names() -> None:
    asm = Assembler()
    asm.call(Helper.GET_ATTACH_COOKIE)
    asm.load_value(Register.R1, MapName.STATUS, 16)
    asm.load_map(Register.R2, MapName.RING)
    asm.call(Helper.KTIME_GET_NS)
    asm.exit()
    code = list(decode(with_descriptors(asm.assemble(), {MapName.STATUS: 70_000, MapName.RING: 5})))
    assert code[1:5] == [Insn(WIDE_LOAD, 1, 2, 0, 70_000), Insn(0, imm=16), Insn(WIDE_LOAD, 2, 1, 0, 5), Insn(0)]
    assert len(code) == 7
