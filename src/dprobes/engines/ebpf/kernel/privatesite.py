"""A site for uprobes that no other process executes: a few instructions in a file in memory."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Register
from dprobes.engines.ebpf.kernel.descriptors import Descriptor
from dprobes.engines.ebpf.kernel.links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.loader import load
from dprobes.engines.linux.bpfcalls import ProgramType
from dprobes.engines.linux.machinecode import map_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.layout import MapName
    from dprobes.engines.ebpf.kernel.descriptors import Descriptors
    from dprobes.engines.ebpf.kernel.features import Features

__all__ = ["Barrier", "PrivateSite"]

_CODE = bytes.fromhex("55 5d c3")  # push %rbp; pop %rbp; ret


class PrivateSite(Descriptor):
    """Such a site; what is raised is what the kernel answers, or an error of ours."""

    def __init__(self, features: Features) -> None:
        super().__init__(os.memfd_create("dprobes-site"))
        self._features = features
        os.write(self.fd, _CODE)

    def attach(self, assembled: Assembled, maps: Mapping[MapName, int]) -> Descriptors:
        """Load a program and attach it, until the result is closed."""
        attach_type = uprobe_attach_type(self._features)
        program = load(assembled, maps, ProgramType.KPROBE, attach_type=attach_type, name="place")
        try:
            return attach_uprobes(program, f"/proc/self/fd/{self.fd}", [(0, 0)], self._features)
        finally:
            os.close(program)

    def execute(self) -> None:
        """Execute the instructions in this process; a page stays mapped for that."""
        ctypes.CFUNCTYPE(None)(map_file(self.fd, len(_CODE)))()


class Barrier:
    """
    A wait, once, until all hits have been dealt with that were under way when ``wait`` was called.

    To take a uprobe away the kernel waits for all handlers of all uprobes (``uprobe_unregister_sync``); where it has
    handlers run under the lock of their place, before Linux 6.12, there is nothing to wait for.
    """

    def __init__(self, features: Features) -> None:
        """Attach a program that is never hit; raise what the kernel answers, or an error of ours."""
        asm = Assembler()
        asm.mov(Register.R0, 0)
        asm.exit()
        with PrivateSite(features) as place:
            self._links = place.attach(asm.assemble(), {})

    def wait(self) -> None:
        """Wait; a second call does nothing."""
        self._links.close()
