"""The arguments of verbs, as a client sent them: each is checked before it is used."""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dprobes.engines.choice import NAMES, EngineOptions
from dprobes.engines.interface import Scope
from dprobes.errors import ManagerError
from dprobes.record.layout import Item
from dprobes.sinks.interface import LOG_FORMATS

if TYPE_CHECKING:
    from dprobes.ppdf import Ppdf

__all__ = ["Arguments", "Insertion"]

_NAME_MAX = 255
"""Bytes of a program's name, as of a file's (NAME_MAX of limits.h)."""

_SHOWN = 40
"""Characters of a name that is refused that are shown."""


@dataclass(slots=True)
class Insertion:
    """
    Say what is to be inserted, and how.

    ``name`` is the one that the user gives it, None for the module's. ``uses_own_symbols`` allows modules of which the
    PPDF knows nothing. ``directory`` is the client's current one. ``targets`` get the records, in ``format``.
    ``reason`` is filled in by whoever chooses the engine.
    """

    ppdf: Ppdf
    data: bytes
    scope: Scope
    options: EngineOptions
    name: str | None = None
    merges: bool = False
    replaces: bool = False
    groups: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    engine: str = "auto"
    items: Item = field(default=Item.MAJOR | Item.MINOR)
    verifies_opcodes: bool = True
    verifies_build_id: bool = True
    uses_own_symbols: bool = False
    directory: str = "/"
    targets: tuple[str, ...] = ()
    format: str = "text"
    reason: str | None = None


