"""A short visit to a machine: it stands still while its kernel is looked at, and goes on behind that."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.engines.gdb.machine.guestkernel import GuestKernel
from dprobes.engines.gdb.machine.machinetarget import MachineTarget
from dprobes.engines.gdb.machine.needs import no_machine
from dprobes.engines.gdb.processors import architecture_described_as, processor_of
from dprobes.engines.gdb.stopreplies import Stopped
from dprobes.engines.gdb.stub import Stub
from dprobes.engines.gdb.transports import open_transport
from dprobes.errors import EngineError
from dprobes.resolve.spaces import MACHINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.connection import StubConnection
    from dprobes.target.btf import Btf

__all__ = ["described_processor", "kernel_types", "visited_kernel"]

_PROCESSOR = "x86_64"
"""The only one whose kernel is found in memory."""


def described_processor(connection: StubConnection) -> Architecture | None:
    """Return the processor that a stub describes, which stands still from then on; None if nobody knows it."""
    target = connection.target = _target_of(connection.open())
    return architecture_described_as(target.description.architecture)


@contextlib.contextmanager
def visited_kernel(endpoint: str) -> Iterator[GuestKernel]:
    """Let the machine at an endpoint stand still meanwhile; raise ``EngineError`` if no kernel is found there."""
    processor = processor_of(architecture(_PROCESSOR))
    assert processor is not None
    with _visited(endpoint) as target:
        if target.description.architecture not in processor.descriptions:
            raise EngineError(
                f"the stub {target.stub.name} stands for a processor '{target.description.architecture}', and kernels "
                f"are probed on {_PROCESSOR} only",
                hint=f"write a program about its addresses: 'name = {MACHINE}' and 'address = NUMBER'",
            )
        yield GuestKernel(target, target.registers(target.stub.current_thread()))


@contextlib.contextmanager
def _visited(endpoint: str) -> Iterator[MachineTarget]:
    if endpoint.startswith("|"):
        raise EngineError(
            "a machine cannot be reached through a command's input and output",
            hint="let QEMU listen: -gdb tcp::1234, or -gdb unix:PATH,server=on,wait=off",
        )
    with contextlib.closing(Stub(open_transport(endpoint))) as stub:
        stub.start()
        target = _target_of(stub)
        try:
            if not stub.is_machine:
                raise no_machine(stub.name)
            yield target
        finally:
            target.let_go()


def _target_of(stub: Stub) -> MachineTarget:
    processor = processor_of(architecture(_PROCESSOR))
    assert processor is not None
    target = MachineTarget(stub, "little", processor.default_description())
    reply = stub.reason()
    thread = (reply.thread if isinstance(reply, Stopped) else None) or stub.current_thread()
    target.process = 0 if thread is None else thread.process
    return target


def kernel_types(endpoint: str) -> Btf:
    """Return the types of the kernel of the machine at an endpoint; raise ``EngineError`` if there is none."""
    with visited_kernel(endpoint) as kernel:
        return kernel.types
