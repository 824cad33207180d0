"""
Names as people write them, looked for among those that C++ and Rust compilers give linkers.

A readable name is taken by as much of it as is written: whole, or without its parameters, without the scopes before it,
without the arguments of templates. The more is the same, the better; of what is equally good there must be one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern
from dprobes.target.names.demangled import Demangler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ReadableName", "find_readable", "near_readable", "readable_parts"]

_MANGLED = ("_Z", "_R")
_NEAR = 3
_NEAR_MAX = 200_000
"""Mangled names of a file that are looked at for one that may be meant."""


class ReadableName(NamedTuple):
    """Join a linker's name with what it reads as; ``rank`` says how much of it was written, 0 being all."""

    rank: int
    linker_name: str
    readable: str


class _Parts(NamedTuple):
    """Hold a readable name without its return type: ``path`` before the parameters, ``parameters`` with the rest."""

    path: str
    parameters: str


def readable_parts(name: str) -> tuple[str, str]:
    """Return the scopes and name of a function without return type, and its parameters with what is behind them."""
    return _parts(name)


def find_readable(names: Iterable[str], written: str) -> list[ReadableName]:
    """Return the names that are meant by what is written, the best ones only, each once."""
    wanted = "".join(_parts(_normal(written)))
    word = _significant(wanted)
    if word is None:
        return []
    demangler, found = Demangler(), dict[str, ReadableName]()
    for name in names:
        if name.startswith(_MANGLED) and word in name and name not in found:
            readable = demangler.name_of(name)
            if readable != name and (rank := _rank(readable, wanted)) is not None:
                found[name] = ReadableName(rank, name, readable)
    best = min((each.rank for each in found.values()), default=0)
    return [each for each in found.values() if each.rank == best]


def near_readable(names: Iterable[str], written: str) -> list[str]:
    """Return up to three readable names, without parameters, that ``written`` may be a misprint of."""
    from difflib import get_close_matches

    path = _parts(_normal(written)).path
    ending = path.rpartition("::")[2].lower()
    demangler, paths = Demangler(), dict[str, None]()
    for name in [name for name in names if name.startswith(_MANGLED)][:_NEAR_MAX]:
        readable = demangler.name_of(name)
        if readable != name and "[clone" not in readable:
            paths[_parts(_normal(readable)).path] = None
    slack = max(2, len(path) // 4)
    likely = [each for each in paths if each.lower().endswith(ending) or abs(len(each) - len(path)) <= slack]
    same = [each for each in likely if each.rpartition("::")[2].lower() == ending]
    near = get_close_matches(path, likely, n=_NEAR, cutoff=0.7)
    endings = {each.rpartition("::")[2]: each for each in paths}
    ends = [endings[each] for each in get_close_matches(ending, endings, n=_NEAR, cutoff=0.8)]
    return list(dict.fromkeys([*near, *same, *ends]))[:_NEAR]


def _normal(name: str) -> str:
    """Return a name with the white space that demanglers write: none but between two words."""
    name = re.sub(r"\s+", " ", name.strip())
    name = re.sub(r"(?<=[(,<] )const (\w[\w:]*)|(?<=[(,<])const (\w[\w:]*)", lambda m: f"{m[1] or m[2]} const", name)
    return re.sub(r"(?<![\w]) | (?![\w(])|(?<=[\w]) (?=\()", "", name) if " " in name else name


_WORD = lazy_pattern(r"[A-Za-z_]\w*")


def _significant(name: str) -> str | None:
    """Return a part of the linker's name, whatever that is otherwise; None if what is written is no name."""
    path = _without_templates(_parts(name).path)
    words: list[str] = [word for word in _WORD.findall(re.sub(r"operator\b.*", "", path)) if word != "std"]
    return words[-1] if words else "" if "operator" in path else None


def _rank(readable: str, wanted: str) -> int | None:
    """Return how much of a readable name is written, or None if it is another one."""
    is_clone = "[clone" in readable
    normal = _normal(re.sub(r" ?\[clone [^\]]*\]", "", readable))
    path, parameters = _parts(normal)
    bare = _without_templates(path)
    plain = re.sub(r"(?<=\))(?: ?(?:const|volatile)| ?&&?)+$", "", parameters)
    rank = 0
    for name in (path, bare):
        forms = (f"{name}{parameters}", f"{name}{plain}", name)
        for is_whole in (True, False):
            for form in forms:
                if form == wanted or (not is_whole and form.endswith(f"::{wanted}")):
                    return 2 * rank + is_clone
                rank += 1
    return None


def _parts(name: str) -> _Parts:
    """Take a normal name apart: behind the return type, before the parameters."""
    start, depth, end, position = 0, 0, len(name), 0
    while position < len(name):
        if name.startswith("operator", position) and not re.match(r"\w", name[position - 1 : position] or ":"):
            position = _behind_operator(name, position)
            continue
        character = name[position]
        if name.startswith(("(anonymous namespace)", "{lambda"), position):
            position = _closing(name, position) + 1
            continue
        if character == "(" and depth == 0:
            end = position
            break
        depth += (character in "<{[") - (character in ">}]")
        if character == " " and depth == 0:
            start = position + 1
        position += 1
    return _Parts(name[start:end], name[end:])


def _behind_operator(name: str, start: int) -> int:
    """Return the place behind the word ``operator`` and its sign, or the type that it converts to."""
    match = re.match(r"operator(?:\(\)|\[\]| ?(?:new|delete)(?:\[\])?|[^\w\s(]+|\s[^(]+)?", name[start:])
    return start + (match.end() if match is not None else len("operator"))


def _closing(name: str, start: int) -> int:
    """Return the place of the bracket that closes the first one from ``start`` on."""
    depth = 0
    for position in range(start, len(name)):
        depth += (name[position] in "({") - (name[position] in ")}")
        if depth == 0 and name[position] in ")}":
            return position
    return len(name) - 1


def _without_templates(path: str) -> str:
    """Return a path without the arguments of templates."""
    return "".join(_outside(path))


def _outside(path: str) -> Iterator[str]:
    depth, position = 0, 0
    while position < len(path):
        if depth == 0 and path.startswith("operator", position):
            end = _behind_operator(path, position)
            yield path[position:end]
            position = end
            continue
        character = path[position]
        depth -= character == ">" and depth > 0
        if depth == 0 and character not in "<>":
            yield character
        depth += character == "<"
        position += 1
