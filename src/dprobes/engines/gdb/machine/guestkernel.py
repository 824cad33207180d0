"""The kernel of a machine behind a stub, as programs about kernels see it: read while that stands still."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.guestmemory import GuestMemory
from dprobes.engines.gdb.machine.guestmodules import ModuleList, listed_modules, symbols_of_modules
from dprobes.engines.gdb.machine.kernelcache import KnownKernel, keep_kernel, known_kernel
from dprobes.engines.gdb.machine.kernelimage import find_image, symbols_in_memory
from dprobes.engines.gdb.machine.kernellayout import layout_of
from dprobes.errors import EngineError, FormatError, TargetError
from dprobes.escapes import escaped
from dprobes.target.btf import Btf
from dprobes.target.kernel.buildids import build_id_in
from dprobes.target.kernel.kallsyms import Kallsyms
from dprobes.target.kernel.runningkernel import RunningKernel

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.guestmodules import ModuleSymbols
    from dprobes.engines.gdb.machine.kernellayout import KernelLayout
    from dprobes.engines.gdb.machine.machinetarget import MachineTarget
    from dprobes.engines.gdb.registers import Registers
    from dprobes.target.code.instructions import DecodedInstruction
    from dprobes.target.kernel.runningkernel import LoadedModule

__all__ = ["WATCHPOINTS_MAX", "GuestKernel"]

WATCHPOINTS_MAX = 1 << 10
"""An emulated processor looks at each access, and needs no registers for that."""
_TYPES = ("__start_BTF", "__stop_BTF")
_NOTES = ("__start_notes", "__stop_notes")
_NOTES_MAX = 1 << 16
_TYPES_MAX = 1 << 26
"""Bytes of BTF that are read; the kernels of distributions have some 10 MB."""
_MODULES = "modules"
_BANNER = "linux_banner"
_STATE, _SCHEDULING = "system_state", 1
"""What is above SYSTEM_SCHEDULING comes when user space begins (enum system_states in include/linux/kernel.h)."""


class GuestKernel(RunningKernel):
    """
    The kernel that a ``target`` has in its memory.

    What stands in its code is read when it is asked for: only as long as the machine stands still. Raise
    ``EngineError`` if there is no kernel, or one that does not describe itself.
    """

    watchpoints = WATCHPOINTS_MAX

    def __init__(self, target: MachineTarget, registers: Registers) -> None:
        image = find_image(target, registers)
        self.guest_memory = GuestMemory(target, image.root, image.paging)
        known = known_kernel(self.guest_memory.read, image.start)
        listing = symbols_in_memory(target, image) if known is None else known.listing
        self._core = Kallsyms(listing)
        types = self._read_types() if known is None else known.types
        try:
            self.types = Btf(types)
        except FormatError:
            raise EngineError(
                f"the kernel behind the stub {target.stub.name} does not describe its structures",
                hint="a kernel with CONFIG_DEBUG_INFO_BTF is needed",
            ) from None
        if known is None and (banner := self._address_of(_BANNER)):
            keep_kernel(self.guest_memory.read, image.start, banner, KnownKernel(listing, types))
        try:
            self.layout: KernelLayout = layout_of(self.types)
        except (TargetError, FormatError) as error:
            raise EngineError(f"the kernel behind the stub {target.stub.name} is not known: {error.message}") from None
        modules = self._read_modules()
        listed = symbols_of_modules(self.guest_memory, self.layout, modules)
        self.left_out = _left_out(listed, is_whole=modules.is_whole)
        """What is not known of its modules, as a sentence; nothing for a kernel that is in order."""
        loaded = {each.loaded.name: each.loaded for each in modules.found}
        super().__init__(Kallsyms(listing + listed.lines), _GuestText(self.guest_memory), modules=loaded)

    def _address_of(self, name: str) -> int:
        return next((symbol.address for symbol in self._core.find(name, "") if not symbol.is_code), 0)

    def _read_types(self) -> bytes:
        start, end = (self._address_of(name) for name in _TYPES)
        return self.guest_memory.read(start, end - start) if 0 < start < end <= start + _TYPES_MAX else b""

    def _read_modules(self) -> ModuleList:
        head = self._address_of(_MODULES)
        return listed_modules(self.guest_memory, self.layout, head) if head else ModuleList((), is_whole=True)

    def source_files(self, name: str, module: str) -> dict[int, str]:
        """Return the source files of static symbols of the kernel, if a debug package of the same build is here."""
        from dprobes.target.kernel.debugfiles import kernel_of_build, sources_in_kernel

        start, end = (self._address_of(each) for each in _NOTES)
        notes = self.guest_memory.read(start, end - start) if 0 < start < end <= start + _NOTES_MAX else b""
        build_id = build_id_in(notes)
        if module or build_id is None:
            return {}
        return sources_in_kernel(kernel_of_build(build_id), name, self.base_of(""))

    def loaded_modules(self) -> dict[str, LoadedModule]:
        """Return the modules that are loaded now."""
        return {each.loaded.name: each.loaded for each in self._read_modules().found}

    @property
    def has_started(self) -> bool:
        """Whether the kernel gives back what it needs at its start only, or has done so."""
        address = self._address_of(_STATE)
        return int.from_bytes(self.guest_memory.read(address, 4), "little") > _SCHEDULING if address else True

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...]:
        """Nothing: whoever stops the machine can probe whatever it executes."""
        return ()

    @cached_property
    def skippable(self) -> None:
        """Return None: nothing in memory lists such functions by their names."""
        return

    def is_traceable(self, address: int) -> bool | None:  # noqa: ARG002 - nothing needs to be redirected
        """Return None: the kernel is not asked."""
        return None


def _left_out(listed: ModuleSymbols, *, is_whole: bool) -> str:
    """Return what to say of what was left out."""
    said = [] if is_whole else ["the kernel lists more modules than are looked at, or its list has no end"]
    if listed.left_out:
        said.append(
            f"{listed.left_out} symbols of the kernel's modules, the first of '{escaped(listed.first)}', are left out: "
            "they are too many, cannot be read, or are none that a kernel has"
        )
    return "; ".join(said)


class _GuestText:
    """What stands in the memory of the machine."""

    shift: int | None = None

    def __init__(self, memory: GuestMemory) -> None:
        self._memory = memory

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address on; none if they cannot be read."""
        return self._memory.read(address, size)

    def problem_at(self, address: int) -> str | None:
        """Return as a clause why what is at an address cannot be read, None if it can."""
        return None if self.read(address, 1) else "it is not in the machine's memory"

    def origin_of(self, _address: int) -> str:
        """Return nothing: this is what runs."""
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        """Return False: this is what runs."""
        return False
