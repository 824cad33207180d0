"""The files of the modules that a program is compiled for, and what they say to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.modules.probedmodules import KERNEL, KERNEL_MODULE
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dprobes.dpc.modules.debugplaces import DebugPlaces
    from dprobes.dpc.typedtree.scope import ProbedModule
    from dprobes.target.btf import Btf
    from dprobes.target.elf.file import ElfFile

__all__ = ["ModuleFiles"]


class ModuleFiles:
    """
    Find the files of modules by their names.

    ``pid`` and ``command`` are where a module is looked for, ``symbols`` is a file with symbols (``--sym``). The files
    ``named`` come first. ``kernel_types`` gives the types of a kernel that is not the one that runs here.
    """

    def __init__(
        self,
        pid: int | None = None,
        command: str | None = None,
        symbols: Path | None = None,
        named: Sequence[Path] = (),
        kernel_types: Callable[[], Btf | None] | None = None,
    ) -> None:
        self._kernel_types = kernel_types
        self._named = tuple(named)
        self._is_only = False
        self._pid = pid
        self._command = command
        self._symbols = symbols
        self._files: dict[str, ElfFile | None] = {}
        self._modules: dict[str, ProbedModule | None] = {}

    def tell_modules(self, names: Sequence[str]) -> None:
        """Say which modules the program has: for a single one the first named file is taken, whatever it is called."""
        self._is_only = len(names) == 1

    def word_size_of(self, module: str) -> int:
        """Return the size of a word of a module, in bytes; that of the process or command if there is no such file."""
        from dprobes.target.modules import usual_architecture

        elf = self._file_of(module)
        if elf is not None:
            return elf.word_size
        try:
            return 4 if usual_architecture(self._pid, self._command) == "i386" else 8
        except TargetError:
            return 8  # who starts the command says what is wrong with it

    def module_of(self, module: str) -> ProbedModule | None:
        """Return what describes a module; None if it is not on this machine."""
        if module not in self._modules:
            self._modules[module] = self._described(module)
        return self._modules[module]

    @property
    def places(self) -> DebugPlaces:
        """What finds instructions in the modules by their debug information."""
        from dprobes.dpc.modules.debugplaces import DebugPlaces
        from dprobes.target.location import FileSymbols

        return DebugPlaces(self._file_of, FileSymbols(self._symbols))

    def _described(self, module: str) -> ProbedModule | None:
        if module == KERNEL or module.startswith(KERNEL_MODULE):
            return self._of_kernel(module.removeprefix(KERNEL_MODULE) if module != KERNEL else "")
        from dprobes.dpc.modules.latenames import DescribedModule
        from dprobes.target.location import FileSymbols

        elf = self._file_of(module)
        return None if elf is None else DescribedModule(elf, FileSymbols(self._symbols))

    def _of_kernel(self, name: str) -> ProbedModule:
        """Return what describes the kernel, or a module of it."""
        from dprobes.dpc.modules.btfnames import BtfModule
        from dprobes.dpc.modules.kernelmodule import KernelModule
        from dprobes.target.kernel.debugfiles import described_kernel, described_module

        if self._kernel_types is not None:
            return KernelModule(BtfModule(self._kernel_types), lambda: None)
        named = self._named[0] if self._is_only and self._named else None
        if not name:
            return KernelModule(BtfModule(_kernel_btf), lambda: described_kernel(named))
        return KernelModule(BtfModule(lambda: _module_btf(name)), lambda: described_module(name, named))

    def _named_for(self, module: str) -> Path | None:
        from dprobes.target.modules import is_file_of

        if self._is_only and self._named:
            return self._named[0]
        return next((path for path in self._named if is_file_of(path, module)), None)

    def _file_of(self, module: str) -> ElfFile | None:
        from dprobes.target.elf.file import ElfFile
        from dprobes.target.modules import find_module

        if module not in self._files:
            try:
                path = self._named_for(module) or find_module(module, pid=self._pid, command=self._command)
                self._files[module] = None if path is None else ElfFile.open(path)
            except TargetError:
                self._files[module] = None
        return self._files[module]


def _module_btf(name: str) -> Btf | None:
    """Return the types of a module that is loaded, and of the kernel; those of the kernel if it shows none."""
    from pathlib import Path

    from dprobes.errors import FormatError
    from dprobes.target.btf import KERNEL_BTF
    from dprobes.target.kernel.modulefiles import module_name
    from dprobes.target.modulebtf import ModuleBtf

    try:
        return ModuleBtf(Path(KERNEL_BTF).read_bytes(), Path(KERNEL_BTF).with_name(module_name(name)).read_bytes())
    except (OSError, FormatError):
        return _kernel_btf()


def _kernel_btf() -> Btf | None:
    """Return the types of the running kernel; None if it shows none."""
    from pathlib import Path

    from dprobes.errors import FormatError
    from dprobes.target.btf import KERNEL_BTF, Btf

    try:
        return Btf(Path(KERNEL_BTF).read_bytes())
    except (OSError, FormatError):
        return None
