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
    from dprobes.engines.gdb.stopreplies import ThreadId
    from dprobes.target.btf import Btf

__all__ = ["kernel_types", "visited_kernel", "visited_processor"]

_PROCESSOR = "x86_64"
"""The only one whose kernel is found in memory."""


def visited_processor(endpoint: str) -> Architecture:
    """Return the processor of the machine at an endpoint; raise ``EngineError`` for one that nobody knows."""
    with _visited(endpoint) as (target, _):
        described = target.description.architecture
        found = architecture_described_as(described)
        if found is None:
            raise EngineError(f"the stub {target.stub.name} stands for a processor '{described}', which is not known")
        return found


@contextlib.contextmanager
def visited_kernel(endpoint: str) -> Iterator[GuestKernel]:
    """Let the machine at an endpoint stand still meanwhile; raise ``EngineError`` if no kernel is found there."""
    processor = processor_of(architecture(_PROCESSOR))
    assert processor is not None
    with _visited(endpoint) as (target, thread):
        if target.description.architecture not in processor.descriptions:
            raise EngineError(
                f"the stub {target.stub.name} stands for a processor '{target.description.architecture}', and kernels "
                f"are probed on {_PROCESSOR} only",
                hint=f"write a program about its addresses: 'name = {MACHINE}' and 'address = NUMBER'",
            )
        yield GuestKernel(target, target.registers(thread))


@contextlib.contextmanager
def _visited(endpoint: str) -> Iterator[tuple[MachineTarget, ThreadId | None]]:
    if endpoint.startswith("|"):
        raise EngineError(
            "a machine cannot be reached through a command's input and output",
            hint="let QEMU listen: -gdb tcp::1234, or -gdb unix:PATH,server=on,wait=off",
        )
    processor = processor_of(architecture(_PROCESSOR))
    assert processor is not None
    with contextlib.closing(Stub(open_transport(endpoint))) as stub:
        stub.start()
        target = MachineTarget(stub, "little", processor.default_description())
        try:
            reply = stub.reason()
            thread = (reply.thread if isinstance(reply, Stopped) else None) or stub.current_thread()
            target.process = 0 if thread is None else thread.process
            if not stub.is_machine:
                raise no_machine(stub.name)
            yield target, thread
        finally:
            target.let_go()


def kernel_types(endpoint: str) -> Btf:
    """Return the types of the kernel of the machine at an endpoint; raise ``EngineError`` if there is none."""
    with visited_kernel(endpoint) as kernel:
        return kernel.types
