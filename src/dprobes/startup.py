"""
What makes the command start quickly: ways to import that are shorter than Python's own.

* Modules of this package are looked for where they must be: beside their package's ``__init__.py``, with their byte
  code in its ``__pycache__``. Python looks at all directories and names that there may be, which takes longer than to
  execute what most of our modules consist of. What is not there, or not up to date, is left to Python.
* Modules of the standard library that others import at their beginning, and of which a start uses hardly anything, are
  executed when more of them is used (``LATE``).

Only processes of our own call ``install``: those who import the package keep their ways to import.
"""

from __future__ import annotations

import _imp
import importlib
import marshal
import os
import sys
from _thread import RLock
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source
from types import ModuleType

# Nothing that takes long is imported here: no pathlib, no typing.

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.abc import Loader
    from types import CodeType
    from typing import Any

__all__ = ["LATE", "install"]

_PACKAGE = "dprobes."
_INIT = "/__init__.py"

# Byte code begins with the magic number, flags, and of the source: the time of its last change, and its size (PEP 552).
_FLAGS = bytes(4)
_HEADER = 16
_ALL = 1 << 32


def _cleandoc(text: str) -> str:
    """Do what ``inspect.cleandoc`` does, which click calls for the help of each option; they have one line."""
    return text.expandtabs().lstrip() if "\n" not in text else _executed("inspect").cleandoc(text)


def _get_close_matches(word: str, *arguments: Any, **keywords: Any) -> list[str]:
    """Find nothing like a short option: click asks before it knows that it is none."""
    return [] if len(word) <= _SHORT else _executed("difflib").get_close_matches(word, *arguments, **keywords)


def _quote_from_bytes(*arguments: Any, **keywords: Any) -> Any:
    return _executed("urllib.parse").quote_from_bytes(*arguments, **keywords)


_SHORT = len("-p")

LATE: dict[str, dict[str, Any]] = {
    "difflib": {"get_close_matches": _get_close_matches},
    # For click, which would look for translations of all that it says; ours are in English.
    "gettext": {"gettext": lambda text: text, "ngettext": lambda one, several, count: one if count == 1 else several},
    "inspect": {"cleandoc": _cleandoc},
    "ipaddress": {},
    "platform": {"system": lambda: os.uname().sysname},
    "urllib.parse": {"quote_from_bytes": _quote_from_bytes},
}
"""Modules that are executed when something of them is used, and what of them is there before."""


class _QuickLoader(SourceFileLoader):
    """Load a module whose source has been looked at."""

    def __init__(self, name: str, path: str, cached: str, source: os.stat_result) -> None:
        super().__init__(name, path)
        self._cached, self._source = cached, source

    def get_code(self, fullname: str) -> CodeType | None:
        source = self._source
        begin = (
            MAGIC_NUMBER
            + _FLAGS
            + (int(source.st_mtime) & (_ALL - 1)).to_bytes(4, "little")
            + (source.st_size & (_ALL - 1)).to_bytes(4, "little")
        )
        try:
            descriptor = os.open(self._cached, os.O_RDONLY | os.O_CLOEXEC)
            try:
                content = os.read(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
            if content[:_HEADER] == begin:
                code: CodeType = marshal.loads(memoryview(content)[_HEADER:])  # noqa: S302 - as Python does
                # Byte code is made beforehand under names that are not those of today.
                _imp._fix_co_filename(code, self.path)  # type: ignore[attr-defined] # noqa: SLF001
                return code
        except (OSError, EOFError, ValueError, TypeError):
            pass  # Python knows what to do, or what to say
        return super().get_code(fullname)


class _QuickFinder:
    """Find the modules of this package."""

    def __init__(self) -> None:
        self._caches: dict[str, str] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(_PACKAGE) or path is None or len(path) != 1:
            return None
        directory, tail = path[0], name.rpartition(".")[2]
        places = None
        try:
            file = f"{directory}/{tail}.py"
            source = os.stat(file)  # noqa: PTH116
        except OSError:
            try:
                directory, tail = f"{directory}/{tail}", "__init__"
                file = directory + _INIT
                source, places = os.stat(file), [directory]  # noqa: PTH116
            except OSError:
                return None
        if (cache := self._caches.get(directory)) is None:
            cache = self._caches[directory] = cache_from_source(f"{directory}/*.py")
        cached = cache.replace("*", tail)
        spec = ModuleSpec(name, _QuickLoader(name, file, cached, source), origin=file, is_package=places is not None)
        spec.submodule_search_locations = places
        spec.cached = cached
        spec.has_location = True
        return spec


class _LateModule(ModuleType):
    """A module that is executed when it is asked for something that it does not have yet; any thread may ask."""

    def __init__(self, spec: ModuleSpec, loader: Loader, attributes: Mapping[str, object]) -> None:
        super().__init__(spec.name)
        self.__dict__.update(attributes, __spec__=spec, __file__=spec.origin, __loader__=loader, _late_loader=loader)

    def __getattr__(self, name: str) -> Any:
        # Python asks each module whether it is a package.
        own = {} if name == "__path__" else _executed(self.__name__).__dict__
        if name in own:
            return own[name]
        raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'", name=name, obj=self)


_executing = RLock()


def _executed(name: str) -> Any:
    """Return a late module, which has been executed."""
    module = sys.modules[name]
    with _executing:
        if (loader := module.__dict__.pop("_late_loader", None)) is not None:
            loader.exec_module(module)
    return module


def install() -> None:
    """Import in this process in the short ways."""
    sys.meta_path.insert(0, _QuickFinder())
    for name, attributes in LATE.items():
        package, _, last = name.rpartition(".")
        parent = importlib.import_module(package) if package else None
        if name in sys.modules:
            continue
        spec = PathFinder.find_spec(name, getattr(parent, "__path__", None))
        if spec is not None and spec.loader is not None:
            module = sys.modules[name] = _LateModule(spec, spec.loader, attributes)
            if parent is not None:
                setattr(parent, last, module)
