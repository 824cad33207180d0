"""The files of the modules that a program is compiled for, and the information that they provide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.syntax.syntax_tree import PointKind
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dprobes.dpc.modules.debug_places import DebugPlaces
    from dprobes.dpc.syntax.syntax_tree import Point, ProgramTree
    from dprobes.dpc.typedtree.name_scope import GivenTypes, PlaceNames, ProbedModule
    from dprobes.target.btf import Btf
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["KERNEL", "KERNEL_MODULE", "ModuleFiles", "ProbedModules"]

KERNEL = "kernel"
"""The name that stands for the kernel before the colon of a place."""

KERNEL_MODULE = "kmod "
"""The prefix of a kernel module's name before the colon of a place."""

_OF_KERNEL = (PointKind.TRACEPOINT, PointKind.SYSTEM_CALL)


class ProbedModules:
    """The modules of a program and their descriptions; ``module`` is the module of points that name none."""

    def __init__(self, program: ProgramTree, module: str, module_of: Callable[[str], ProbedModule | None]) -> None:
        self._written = program.module
        self._default = program.module or module
        self._module_of = module_of
        points = [point for probe in program.probes for point in probe.points]
        self.names = list(dict.fromkeys(map(self._name_of, points)))

    def _name_of(self, point: Point) -> str:
        if point.kind is PointKind.SAMPLE:
            return point.module or self._written  # empty: anything that runs, even with a default module
        return KERNEL if point.kind in _OF_KERNEL else point.module or self._default

    def name_at(self, point: Point | None) -> str:
        """Return the name of the module of a point, or of the program's only module; empty if there are several."""
        if point is not None:
            return self._name_of(point)
        return self.names[0] if len(self.names) == 1 else ""

    @property
    def first(self) -> ProbedModule | None:
        """
        Module whose types a program may name: the first probed one, or the kernel for samplers of all code.

        It is None if the program probes no module.
        """
        return self._of(self.names[0] or KERNEL) if self.names else None

    @property
    def all(self) -> Iterator[ProbedModule]:
        """All modules with a description."""
        for name in self.names:
            if (module := self._of(name or KERNEL)) is not None:
                yield module

    def _of(self, name: str) -> ProbedModule | None:
        return self._module_of(name) if name else None

    def kernel_at(self, point: Point | None) -> ProbedModule | None:
        """Return the kernel if a hit of ``point`` may be in it, else None; ``point`` is None for functions."""
        name = self.name_at(point)
        return self._of(KERNEL) if name in ("", KERNEL) or name.startswith(KERNEL_MODULE) else None

    def names_at(self, point: Point) -> PlaceNames | None:
        """
        Return the names from debug information that code at a point may use.

        Return None if its module has no description.
        """
        module = self._of(self._name_of(point))
        place = point.place if point.kind is PointKind.CODE else None
        return None if module is None else module.names_at(place, at_return=point.at_return)

    def given_at(self, point: Point) -> GivenTypes | None:
        """Return the types of the fields or arguments at a point; None at points of code and for missing modules."""
        if point.kind is not PointKind.USDT and point.kind not in _OF_KERNEL:
            return None
        module = self._of(self._name_of(point))
        place = f"syscall:{point.place}" if point.kind is PointKind.SYSTEM_CALL else str(point.place)
        return None if module is None else module.given_at(place, at_return=point.at_return)

    def names_of_all(self) -> PlaceNames | None:
        """Return the names in the functions of a program, or None for several modules, or one without description."""
        module = self.first if len(self.names) == 1 else None
        return None if module is None else module.names_at(None, at_return=False)


