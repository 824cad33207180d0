"""
The extensions that the packages of this Python installation register.

A program without ``callk`` needs no look-up. The calls of a program are checked when it is compiled. The process that
runs handlers imports the extensions found then, without a look-up of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import did_you_mean
from dprobes.errors import DprobesError, EngineError
from dprobes.extensions.extension import ENTRY_POINTS, Extension

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.rpn_program import Instruction, Program

__all__ = ["Registration", "called_extensions", "check_extensions", "load_extensions", "registrations"]


class Registration(NamedTuple):
    """A registered extension: its module, its attribute in the module, and its package."""

    name: str
    module: str
    attribute: str
    package: str


def registrations() -> list[Registration]:
    """Return all registered extensions, in the order in which they are called."""
    from importlib import metadata  # slower to import than most modules of dprobes

    found = sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.dist.name if point.dist else "")
    return [Registration(p.name, p.module, p.attr, p.dist.name if p.dist else "") for p in found]


def called_extensions(program: Program) -> tuple[Registration, ...]:
    """Return the extensions that a program may call, in order of registration: all for a ``callk`` without a name."""
    names = {instruction.operand for instruction in _calls(program)}
    if not names:
        return ()
    return tuple(r for r in registrations() if None in names or r.name in names)


def load_extensions(registered: Sequence[Registration]) -> dict[str, Extension]:
    """Return the extensions by name; raise ``EngineError`` if one cannot be loaded."""
    return {r.name: _load(r) for r in registered}


def check_extensions(program: Program, diagnostics: Diagnostics, *, allow_write: bool) -> None:
    """Add errors to ``diagnostics`` for calls of extensions that do not exist, or need ``allow_write``."""
    calls = list(_calls(program))
    if not calls:
        return
    known = registrations()
    for instruction in calls:
        name = instruction.operand
        called = [r for r in known if name is None or r.name == name]
        if not called and name is None:
            diagnostics.warning(instruction.span, "'callk' calls nothing: no package here registers an extension")
        elif not called:
            names = [r.name for r in known]
            hint = did_you_mean(str(name), names)
            if hint is None:
                hint = f"there are: {', '.join(names)}" if names else "no package here registers an extension"
            diagnostics.error(instruction.span, f"there is no extension '{name}'", hint=hint)
        for registration in called:
            _check_call(instruction, registration, called, diagnostics, allow_write=allow_write)


def _check_call(
    instruction: Instruction,
    registration: Registration,
    called: list[Registration],
    diagnostics: Diagnostics,
    *,
    allow_write: bool,
) -> None:
    others = [r.package for r in called if r.name == registration.name]
    if len(others) > 1:
        if others[0] == registration.package:
            message = f"more than one extension is called '{registration.name}': those of {' and '.join(others)}"
            diagnostics.error(instruction.span, message, hint="uninstall one of them")
        return
    try:
        extension = _load(registration)
    except DprobesError as error:
        diagnostics.error(instruction.span, error.message, hint=error.hint)
        return
    if extension.writes and not allow_write:
        diagnostics.error(
            instruction.span,
            f"'{instruction}' writes to the target: the extension '{registration.name}' does",
            hint="allow it with --allow-write",
        )


def _calls(program: Program) -> Iterator[Instruction]:
    for code in program.bodies():
        for instruction in code.instructions:
            if instruction.row.operator == "callk":
                yield instruction


def _load(registration: Registration) -> Extension:
    place = f"the extension '{registration.name}' of the package '{registration.package}'"
    try:
        found: object = importlib.import_module(registration.module)
        for attribute in filter(None, registration.attribute.split(".")):
            found = getattr(found, attribute)
    except Exception as error:
        raise EngineError(f"{place} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, Extension):
        raise EngineError(f"{place} is not a dprobes.extensions.Extension but {type(found).__name__}")
    return found
