"""
Capabilities of a stub, found by trial on its target, which is then released unchanged.

Breakpoints and watchpoints are placed at the target's current instruction, and removed at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import ARCHITECTURE_NAMES, architecture
from dprobes.engines.engine_interface import Finding
from dprobes.engines.gdb.remote_protocol import Stopped
from dprobes.engines.gdb.stub_registers import check_description, parse_description, processor_of
from dprobes.engines.gdb.stub_requests import BreakpointKind, Stub
from dprobes.engines.gdb.stub_transports import open_transport
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_registers import StubProcessor, TargetDescription

__all__ = ["examine_stub"]

_PLACES = {
    BreakpointKind.SOFTWARE: ("breakpoints", "they are written into memory instead"),
    BreakpointKind.WRITE: ("watchpoints for writes", "programs with 'watchpoint = w' are refused"),
    BreakpointKind.ACCESS: ("watchpoints for reads and writes", "programs with 'watchpoint = rw' are refused"),
}


def examine_stub(endpoint: str) -> list[Finding]:
    """Return the findings about the stub at an endpoint."""
    what = f"reach the stub at {endpoint}"
    try:
        stub = Stub(open_transport(endpoint))
    except EngineError as error:
        return [Finding(what, works=False, detail=error.message, remedy=error.hint or "", essential=True)]
    try:
        stub.start()
        found = [Finding(what, works=True, essential=True), *_examine(stub)]
        stub.detach(thread.process if (thread := stub.current_thread()) is not None else 0)
    except EngineError as error:
        return [Finding(what, works=False, detail=error.message, remedy=error.hint or "", essential=True)]
    finally:
        stub.close()
    return found


def _examine(stub: Stub) -> Iterator[Finding]:
    reply = stub.reason()
    if not isinstance(reply, Stopped):
        yield Finding("a stopped target", works=False, detail="it has ended", essential=True)
        return
    thread = reply.thread or stub.current_thread()
    yield _kind(stub)
    description = parse_description(lambda name: stub.read_object("features", name))
    yield Finding(
        "the registers are described",
        works=description is not None,
        detail="" if description is None else f"{len(description.registers)} of '{description.architecture}'",
        remedy="the module's processor is presumed, with the registers that GDB presumes",
    )
    known = None if description is None else _processor(description)
    if description is not None:
        yield _knowledge(description, known)
    yield Finding(
        "single steps",
        works=stub.has_steps(),
        remedy="breakpoints are placed wherever an instruction may lead",
    )
    if description is None or known is None:
        return
    _, processor = known
    if not description.registers:
        description = processor.default_description()
    check_description(description, processor, stub.name)
    order = architecture(known[0]).byte_order
    place = description.registers[processor.pc]
    data = stub.read_registers(thread)[place.offset : place.offset + place.size]
    yield from _places(stub, thread, int.from_bytes(data, order), len(processor.breakpoint))


def _kind(stub: Stub) -> Finding:
    is_process = stub.read_object("auxv") is not None
    return Finding("a process of Linux or a machine", works=True, detail="a process" if is_process else "a machine")


def _processor(description: TargetDescription) -> tuple[str, StubProcessor] | None:
    """Return the architecture and row of the described processor, or None if it is not supported."""
    for name in ARCHITECTURE_NAMES:
        processor = processor_of(architecture(name))
        if processor is not None and description.architecture in processor.descriptions:
            return name, processor
    return None


def _knowledge(description: TargetDescription, known: tuple[str, StubProcessor] | None) -> Finding:
    what = "a processor that is known"
    if known is None:
        return Finding(what, works=False, detail=f"'{description.architecture}' is not", essential=True)
    name, processor = known
    lacking = [
        register.name
        for register in architecture(name).registers
        if register.memory_offset is None
        and not any(each in description.registers for each in processor.registers(register.name))
    ]
    return Finding(what, works=True, detail=f"{name}, without {', '.join(lacking)}" if lacking else name)


def _places(stub: Stub, thread: ThreadId | None, pc: int, size: int) -> Iterator[Finding]:
    readable = stub.read(pc, size)
    detail = "" if len(readable) == size else f"not the {size} bytes at {pc:#x}"
    yield Finding("read memory", works=not detail, detail=detail, essential=True)
    for kind, (what, otherwise) in _PLACES.items():
        length = size if kind is BreakpointKind.SOFTWARE else 1
        if inserted := stub.insert(kind, pc, length):
            stub.remove(kind, pc, length)
            stub.read_registers(thread)  # queued requests are sent with the next question
        yield Finding(what, works=bool(inserted), detail="" if inserted is not False else "refused", remedy=otherwise)