class ModuleFiles:
    """
    Files of modules by their names.

    Modules are searched for in ``pid`` and ``command``. ``symbols`` is a file with symbols (``--sym``). The files
    ``named`` take precedence. ``kernel_types`` returns the types of a kernel other than the running one.
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
        self.pid = pid
        self.command = command
        self._symbols = symbols
        self._files: dict[str, ElfFile | None] = {}
        self._modules: dict[str, ProbedModule | None] = {}

    def tell_modules(self, names: Sequence[str]) -> None:
        """
        Set the names of the program's modules.

        If there is only one, the first file of ``named`` is used for it, whatever the name of the file.
        """
        self._is_only = len(names) == 1

    def first_of(self, names: Sequence[str]) -> str:
        """Return the first of alternative modules that the process maps, else that has a file here, else the first."""
        from dprobes.target.module_lookup import is_mapped

        mapped = (name for name in names if self.pid is not None and is_mapped(name, self.pid))
        return next(mapped, None) or next(filter(self.has, names), names[0])

    def has(self, module: str) -> bool:
        """Return whether a module has a file here."""
        return self._file_of(module) is not None

    def word_size_of(self, module: str) -> int:
        """Return the word size of a module in bytes, or that of the process or command if the module has no file."""
        from dprobes.target.module_lookup import usual_architecture

        elf = self._file_of(module)
        if elf is not None:
            return elf.word_size
        try:
            return 4 if usual_architecture(self.pid, self.command) == "i386" else 8
        except TargetError:
            return 8  # the start of the command reports the error

    def module_of(self, module: str) -> ProbedModule | None:
        """Return the description of a module, or None if the module is not on this machine."""
        if module not in self._modules:
            self._modules[module] = self._described(module)
        return self._modules[module]

    @property
    def places(self) -> DebugPlaces:
        """The look-up of instructions in the modules by their debug information."""
        from dprobes.dpc.modules.debug_places import DebugPlaces
        from dprobes.target.probed_module import FileSymbols

        return DebugPlaces(self._file_of, FileSymbols(self._symbols))

    def _described(self, module: str) -> ProbedModule | None:
        if module == KERNEL or module.startswith(KERNEL_MODULE):
            return self._of_kernel(module.removeprefix(KERNEL_MODULE) if module != KERNEL else "")
        from dprobes.dpc.modules.late_names import DescribedModule
        from dprobes.target.probed_module import FileSymbols

        elf = self._file_of(module)
        return None if elf is None else DescribedModule(elf, FileSymbols(self._symbols))

    def _of_kernel(self, name: str) -> ProbedModule:
        """Return the description of the kernel module ``name``, "" for the kernel, by BTF and debug information."""
        from dprobes.dpc.modules.kernel_module import BtfModule, KernelModule
        from dprobes.target.kernel.kernel_files import described_kernel, described_module

        if self._kernel_types is not None:
            return KernelModule(BtfModule(self._kernel_types), lambda: None)
        named = self._named[0] if self._is_only and self._named else None
        if not name:
            return KernelModule(BtfModule(_kernel_btf), lambda: described_kernel(named))
        return KernelModule(BtfModule(lambda: _module_btf(name)), lambda: described_module(name, named))

    def _named_for(self, module: str) -> Path | None:
        from dprobes.target.module_lookup import is_file_of

        if self._is_only and self._named:
            return self._named[0]
        return next((path for path in self._named if is_file_of(path, module)), None)

    def _file_of(self, module: str) -> ElfFile | None:
        from dprobes.target.elf.elf_file import ElfFile
        from dprobes.target.module_lookup import find_module

        if module not in self._files:
            try:
                path = self._named_for(module) or find_module(module, pid=self.pid, command=self.command)
                self._files[module] = None if path is None else ElfFile.open(path)
            except TargetError:
                self._files[module] = None
        return self._files[module]


def _module_btf(name: str) -> Btf | None:
    """Return the types of a loaded module and of the kernel, or of the kernel alone if the module exposes none."""
    from pathlib import Path

    from dprobes.errors import FormatError
    from dprobes.target.btf import KERNEL_BTF, ModuleBtf
    from dprobes.target.kernel.kernel_files import module_name

    try:
        return ModuleBtf(Path(KERNEL_BTF).read_bytes(), Path(KERNEL_BTF).with_name(module_name(name)).read_bytes())
    except (OSError, FormatError):
        return _kernel_btf()


def _kernel_btf() -> Btf | None:
    """Return the types of the running kernel, or None if it exposes none."""
    from pathlib import Path

    from dprobes.errors import FormatError
    from dprobes.target.btf import KERNEL_BTF, Btf

    try:
        return Btf(Path(KERNEL_BTF).read_bytes())
    except (OSError, FormatError):
        return None
