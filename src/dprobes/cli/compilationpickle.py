"""
Compilations as bytes: what there is only one of is named, and files of modules are opened again.

The bytes are from a file that nobody but the user can write (``cachefiles``).
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from dprobes.arch import ARCHITECTURE_NAMES, Architecture, architecture
from dprobes.rpn.isa import Row, rows_by_syntax
from dprobes.target.elf.file import ElfFile
from dprobes.target.location import OWN_SYMBOLS, Module

__all__ = ["pickled", "unpickled"]


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[str, str] | None:
        match obj:
            case Row():
                return "row", obj.syntax
            case Architecture():
                if obj.name not in ARCHITECTURE_NAMES or architecture(obj.name) is not obj:
                    raise pickle.PicklingError(f"there are several architectures '{obj.name}'")
                return "architecture", obj.name
            case Module():
                return "module", str(obj.path)
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> Any:
        kind, name = pid
        if kind == "row":
            return rows_by_syntax()[name]
        if kind == "architecture":
            return architecture(name)
        return OWN_SYMBOLS.module_of(ElfFile.open(name))


def pickled(value: object) -> bytes | None:
    """Return a value as bytes, None if something in it has no form as bytes."""
    file = io.BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return None
    return file.getvalue()


def unpickled(content: bytes) -> object:
    """Return the value of bytes, None if they are those of another version of something."""
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception:  # noqa: BLE001 - whatever has changed meanwhile, the value can be made anew
        return None
