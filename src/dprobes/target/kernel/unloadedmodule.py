"""
A module of the kernel that is not loaded, in the place of the running kernel that has it: all is read from its file.

Addresses are those of ``moduleimage``: offsets from where the module will be loaded, for the code that stays. The
kernel finds the places in a module that it loads by *anchors*: a symbol's name, and a distance.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.kernel.debugfiles import source_files
from dprobes.target.kernel.kallsyms import Kallsyms
from dprobes.target.kernel.kerneltext import KernelText
from dprobes.target.kernel.modulefiles import find_module_file, module_name, open_module_file
from dprobes.target.kernel.moduleimage import ModuleImage
from dprobes.target.kernel.runningkernel import LoadedModule, RunningKernel

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.target.elf.file import ElfFile

__all__ = ["UnloadedModule", "open_unloaded_module"]

_NO_FTRACE = "the kernel allows none where ftrace cannot redirect the function (it is not among its __mcount_loc)"


class UnloadedModule(RunningKernel):
    """A module's file as a kernel that has no other code."""

    is_loaded = False

    def __init__(self, name: str, elf: ElfFile) -> None:
        self.name = name
        self._file = elf.path
        self._elf = elf
        self._image = image = ModuleImage(elf)
        super().__init__(_ListedSymbols(name, image), _FileText(image))

    @property
    def file(self) -> Path:
        """The module's file."""
        return self._file

    def offset_text(self, offset: int) -> str:
        """Return an offset for people."""
        if offset >= self._image.code_size:
            return "in code that the kernel frees when the module has begun"
        return super().offset_text(offset)

    def source_files(self, name: str, module: str) -> dict[int, str]:  # noqa: ARG002 - there is no other one
        """Return the source files of the static symbols called ``name``, by address, as far as its file has them."""
        return source_files(self._elf, name, self._image.start_of)

    @cached_property
    def modules(self) -> dict[str, LoadedModule]:
        """The module as if it were loaded at 0."""
        return {self.name: LoadedModule(self.name, 0, self._image.code_size)}

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...] | None:
        """The code that the module allows no probes in."""
        return self._image.blacklist

    @cached_property
    def skippable(self) -> None:
        """Return None: the kernel reads the module's list when it loads it."""
        return

    def refusal(self, address: int) -> str | None:
        """Return why the kernel will refuse a probe at an address; None if it will not."""
        # Since Linux kernel commit 45408c4f9250 ("tracing: kprobes: Prohibit probing on notrace function").
        if self.is_traceable(self._image.function_at(address) or 0) is False:
            return _NO_FTRACE
        return super().refusal(address)

    def is_traceable(self, address: int) -> bool | None:
        """Return whether ftrace can redirect the function that begins at an address; None where that is not known."""
        return None if self._image.traceable is None else address in self._image.traceable

    def is_changed_later(self, address: int) -> bool:
        """Return whether the loader may replace the instruction at an address."""
        return address in self._image.changes

    def anchor(self, address: int, module: str) -> tuple[str, int] | None:
        """Return a name that only one symbol has, at or before an address in the same section, and the distance."""
        section = self._image.section_at(address)
        if section is None:
            return None
        before = {s.address for s in self._image.symbols if section[0] <= s.address <= address}
        for start in sorted(before, reverse=True):
            if (name := self._only_name(start, module)) is not None:
                return name, address - start
        return None


class _ListedSymbols(Kallsyms):
    """The symbols of a module's file, listed as the kernel would."""

    has_data = True

    def __init__(self, module: str, image: ModuleImage) -> None:
        lines = (f"{symbol.address:016x} {symbol.letter} {symbol.name}\t[{module}]\n" for symbol in image.symbols)
        super().__init__("".join(lines).encode(errors="replace"))

    @property
    def is_hidden(self) -> bool:
        """Return False: a file hides nothing."""
        return False


class _FileText(KernelText):
    def __init__(self, image: ModuleImage) -> None:
        super().__init__(None)
        self._image = image

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address on."""
        return self._image.read(address, size)


def open_unloaded_module(name: str) -> UnloadedModule:
    """Return the module that a program names, which is not loaded; raise ``TargetError`` if there is no file of it."""
    path = find_module_file(name)
    elf = open_module_file(path)
    information = ModuleImage(elf).information
    release = os.uname().release
    built_for = information.get("vermagic", release).partition(" ")[0]
    if built_for != release:
        raise TargetError(
            f"'{path}' is a module for Linux {built_for}, and this is Linux {release}",
            hint="build the module for the kernel that runs",
        )
    return UnloadedModule(module_name(information.get("name", name)), elf)
