"""
The decoder (iced-x86), imported without its forty modules of names.

The package's own start imports a module for each of its enumerations, which takes four times as long as the machine
code that decodes; a run needs two of them. So the package is made here from its machine code, and everything else of it
comes when somebody asks for it: to others it is the same package.
"""

from __future__ import annotations

import mmap
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

__all__ = ["prepare_decoder"]

_PACKAGE = "iced_x86"
_MACHINE_CODE = f"{_PACKAGE}._iced_x86_py"

_MEMORY = 16 << 20
"""Bytes; the decoder's library and its tables take 13 MiB."""


def prepare_decoder() -> None:
    """
    Have ``from iced_x86 import ...`` import what is named only.

    Raise ``MemoryError`` where the decoder would get none: the language that it is written in ends the process.
    """
    if _PACKAGE in sys.modules:
        return
    try:
        mmap.mmap(-1, _MEMORY).close()  # none of it is touched, which would take milliseconds
    except OSError:
        raise MemoryError from None
    spec = PathFinder.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        return  # whoever imports it is told
    package = _Package(_PACKAGE)
    package.__spec__, package.__loader__ = spec, spec.loader
    package.__path__ = spec.submodule_search_locations
    package.__file__, package.__package__ = spec.origin, _PACKAGE
    sys.modules[_PACKAGE] = package
    try:
        import_module(_MACHINE_CODE)
    except BaseException:
        del sys.modules[_PACKAGE]
        raise


class _Package(ModuleType):
    """The package, whose modules and other names are imported when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._whole(name)
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            found: Any = import_module(f"{_PACKAGE}.{name}")
        except ModuleNotFoundError:
            # The machine code has the names of modules as well, which hide those.
            found = getattr(sys.modules[_MACHINE_CODE], name, None)
        if found is None:
            return self._whole(name)
        setattr(self, name, found)
        return found

    def _whole(self, name: str) -> Any:
        """Run the package's start after all, and return what it gives a name to."""
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)
