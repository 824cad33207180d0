"""The files that programs of a manager are for: their bytes are held once, however many programs there are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.target.elf.file import ElfFile
    from dprobes.target.kernel.carriedkernel import CarriedKernel
    from dprobes.target.location import Module, SymbolProvider

__all__ = ["HeldFiles", "SharingSymbols"]


class HeldFiles:
    """Know the files that somebody holds; any thread may ask."""

    def __init__(self) -> None:
        self._files: WeakValueDictionary[tuple[str, str | None, int], ElfFile] = WeakValueDictionary()
        self._lock = threading.Lock()

    def same(self, elf: ElfFile) -> ElfFile:
        """Return the file that is held already if it is the same to the byte, else the one that is given."""
        key = (str(elf.path), elf.build_id, len(elf.data))
        with self._lock:
            held = self._files.get(key)
            if held is None or held.data != elf.data:
                self._files[key] = held = elf
            return held


@dataclass(frozen=True, slots=True)
class SharingSymbols:
    """Give the modules that another provider gives, of files that are held once."""

    symbols: SymbolProvider
    files: HeldFiles

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file; raise ``TargetError`` as the other provider does."""
        return self.symbols.module_of(self.files.same(elf))

    def machine(self, host: str) -> str | None:
        """Return what the other provider does."""
        return self.symbols.machine(host)

    @property
    def kernels(self) -> tuple[CarriedKernel, ...]:
        """What the other provider has."""
        return self.symbols.kernels

    def __reduce__(self) -> tuple[object, ...]:
        """Be the other provider in another process, which shares no memory."""
        return _itself, (self.symbols,)


def _itself(symbols: SymbolProvider) -> SymbolProvider:
    return symbols
