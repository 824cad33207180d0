"""
Names of functions as people write them, from those that compilers give linkers.

Those of C++ are read by the C++ library of this machine, as ``__cxa_demangle`` of the Itanium ABI, where it has one. It
knows no limits, so it gets names of files only that nobody but root and ourselves can have made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.target.names.rustnames import rust_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Demangler"]

_LIBRARIES = ("libstdc++.so.6", "libc++abi.so.1")
_SYMBOL_MAX = 4096
_NAME_MAX = 4096
"""Characters of a name that is shown; templates make longer ones, which nobody reads."""


class Demangler:
    """Find readable names; the library for those of C++ is loaded with the first one."""

    def __init__(self) -> None:
        self._cpp: Callable[[str], str | None] | None = None

    def name_of(self, symbol: str, *, is_trusted: bool = True) -> str:
        """Return the name for people, which is the symbol itself if that is one of C; ``is_trusted`` is its file."""
        if not symbol.startswith(("_Z", "_R")) or len(symbol) > _SYMBOL_MAX:
            return symbol
        if (rust := rust_name(symbol)) is not None:
            return rust
        if not symbol.startswith("_Z") or not is_trusted:
            return symbol
        if self._cpp is None:
            self._cpp = _library()
        name = self._cpp(symbol)
        return symbol if name is None else name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX - 3]}..."


def _library() -> Callable[[str], str | None]:
    """Return the function of this machine's C++ library."""
    import ctypes

    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            demangle, free = getattr(library, "__cxa_demangle"), ctypes.CDLL(None).free
        except (OSError, AttributeError):
            continue
        demangle.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        demangle.restype = ctypes.c_void_p
        free.argtypes = (ctypes.c_void_p,)

        def find(symbol: str) -> str | None:
            status = ctypes.c_int()
            address = demangle(symbol.encode("utf-8", "surrogateescape"), None, None, ctypes.byref(status))  # noqa: B023
            if not address:
                return None
            try:
                return ctypes.string_at(address).decode("utf-8", "backslashreplace")
            finally:
                free(address)  # noqa: B023

        return find
    return lambda _: None
