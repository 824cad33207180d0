"""What the values of options mean that several verbs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.cli.usageerror import usage_error
from dprobes.rpn.pipeline import CompileOptions

if TYPE_CHECKING:
    from pathlib import Path

    from click import Context

__all__ = ["compile_options", "names_of", "note_word", "program_of", "word_of_program"]

_WORD = "dprobes.program"


def note_word(context: Context, word: str) -> None:
    """Keep the word that ``PROGRAM`` was given."""
    context.meta[_WORD] = word


def word_of_program() -> str:
    """Return the word of the command line that ``PROGRAM`` took: that of a command where the program is a text."""
    from click import get_current_context

    return str(get_current_context().meta[_WORD])


def program_of(file: Path | None, text: str | None) -> Path | str:
    """Return the file of a program, or its text; it is a usage error if there is neither, or both."""
    if text is None and file is None:
        raise usage_error("name the file of a program, or give its text with -e TEXT")
    if text is not None and file is not None:
        raise usage_error(f"'{word_of_program()}' is too much: the program is the text of -e")
    return file if file is not None else text or ""


def names_of(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in the values of ``selection_options``, separated by blanks or commas."""
    return tuple(" ".join(values).replace(",", " ").split())


def compile_options(
    defines: tuple[str, ...], includes: tuple[Path, ...], cpp: str | None, *, allow_write: bool
) -> CompileOptions:
    """Return the values of ``program_options``; a macro without value is 1, as for a C compiler."""
    external = None
    if cpp is not None:
        from dprobes.cli.externalcpp import external_preprocessor

        external = external_preprocessor(cpp)
    pairs = tuple(
        (key.strip(), value.strip() if equals else "1")
        for key, equals, value in (define.partition("=") for define in defines)
    )
    return CompileOptions(pairs, includes, external, allow_write)
