"""
What a text of ``-e`` was compiled to, kept in the cache directory for the next time.

An entry holds the program, its places in the file of its module, and what the engine has worked out about these. It
counts for the same text and options, found in the same file, with all files that were read in the same state, and with
the same code of DProbes. What depends on anything else is compiled each time: a program that includes files, one with
warnings, for several modules, or for the kernel.
"""

from __future__ import annotations

import contextlib
import os
import sys
from binascii import crc32
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.cachefiles import cache_directory, read_cached
from dprobes.cli.runs.headstarts import SWITCH, code_state, file_state
from dprobes.lazydataclass import dataclass
from dprobes.target.notedfiles import noted_files
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dprobes.api.compiledprogram import CompiledProgram
    from dprobes.engines.insertion import Vantage
    from dprobes.resolve.localmodule import Compiled
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.pipeline import CompileOptions
    from dprobes.rpn.program import Program
    from dprobes.target.notedfiles import FileState

__all__ = ["Entry", "KeptCompilation"]

FORMAT = 2
"""The number of this form of entries."""

_ENTRIES_MAX = 64
_ANSWERS_MAX = 32  # of engines, in an entry: other options and scopes ask other questions
_NUMBER = 4  # bytes of the checksum at the beginning


@dataclass(frozen=True, slots=True)
class Entry:
    """
    Hold what was compiled.

    ``key`` says of what. ``files`` are those that were read, ``code`` those of DProbes itself.
    """

    key: str
    path: str
    files: Mapping[str, FileState | None]
    code: tuple[tuple[str, int, int], ...]
    program: Program
    templates: Mapping[str, bytes]
    resolved: ResolvedModule


class KeptCompilation:
    """The compilation of one text, which may be known; ``directory`` is by default the user's."""

    def __init__(
        self,
        text: Path | str,
        options: CompileOptions,
        module: str,
        engine: str,
        vantage: Vantage,
        *,
        others: Sequence[object] = (),
        directory: str | None = None,
    ) -> None:
        """``others`` are options that change what a program is compiled to: with one of them nothing is kept."""
        self._directory = directory or f"{cache_directory()}/compiled"
        self._vantage, self._allow_write = vantage, options.allow_write
        self._files: dict[str, FileState | None] = {}
        is_plain = isinstance(text, str) and "#" not in text and options.cpp is None and not any(others)
        self._is_kept = is_plain and SWITCH not in os.environ
        self._key = ""
        self.known: Entry | None = None
        self._entry: Entry | None = None
        if self._is_kept:
            self._key = repr((FORMAT, __version__, sys.version, text, options, module, engine, _directory()))
            self.known = self._entry = self._recalled()
        self._answers = self._count_answers()

    @property
    def _name(self) -> str:
        return f"{crc32(self._key.encode('utf-8', 'surrogateescape')):08x}"

    def _recalled(self) -> Entry | None:
        content = read_cached(self._directory, self._name)
        if content is None or int.from_bytes(content[:_NUMBER], "little") != crc32(content[_NUMBER:]):
            return None
        from dprobes.cli.compilationpickle import unpickled

        entry = unpickled(content[_NUMBER:])
        if not isinstance(entry, Entry) or entry.key != self._key:
            return None
        return entry if self._counts(entry) else None

    def _counts(self, entry: Entry) -> bool:
        from dprobes.errors import TargetError
        from dprobes.target.modules import find_module

        if any(file_state(path) != state for path, state in entry.files.items()):
            return False
        if any(code_state(each[0]) != each for each in entry.code):
            return False
        try:
            found = find_module(entry.program.name, pid=self._vantage.tid, command=self._vantage.command)
        except TargetError:
            return False
        return str(found) == entry.path

    @property
    def loaded(self) -> CompiledProgram | None:
        """The program, as it would be loaded; None if it is not known."""
        if self.known is None:
            return None
        from dprobes.api.compiledprogram import CompiledProgram
        from dprobes.diagnostics import Diagnostics
        from dprobes.target.location import OWN_SYMBOLS

        known = self.known
        return CompiledProgram(known.program, OWN_SYMBOLS, Diagnostics(), self._allow_write, templates=known.templates)

    def places_of(self, program: Program) -> ResolvedModule | None:
        """Return what is known of the places of a program, which may have become another one meanwhile."""
        return self.known.resolved if self.known is not None and program is self.known.program else None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note which files are read, for an entry."""
        if not self._is_kept or self.known is not None:
            yield
            return
        with noted_files() as files:
            try:
                yield
            finally:
                self._files |= files

    def keep(self, loaded: CompiledProgram, compiled: Compiled) -> None:
        """Keep what was compiled, if it is new, and may be kept; or what the engine has worked out besides."""
        if self.known is not None:
            if self._answers < self._count_answers() <= _ANSWERS_MAX:
                self._write(replace(self.known, code=_code()))
            return
        if self._is_kept and self._may_be_kept(loaded, compiled):
            assert compiled.resolved is not None
            path = str(compiled.resolved.module.path)
            known = loaded.program, loaded.templates, compiled.resolved
            self._entry = Entry(self._key, path, self._files, _code(), *known)
            self._write(self._entry)

    @property
    def sources(self) -> tuple[Mapping[str, FileState | None] | None, tuple[tuple[str, int, int], ...]]:
        """The files, and those of our code, that what is kept was made from; no files if nothing is kept."""
        return (None, ()) if self._entry is None else (self._entry.files, self._entry.code)

    def _count_answers(self) -> int:
        known = self.known.resolved.answers if self.known is not None else None
        return 0 if known is None else len(known)

    def _write(self, entry: Entry) -> None:
        from dprobes.cachefiles import make_room, write_cached
        from dprobes.cli.compilationpickle import pickled

        if (content := pickled(entry)) is None:
            return
        make_room(self._directory, _ENTRIES_MAX)
        write_cached(self._directory, self._name, crc32(content).to_bytes(_NUMBER, "little") + content)

    def _may_be_kept(self, loaded: CompiledProgram, compiled: Compiled) -> bool:
        from dprobes.rpn.program import calls_extensions

        resolved = compiled.resolved
        return (
            resolved is not None
            and not loaded.is_joined
            and compiled.program is loaded.program
            and not len(compiled.diagnostics)
            and not len(loaded.diagnostics)
            and not resolved.left_out
            and not calls_extensions(loaded.program)
            and str(resolved.module.path) in self._files
            and not any(path.startswith("/proc/") for path in self._files)
        )


def _code() -> tuple[tuple[str, int, int], ...]:
    """Return the states of the files of our code that this process has imported, and of the decoder's."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("dprobes", "iced_x86")]
    sources = sorted({source for module in modules if (source := getattr(module, "__file__", None))})
    return tuple(state for source in sources if (state := code_state(source)) is not None)


def _directory() -> str:
    """Return the current directory, which names of files may begin at; empty if it has been removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - no Path is needed
    except OSError:
        return ""
