"""
The instrumentation sets of a machine: those of the package, of the administrator, and of the user.

Root reads a set only if no other user can change it: the directory with all its parents, and each file in it. Sets of
the package are as trustworthy as its code, and are not examined. A name means one set: if several directories have it,
that is an error.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Diagnostics, did_you_mean
from dprobes.errors import DprobesError, TargetError, reason_of
from dprobes.sets import SET_FILE, is_set_name, is_view_name, view_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.sets.set_description import InstrumentationSet

__all__ = [
    "ListedSet",
    "SetChoice",
    "SetQuery",
    "choose_set",
    "is_view",
    "listed_sets",
    "load_set",
    "query_of",
    "registered_majors",
    "set_directories",
    "table_of",
]

_REGISTRY = "majors.toml"
_FREE = 255
"""The greatest major code that is never registered."""

_SIZE_MAX = 1 << 20
"""Maximum size of ``set.toml`` in bytes."""


class SetChoice(NamedTuple):
    """
    A set that a command line names: the path of its ``set.toml``, and the chosen groups, none for all.

    The path of a view has the name of the view as another component.
    """

    path: Path
    groups: tuple[str, ...]


class ListedSet(NamedTuple):
    """A set, or the reason for which its directory cannot be used."""

    name: str
    directory: Path
    content: InstrumentationSet | DprobesError


def set_directories(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the directories that are searched for sets: of the package, of the user, of the administrator."""
    configuration = environment.get("XDG_CONFIG_HOME", "")
    base = Path(configuration) if configuration.startswith("/") else Path("~/.config").expanduser()
    return (_package(), base / "dprobes" / "sets", Path("/etc/dprobes/sets"))


def _package() -> Path:
    return Path(__file__).parent


def registered_majors() -> dict[str, int]:
    """Return the registered major codes by the names of sets."""
    import tomllib

    content = tomllib.loads((_package() / _REGISTRY).read_text(encoding="utf-8"))
    return {str(name): int(major) for name, major in content["majors"].items()}


def listed_sets() -> list[ListedSet]:
    """Return all sets in the searched directories, by name."""
    found = []
    for parent in set_directories():
        for directory in _sets_in(parent):
            try:
                content: InstrumentationSet | DprobesError = load_set(directory / SET_FILE)
            except DprobesError as error:
                content = error
            found.append(ListedSet(directory.name, directory, content))
    return sorted(found, key=lambda each: each.name)


def _sets_in(parent: Path) -> list[Path]:
    """Return the directories with a set below one of the searched directories."""
    try:
        names = sorted(entry.name for entry in parent.iterdir())
    except OSError:
        return []
    return [parent / name for name in names if is_set_name(name) and (parent / name / SET_FILE).is_file()]


def choose_set(word: str) -> SetChoice | None:
    """
    Return the set that a word of a command line means; None if it means none.

    The word is the name of a set, or the path of its directory, which contains a slash. Groups may follow a colon, or
    the name of a view a slash: ``sqlite``, ``sqlite:latency``, ``./my/sqlite:latency,errors``, ``sqlite/queries``.
    Raise ``TargetError`` if several directories have a set of this name, or the set has no such group or view.
    """
    name, _, groups = word.rpartition(":") if ":" in word else (word, "", "")
    path = _description_of(name)
    if path is None:
        return _choose_view(name, groups)
    chosen = tuple(filter(None, groups.replace(",", " ").split()))
    if chosen:
        known = load_set(path).groups
        for group in chosen:
            if group not in known:
                hint = did_you_mean(group, known) or f"its groups are: {', '.join(known)}"
                raise TargetError(f"the set '{path.parent.name}' has no group '{group}'", hint=hint)
    return SetChoice(path, chosen)


def _description_of(name: str) -> Path | None:
    """Return the ``set.toml`` of a set, by its name or the path of its directory; None if there is no such set."""
    if "/" in name:
        path = Path(name) / SET_FILE
        return path if path.is_file() else None
    if not is_set_name(name):
        return None
    found = [each for parent in set_directories() for each in _sets_in(parent) if each.name == name]
    if len(found) > 1:
        where = " and ".join(f"'{each}'" for each in found)
        raise TargetError(f"there are two sets '{name}': {where}", hint="name one by its path, or rename one")
    return found[0] / SET_FILE if found else None


def _choose_view(word: str, groups: str) -> SetChoice | None:
    """Return the view that a word ``SET/VIEW`` means; None if it has another form, or there is no such set."""
    name, slash, view = word.rpartition("/")
    path = _description_of(name) if slash and is_view_name(view) else None
    if path is None:
        return None
    known = [each.name for each in load_set(path).views]
    if view not in known:
        there = f"its views are: {', '.join(known)}" if known else "it has none"
        message = f"the set '{path.parent.name}' has no view '{view}', and there is no file '{word}'"
        raise TargetError(message, hint=did_you_mean(view, known) or there)
    if groups:
        raise TargetError(f"a view has no groups: '{word}:{groups}'", hint=f"write '{word}'")
    return SetChoice(path / view, ())


