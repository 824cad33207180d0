from __future__ import annotations

import errno

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Jump, Register
from dprobes.bpf.layout import MapName
from dprobes.engines.ebpf.headstartplan import steps_of
from dprobes.engines.ebpf.kernel.loader import with_descriptors
from dprobes.engines.linux.bpfcalls import Command
from dprobes.engines.linux.kernelobjects import Notes, Request

OWN = 4711
R0, R1 = Register.R0, Register.R1
CODE = 8
"""The place of the address of the code in a request for a program."""


def code(ring: int, probes: int) -> bytes:
    asm = Assembler()
    end = asm.label()
    asm.load_map(R1, MapName.RING)
    asm.load_value(R1, MapName.PROBES, 16)
    asm.mov(R0, OWN)
    asm.jump_if(Jump.JEQ, R0, OWN, end)
    asm.jump_if(Jump.JNE, R0, OWN + 1, end)
    asm.place(end)
    asm.exit()
    return with_descriptors(asm.assemble(), {MapName.RING: ring, MapName.PROBES: probes})


def program(ring: int, probes: int) -> Request:
    return Request(Command.PROG_LOAD, bytes(120), {CODE: code(ring, probes)})


def test_descriptors_in_code_and_attributes_are_those_of_the_steps_that_made_them() -> None:
    notes = Notes()
    notes.add(Request(Command.MAP_CREATE, b"ring"), 3)
    notes.add(Request(Command.MAP_CREATE, b"probes"), 4)
    notes.add(program(3, 4), 5)
    notes.add(Request(Command.RAW_TRACEPOINT_OPEN, (5).to_bytes(4, "little"), descriptors=(0,)), 6)
    notes.add(None, 0)
    notes.add(program(4, 3), 5)  # the other program has been closed meanwhile
    path = {16: b"/proc/self/fd/9\0"}
    attributes = (5).to_bytes(4, "little") + bytes(60)
    notes.add(Request(Command.LINK_CREATE, attributes, path, (0,), 16, in_proxy=True), 7)
    steps = list(steps_of(notes, None))
    assert [step[0] for step in steps] == [0, 0, 5, 17, -1, 5, 28]
    assert [step[7] for step in steps] == [
        (),
        (),
        ((CODE, 4, 0), (CODE, 20, 1)),
        ((-1, 0, 2),),
        (),
        ((CODE, 4, 1), (CODE, 20, 0)),
        ((-1, 0, 5),),
    ]
    assert steps[6][1:6] == (attributes, path, (0,), 16, True)


def test_our_process_is_another_one_each_time_where_it_is_compared_with() -> None:
    notes = Notes()
    notes.add(Request(Command.MAP_CREATE, b"ring"), 3)
    notes.add(Request(Command.MAP_CREATE, b"probes"), 4)
    notes.add(program(3, 4), 5)
    (*_, step) = steps_of(notes, OWN)
    assert step[7] == ((CODE, 4, 0), (CODE, 20, 1), (CODE, 44, -1))


def test_a_refusal_is_a_step() -> None:
    notes = Notes()
    notes.add(Request(Command.MAP_CREATE, b"map"), -errno.EPERM)
    assert [step[6] for step in steps_of(notes, None)] == [errno.EPERM]
