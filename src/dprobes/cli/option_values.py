"""The evaluation of options that several verbs share, and the example programs that they may name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.rpn.compilation_passes import CompileOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click import Context, UsageError

__all__ = [
    "SUFFIXES",
    "all_examples",
    "chosen_groups",
    "compile_options",
    "example_directory",
    "example_templates",
    "find_example",
    "is_untemplated_example",
    "names_of",
    "note_groups",
    "note_word",
    "program_of",
    "seconds_of",
    "usage_error",
    "word_of_program",
]

# Usage errors, created without importing click before one occurs: the import takes a tenth of the start.


def usage_error(message: str) -> UsageError:
    """Return the error to raise for an invalid command line; click prints it with the usage of the command."""
    from click import UsageError

    return UsageError(message)


# Times on the command line: ``10s``, ``500ms``, ``2m``.


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TEXT = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>ms|s|m|h)?")


def seconds_of(text: str) -> float:
    """Return a time in seconds, the default unit; raise ``ValueError`` with a description of an invalid text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a time: write it like 10s, 500ms, 2m or 1h")
    seconds = float(match["number"]) * _UNITS[match["unit"] or "s"]
    if seconds <= 0:
        raise ValueError("a time must be greater than 0")
    return seconds


# The evaluation of options that several verbs share.


_WORD = "dprobes.program"


def note_word(context: Context, word: str) -> None:
    """Store the word that the user wrote for the argument ``PROGRAM``, for messages and names of programs."""
    context.meta[_WORD] = word


def word_of_program() -> str:
    """Return the word that the user wrote for the argument ``PROGRAM``. With ``-e``, a command stores its own word."""
    from click import get_current_context

    return str(get_current_context().meta[_WORD])


def program_of(file: Path | None, text: str | None) -> Path | str:
    """Return the file of a program, or its text; raise a usage error for neither or both."""
    if text is None and file is None:
        raise usage_error("name the file of a program, or give its text with -e TEXT")
    if text is not None and file is not None:
        raise usage_error(f"unexpected argument '{word_of_program()}': -e gives the program")
    return file if file is not None else text or ""


_GROUPS = "dprobes.groups"


def note_groups(context: Context, groups: tuple[str, ...]) -> None:
    """Store the groups of a set that the argument ``PROGRAM`` names, as in ``sqlite:latency``."""
    context.meta[_GROUPS] = groups


def chosen_groups(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the groups in the values of ``--group``, and those that the argument ``PROGRAM`` names."""
    from click import get_current_context

    context = get_current_context(silent=True)
    named = () if context is None else context.meta.get(_GROUPS, ())
    return (*named, *names_of(values))


def names_of(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in the values of ``selection_options``, separated by blanks or commas."""
    return tuple(" ".join(values).replace(",", " ").split())


def compile_options(
    defines: tuple[str, ...], includes: tuple[Path, ...], cpp: str | None, *, allow_write: bool
) -> CompileOptions:
    """
    Return the values of the options ``-D``, ``-I`` and ``--cpp``. As for a C compiler, a macro without value is 1.

    None as ``cpp`` selects the built-in preprocessor. ``allow_write`` permits instructions that change the target.
    """
    external = None
    if cpp is not None:
        from dprobes.cli.external_cpp import external_preprocessor

        external = external_preprocessor(cpp)
    pairs = tuple(
        (key.strip(), value.strip() if equals else "1")
        for key, equals, value in (define.partition("=") for define in defines)
    )
    return CompileOptions(pairs, includes, external, allow_write)


# The example programs that come with DProbes: in a checkout ``examples/``, in a wheel ``share/dprobes/examples``.


SUFFIXES = (".rpn", ".dpc")
"""Suffixes of examples in RPN, with templates in a separate directory, and in DProbes C, which print by themselves."""

_TEMPLATES = "templates"


class Example(NamedTuple):
    """An example program: its name, its file, and its purpose in a line."""

    name: str
    path: Path
    summary: str


def example_directory() -> Path | None:
    """Return the directory of the examples, or None if this installation has none."""
    for root in (Path(__file__).parents[3], Path(sys.prefix) / "share" / "dprobes"):
        if (root / "examples" / "malloc.rpn").is_file():
            return root / "examples"
    return None


def find_example(name: str) -> Path | None:
    """
    Return the file of an example (``malloc``, ``malloc.rpn`` or ``examples/malloc.rpn``).

    Return None if there is none.
    """
    directory, name = example_directory(), name.removeprefix("examples/")
    if directory is None or "/" in name:
        return None
    names = (name,) if name.endswith(SUFFIXES) else tuple(f"{name}{suffix}" for suffix in SUFFIXES)
    return next((path for each in names if (path := directory / each).is_file()), None)


def example_templates(path: Path) -> Path | None:
    """Return the directory of templates for an example in RPN, or None if ``path`` is not one, or has none."""
    directory = example_directory()
    if directory is None or path.parent != directory or path.suffix != ".rpn":
        return None
    templates = directory / _TEMPLATES
    return templates if (templates / f"{path.stem}.fmt").is_file() else None


def is_untemplated_example(file: Path | None, templates: Path) -> bool:
    """Return whether a program is an example without a template, and ``templates`` are those of the examples."""
    if file is None or (directory := example_directory()) is None:
        return False
    ours = file.resolve().parent == directory.resolve() and templates.resolve() == (directory / _TEMPLATES).resolve()
    return ours and not (templates / f"{file.stem}.fmt").is_file()


def all_examples() -> Iterator[Example]:
    """Return the examples sorted by name."""
    directory = example_directory()
    paths = () if directory is None else (path for path in directory.iterdir() if path.suffix in SUFFIXES)
    for path in sorted(paths, key=lambda path: path.stem):
        yield Example(path.stem, path, _summary(path.read_text(encoding="utf-8")))


def _summary(text: str) -> str:
    """Return the first sentence of the comment at the beginning of a program."""
    comment = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        comment.append(line.removeprefix("//").strip())
    sentence = re.match(r".*?[.?](?=\s|\Z)|.*?(?=:\s*dprobes|\s{2,}|\Z)", " ".join(comment))
    return sentence.group().rstrip(".:") if sentence is not None else ""