def is_view(word: str) -> bool:
    """Return whether a word of a command line names a view by the name of its set, not by its path."""
    name, _, view = word.partition("/")
    path = _description_of(name) if is_set_name(name) and is_view_name(view) else None
    return path is not None and any(each.name == view for each in load_set(path).views)


class SetQuery(NamedTuple):
    """The query of a view in SQL, and the names of the probes whose tables it reads."""

    sql: str
    probes: tuple[str, ...]


def table_of(probe: str) -> str:
    """Return the name of the table with the records of a set's probe: ``sqlite_statement_step``."""
    return probe.replace(".", "_")


def query_of(word: str) -> SetQuery | None:
    """
    Return the query of the view that a word ``SET/VIEW`` means; None if the word has another form, or there is no set.

    Raise ``TargetError`` if the set has no such view, or the view is a program.
    """
    chosen = choose_set(word) if "/" in word and not any(map(str.isspace, word)) else None
    name = None if chosen is None else view_in(chosen.path)
    if chosen is None or name is None:
        return None
    found = load_set(chosen.path.parent)
    view = next(each for each in found.views if each.name == name)
    if not view.sql:
        raise TargetError(f"'{word}' is a program, not a query", hint=f"use 'dprobes run {word}'")
    words = set(re.findall(r"\w+", view.sql))
    return SetQuery(view.sql, tuple(probe.name for probe in found.probes if table_of(probe.name) in words))


def load_set(path: Path) -> InstrumentationSet:
    """
    Return the set with this ``set.toml``.

    Raise ``SourceError`` for errors in it, and ``TargetError`` if it cannot be read, or root must not trust it.
    """
    from dprobes.sets.set_description import parse_set

    directory = path.parent.resolve()
    if os.geteuid() == 0 and not directory.is_relative_to(_package()):
        _check_trusted(directory)
    try:
        data = (directory / SET_FILE).read_bytes()
        text = data[: _SIZE_MAX + 1].decode("utf-8")
    except OSError as error:
        raise TargetError(f"cannot read '{path}': {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise TargetError(f"'{path}' is not UTF-8 at byte {error.start}") from error
    if len(data) > _SIZE_MAX:
        raise TargetError(f"'{path}' is larger than {_SIZE_MAX >> 20} MiB")
    found = parse_set(directory, text)
    _check_major(found)
    _check_files(found)
    return found


def _check_trusted(directory: Path) -> None:
    """Raise ``TargetError`` if a user other than root can change a set, or add files to it."""
    from dprobes.cache_files import is_trusted, trusted_directory

    hint = "give the directory, its parents and its files to root, without write permission for others"
    try:
        with trusted_directory(str(directory)) as descriptor:
            for name in sorted(os.listdir(descriptor)):  # noqa: PTH208 - a descriptor
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                where = f"'{directory}/{name}'"
                if not stat.S_ISREG(status.st_mode):
                    raise TargetError(
                        f"{where} is not a regular file, and root reads no set with such files",
                        hint="move it out of the set's directory",
                    )
                if not is_trusted(status):
                    raise TargetError(f"root reads no set that others can change: {where}", hint=hint)
    except PermissionError as error:
        raise TargetError(f"root reads no set that others can change: '{directory}'", hint=hint) from error
    except OSError as error:
        raise TargetError(f"cannot read '{directory}': {reason_of(error)}") from error


def _check_major(found: InstrumentationSet) -> None:
    """Raise ``SourceError`` if the major code of a set is registered for another one."""
    registered = registered_majors()
    owner = next((name for name, major in registered.items() if major == found.major and name != found.name), None)
    own = registered.get(found.name)
    if owner is None and (own is None or own == found.major):
        return
    diagnostics = Diagnostics()
    if owner is not None:
        message = f"the major code {found.major} is registered for the set '{owner}'"
    else:
        message = f"the set '{found.name}' has the registered major code {own}, not {found.major}"
    diagnostics.error(found.major_span, message, hint=f"codes up to {_FREE} are free for sets of your own")
    diagnostics.raise_if_errors()


def _check_files(found: InstrumentationSet) -> None:
    """Raise ``SourceError`` if a file that the description names is missing."""
    diagnostics = Diagnostics()
    for probe in found.probes:
        if not (found.directory / probe.file).is_file():
            diagnostics.error(probe.span, f"'{found.directory}' has no file '{probe.file}'")
    for view in found.views:
        if view.file and not (found.directory / view.file).is_file():
            diagnostics.error(view.span, f"'{found.directory}' has no file '{view.file}'")
    diagnostics.raise_if_errors()
