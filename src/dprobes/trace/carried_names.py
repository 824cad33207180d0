"""
Names that a trace file contains for the addresses in its records.

They consist of the processes' mappings of modules, and of the functions in these modules. With them, a machine without
these processes and files shows the same names.

The body of a NAMES frame is JSON. Numbers of modules count from the last HEADER::

    {"modules":   [[number, name, build-id], ...],
     "mappings":  [[pid, since, start, end, offset, module], ...],    pid null: the kernel
     "functions": [[module, start, end, name], ...],                  offsets in the module's file
     "inlined":   [[module, start of the function, start, end, name], ...]}   each before those in it

A mapping is valid from ``since``, the CLOCK_MONOTONIC time of the process's execve, until the next ``since`` of the
process. Each function of the kernel has a mapping of its own, whose offset is its address.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dprobes.target.code_names import CodeName, InlinedCode, LocatedFunction, MappedCode, name_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.target.code_names import LocatedCode

__all__ = ["CarriedNames", "NameRegister"]

_TOLD_MAX = 1 << 17
"""Maximum number of functions and mappings that are written to a file."""

_KNOWN_MAX = 1 << 20
"""Maximum number of functions and mappings of a file that a reader keeps."""

_ADDRESS_MAX = (1 << 64) - 1
_NUMBER_MAX = (1 << 32) - 1
_NAME_MAX = 1 << 16
_CACHED_MAX = 1 << 16


_Row = TypeVar("_Row")


class NameRegister:
    """The names that a trace file already has, so that each is written once."""

    def __init__(self) -> None:
        self._modules: dict[tuple[str, str], int] = {}
        self._mappings: set[tuple[int | None, int, int]] = set()
        self._functions: dict[tuple[int, int], int] = {}

    def telling(self, found: Sequence[LocatedCode]) -> Callable[[bool], dict[str, Any] | None] | None:
        """
        Return the callback ``names`` of ``TraceFileWriter.append`` for these addresses.

        Return None if ``found`` is empty.
        """
        return partial(self._body, found) if found else None

    def _body(self, found: Sequence[LocatedCode], has_names: bool) -> dict[str, Any] | None:
        """
        Return the body of a NAMES frame with names that are new to the file, or None if there are none.

        ``has_names`` is False if the file lacks the names that were returned before.
        """
        if not has_names:
            self._modules.clear()
            self._mappings.clear()
            self._functions.clear()
        told: dict[str, list[list[Any]]] = {"modules": [], "mappings": [], "functions": [], "inlined": []}
        for each in found:
            if len(self._mappings) + len(self._functions) >= _TOLD_MAX:
                break
            self._tell(each, told)
        told = {key: rows for key, rows in told.items() if rows}
        return told or None

    def _tell(self, located: LocatedCode, told: dict[str, list[list[Any]]]) -> None:
        mapped, function = located.mapped, located.function
        module = (mapped.module, mapped.build)
        if (number := self._modules.get(module)) is None:
            number = self._modules[module] = len(self._modules)
            told["modules"].append([number, *module])
        mapping = (located.pid, located.since, mapped.start)
        if mapping not in self._mappings:
            self._mappings.add(mapping)
            told["mappings"].append([*mapping, mapped.end, mapped.offset, number])
        if function is not None and self._functions.get((number, function.start), 0) < function.end:
            self._functions[number, function.start] = function.end
            told["functions"].append([number, function.start, function.end, function.name])
            told["inlined"] += ([number, function.start, *each] for each in function.inlined)


class CarriedNames:
    """
    Names of addresses from the NAMES frames that follow one HEADER.

    Invalid contents of a frame raise TypeError or ValueError. An undefined module gets the name ``module N``.
    """

    def __init__(self) -> None:
        self._modules: dict[int, tuple[str, str]] = {}
        self._functions: dict[int, _Ranges[LocatedFunction]] = {}
        self._images: dict[int | None, dict[int, _Ranges[tuple[int, MappedCode]]]] = {}
        """Mappings, with module numbers, by process and by the time from which they are valid."""
        self._inlined: dict[tuple[int, int], list[InlinedCode]] = {}
        self._size = 0
        self._known: dict[tuple[int | None, int, int], CodeName | None] = {}

    def __bool__(self) -> bool:
        return bool(self._size)

    @property
    def has_changes(self) -> bool:
        """True if a process has executed several programs, so that names depend on the time."""
        return any(len(images) > 1 for images in self._images.values())

    def code_at(self, address: int) -> list[tuple[int, int]]:
        """Return a process id and ``since`` for each mapping at ``address``. Names of the kernel are not included."""
        found: dict[tuple[Any, int], tuple[int, int]] = {}
        for pid, images in self._images.items():
            for since, image in images.items():
                if pid is not None and (covering := image.covering(address)) is not None:
                    module, mapped = covering
                    found[module, mapped.start - mapped.offset] = pid, since
        return list(found.values())

    def add(self, said: dict[str, Any]) -> None:
        """Add the modules, mappings and functions in a NAMES frame, whose JSON object is ``said``."""
        self._known.clear()
        for number, name, build in _rows(said, "modules", 3):
            if self._has_room():
                self._modules[_number(number, _NUMBER_MAX)] = _text(name), _text(build)
        for pid, since, start, end, offset, module in _rows(said, "mappings", 6):
            mapping = MappedCode(*_range(start, end), _number(offset, _ADDRESS_MAX), *self._module(module))
            if self._has_room():
                images = self._images.setdefault(None if pid is None else _number(pid, _NUMBER_MAX), {})
                images.setdefault(_number(since, _ADDRESS_MAX), _Ranges()).add(*mapping[:2], (module, mapping))
        for module, start, end, name in _rows(said, "functions", 4):
            function = LocatedFunction(*_range(start, end), _text(name))
            if self._has_room():
                self._functions.setdefault(_number(module, _NUMBER_MAX), _Ranges()).add(*function[:2], function)
        for module, function_start, start, end, name in _rows(said, "inlined", 5):
            inlined = InlinedCode(*_range(start, end), _text(name))
            if self._has_room():
                key = (_number(module, _NUMBER_MAX), _number(function_start, _ADDRESS_MAX))
                self._inlined.setdefault(key, []).append(inlined)

    def _has_room(self) -> bool:
        self._size += 1
        return self._size <= _KNOWN_MAX

    def name_of(self, address: int, pid: int | None, time: int | None) -> CodeName | None:
        """
        Return the name of an address in a process at ``time``, or None if it is unknown.

        A ``pid`` of None stands for the kernel. ``time`` is CLOCK_MONOTONIC in nanoseconds, or None for any time.
        """
        images = self._images.get(pid)
        if images is None:
            return None
        since = max((each for each in images if time is None or each <= time), default=None)
        if since is None:
            return None
        key = (pid, since, address)
        if key not in self._known:
            if len(self._known) >= _CACHED_MAX:
                self._known.clear()
            self._known[key] = self._find(images[since], address)
        return self._known[key]

    def _find(self, image: _Ranges[tuple[int, MappedCode]], address: int) -> CodeName | None:
        found = image.covering(address)
        if found is None:
            return None
        module, mapped = found
        functions = self._functions.get(module)
        function = functions.covering(address - mapped.start + mapped.offset) if functions is not None else None
        if function is not None and (inlined := self._inlined.get((module, function.start))) is not None:
            function = function._replace(inlined=tuple(inlined))
        return name_in(mapped, function, address)

    def _module(self, number: Any) -> tuple[str, str]:
        """
        Return the name and the build ID of the module with a number in NAMES frames.

        A damaged file may lack the frame that defines the number: then the build ID is empty.
        """
        return self._modules.get(_number(number, _NUMBER_MAX), (f"module {number}", ""))


class _Ranges(Generic[_Row]):
    """Map from ranges of addresses to rows. Ranges may be nested."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, _Row]] = {}
        self._starts: list[int] = []
        self._reach: list[int] = []
        """The maximum end of each row and all rows before it: the limit of a backward search."""

    def add(self, start: int, end: int, row: _Row) -> None:
        """
        Add a row for the addresses from ``start`` up to ``end``, exclusive.

        It replaces a row with the same start that is not longer.
        """
        known = self._rows.get(start)
        if known is None or known[0] <= end:
            self._rows[start] = end, row
            self._starts.clear()

    def covering(self, number: int) -> _Row | None:
        """Return the row that covers a number, or None. If there are several, return the one that starts last."""
        if not self._starts:
            self._starts = sorted(self._rows)
            self._reach = list(accumulate((self._rows[start][0] for start in self._starts), max))
        at = bisect_right(self._starts, number) - 1
        while at >= 0 and self._reach[at] > number:
            end, row = self._rows[self._starts[at]]
            if end > number:
                return row
            at -= 1
        return None


def _rows(said: dict[str, Any], key: str, size: int) -> list[list[Any]]:
    rows = said.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == size for row in rows):
        raise TypeError(f"'{key}' is not a list of lists of {size}")
    return rows


def _number(value: Any, high: int) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise ValueError(f"{value!r:.40} is not a number between 0 and {high}")
    return value


def _range(start: Any, end: Any) -> tuple[int, int]:
    return _number(start, _ADDRESS_MAX), _number(end, _ADDRESS_MAX + 1)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _NAME_MAX:
        raise TypeError("a name is not text, or too long")
    return value