class Arguments:
    """Take arguments out of what a client sent; whatever is not as documented raises ``ManagerError``."""

    def __init__(self, verb: str, values: dict[str, Any]) -> None:
        self._verb = verb
        self._values = dict(values)

    def check_all_used(self) -> None:
        """Raise ``ManagerError`` if there are arguments that nobody asked for."""
        if self._values:
            names = ", ".join(f"'{name}'" for name in sorted(self._values))
            raise ManagerError(f"the manager's verb '{self._verb}' has no argument {names}")

    def _take(self, name: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self._values.pop(name, None)
        if value is not None and not isinstance(value, kind):
            raise ManagerError(f"argument '{name}' of '{self._verb}' must be {expected}")
        return value

    def text(self, name: str) -> str | None:
        """Return a text, None if it was not given."""
        value: str | None = self._take(name, str, "a text")
        self._check_text(name, value)
        return value

    def _check_text(self, name: str, value: str | None) -> None:
        """Refuse what is no path and no name: a NUL, and half a character, other than those for bytes in names."""
        try:
            is_fine = value is None or b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            is_fine = False
        if not is_fine:
            raise ManagerError(f"argument '{name}' of '{self._verb}' has a character no name has")

    def _program_name(self, name: str) -> str | None:
        """Return the name that a program is to have, which is printed in tables; None if it was not given."""
        value = self.text(name)
        if value is None:
            return None
        if not value.isprintable() or not 0 < len(os.fsencode(value)) <= _NAME_MAX:
            raise ManagerError(
                f"a program cannot be named {_shortened(value)!r}",
                hint=f"a name is a text of 1 to {_NAME_MAX} bytes without control characters",
            )
        return value

    def required_text(self, name: str) -> str:
        """Return a text that must be there."""
        value = self.text(name)
        if not value:
            raise ManagerError(f"'{self._verb}' needs the argument '{name}'")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        values = self._take(name, list, "a list of texts") or []
        if not all(isinstance(value, str) for value in values):
            raise ManagerError(f"argument '{name}' of '{self._verb}' must be a list of texts")
        for value in values:
            self._check_text(name, value)
        return tuple(values)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a truth value."""
        value = self._take(name, bool, "true or false")
        return default if value is None else bool(value)

    def number(self, name: str, default: int | None = None, *, low: int = 0, high: int = 1 << 63) -> int | None:
        """Return a number."""
        value = self._take(name, int, "a number")
        if value is None:
            return default
        if not _is_count(value) or not low <= value <= high:
            raise ManagerError(f"argument '{name}' of '{self._verb}' must be a number from {low} to {high}")
        return int(value)

    def range(self, name: str, count: int) -> tuple[int, int]:
        """Return the first and the last index that are meant, by default all of ``count``; clipped to that."""
        value = self._take(name, list, "two numbers")
        if value is None:
            return 0, count - 1
        if len(value) != 2 or not all(map(_is_count, value)) or value[0] > value[1]:
            raise ManagerError(f"argument '{name}' of '{self._verb}' must be two numbers, a lower and a higher one")
        return value[0], min(value[1], count - 1)

    def codes(self, name: str) -> tuple[int, int] | None:
        """Return major and minor code of a probepoint."""
        value = self._take(name, list, "a major and a minor code")
        if value is None:
            return None
        if len(value) != 2 or not all(map(_is_count, value)):
            raise ManagerError(f"argument '{name}' of '{self._verb}' must be a major and a minor code")
        return value[0], value[1]

    def binary(self, name: str) -> bytes:
        """Return binary data that must be there."""
        try:
            return base64.b64decode(self.required_text(name), validate=True)
        except (binascii.Error, ValueError):
            raise ManagerError(f"argument '{name}' of '{self._verb}' is not base64 text") from None

    @staticmethod
    def encoded(data: bytes) -> str:
        """Return binary data as it is sent."""
        return base64.b64encode(data).decode("ascii")

    def insertion(self) -> Insertion:
        """Return the arguments of ``insert``; raise ``FormatError`` for a PPDF that is none."""
        from dprobes.ppdf import decode

        data = self.binary("ppdf")
        engine = "auto" if (engine := self.text("engine")) is None else engine
        if engine not in NAMES:
            raise ManagerError(f"there is no engine '{engine}'", hint=f"engines are {', '.join(NAMES)}")
        merges, replaces = self.flag("merge"), self.flag("replace")
        if merges and replaces:
            raise ManagerError("a program is either merged (--merge) or replaces another one (--replace)")
        items = Item(self.number("items", int(Item.MAJOR | Item.MINOR), high=0xFFFF) or 0)
        return Insertion(
            ppdf=decode(data),
            data=data,
            scope=self._scope(),
            options=EngineOptions(
                allow_write=self.flag("allow_write"),
                core_directory=self.text("core_directory") or ".",
                pid_namespace=self.flag("pid_namespace"),
                exact=self.flag("exact"),
                ring_size=self.number("ring_size", None, low=1 << 12, high=1 << 30) or 0,
            ),
            name=self._program_name("as"),
            merges=merges,
            replaces=replaces,
            groups=self.texts("groups"),
            types=self.texts("types"),
            engine=engine,
            items=(items & sum(Item)) & ~(Item.WIDE | Item.STACK_TRACE) | Item.MAJOR | Item.MINOR,
            verifies_opcodes=self.flag("verify_opcodes", default=True),
            verifies_build_id=self.flag("verify_build_id", default=True),
            uses_own_symbols=self.flag("own_symbols"),
            directory=self.text("directory") or "/",
            targets=self.texts("targets"),
            format=self.format(),
        )

    def _scope(self) -> Scope:
        values = self._take("scope", dict, "an object") or {}
        inner = Arguments(f"{self._verb}.scope", values)
        scope = Scope(
            pid=inner.number("pid", low=1, high=1 << 22),
            cgroup=inner.text("cgroup"),
            uid=inner.number("uid", high=0xFFFF_FFFF),
            follow=inner.flag("follow", default=True),
            program=inner.text("program"),
        )
        inner.check_all_used()
        if scope.program is not None and (scope.pid is None or not scope.program.startswith("/")):
            raise ManagerError("'program' of a scope is the path of what its process 'pid' is about to execute")
        if sum(each is not None for each in (scope.pid, scope.cgroup, scope.uid)) > 1:
            raise ManagerError("a scope is one of a process, a cgroup, and a user")
        return scope

    def format(self) -> str:
        """Return the name of a formatter."""
        name = "text" if (name := self.text("format")) is None else name
        if name not in LOG_FORMATS:
            raise ManagerError(f"there is no format '{name}'", hint=f"formats are {', '.join(LOG_FORMATS)}")
        return name


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_count(value: object) -> bool:
    """Return whether a JSON value is a number from 0; ``true`` is one to Python."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
