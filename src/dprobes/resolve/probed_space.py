"""
The spaces of probepoints: the files of a module, every process, the whole system, or the kernel.

The space of a program selects the functions that find its probepoints: ``local_module`` has a case for each.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.errors import TargetError
from dprobes.rpn.operands import like_statement
from dprobes.rpn.program_needs import skipping_instruction, watches_user_addresses
from dprobes.rpn.rpn_program import Expression, ModuleType

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.rpn_program import ProbeDefinition, Program

__all__ = ["ANYWHERE", "MACHINE", "EveryProcess", "Space", "SymbolSpace", "check_skip", "pushed_symbols", "space_of"]


def pushed_symbols(
    program: Program, address_of: Callable[[str], int], diagnostics: Diagnostics
) -> tuple[tuple[str, int], ...]:
    """Return the addresses of the symbols that handlers push; add an error for each that has none."""
    symbols: dict[str, int] = {}
    for code in program.bodies():
        for instruction in code.instructions:
            match instruction.operand:
                case Expression(_, str(name)) if name not in symbols:
                    try:
                        symbols[name] = address_of(name)
                    except TargetError as error:
                        hint = error.hint or like_statement(instruction.row.operator, name)
                        diagnostics.error(instruction.operand_place, error.message, hint=hint)
    return tuple(symbols.items())


def check_skip(
    program: Program, definition: ProbeDefinition, where: str, diagnostics: Diagnostics, *, begins: bool
) -> None:
    """Add an error if a handler skips the function, and no function ``begins`` at the place ``where``."""
    if begins:
        return
    if (skip := skipping_instruction(program, definition)) is not None:
        diagnostics.error(
            skip.span,
            f"'skip' returns from the function that begins at the probepoint, but none begins at {where}",
            hint="only there the return address is on top of the stack: write 'offset =' with the function's name",
        )


ANYWHERE = "*"
"""Module name in programs with samplers of all code, whatever the CPU executes."""
MACHINE = "machine"
"""Module name in programs about the machine itself, for any software on it."""


class Space(Enum):
    """The spaces of a program's probepoints; the values are text for users."""

    MODULE = "the files of a module"
    PROCESSES = "every process"
    SYSTEM = "whatever runs"
    KERNEL = "the kernel and its modules"


def space_of(program: Program) -> Space:
    """Return the space of a program's probepoints."""
    if program.name == ANYWHERE:
        return Space.SYSTEM
    if watches_user_addresses(program) and program.name != MACHINE:
        return Space.PROCESSES
    return Space.MODULE if program.modtype is ModuleType.USER else Space.KERNEL


class SymbolSpace(Protocol):
    """A space in which symbols have addresses; a ``Module`` is one."""

    @property
    def path(self) -> Path:
        """The path of the file, or the name of the space in messages."""

    @property
    def word_size(self) -> int:
        """Size of an address in bytes."""

    def address_of(self, symbol: str) -> int:
        """Return the link address of a symbol; raise ``TargetError`` if there is none."""


class EveryProcess(NamedTuple):
    """The processes of one architecture: a space without symbols, for programs that watch addresses."""

    architecture: Architecture

    @property
    def path(self) -> Path:
        """The name of the space in messages, in the place of a file name."""
        return Path(f"{self.architecture.name} programs")

    @property
    def word_size(self) -> int:
        """Size of an address in bytes."""
        return self.architecture.word_size

    def address_of(self, symbol: str) -> int:
        """Raise ``TargetError``: symbols belong to files."""
        raise TargetError(f"'{symbol}' is not an address of every program")
