"""
Names as people write them, looked for among those that C++ and Rust compilers give linkers.

A readable name is taken by as much of it as is written: whole, or without its parameters, without the scopes before it,
without the arguments of templates, without tags of the ABI. The more is the same, the better; of what is equally good
there must be one. Names that compilers give to something beside a function, as to thunks, are meant only as a whole.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.diagnostics import near_names
from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern
from dprobes.target.names.demangled import Demangler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ReadableName", "find_readable", "near_readable", "readable_parts"]

_MANGLED = ("_Z", "_R")
_NEAR = 3
_PARTLY = 6
"""The first rank of names of which scopes or arguments of templates were left out."""
_NEAR_MAX = 200_000
"""Mangled names of a file that are looked at for one that may be meant."""


class ReadableName(NamedTuple):
    """
    Join a linker's name with what it reads as.

    ``rank`` says how much of it was written: -1 is all, as a demangler writes it, and 0 all but for white space.
    """

    rank: int
    linker_name: str
    readable: str

    @property
    def is_whole(self) -> bool:
        """Whether all scopes and arguments of templates were written."""
        return self.rank < _PARTLY


class _Parts(NamedTuple):
    """Hold a readable name without its return type: ``path`` before the parameters, ``parameters`` with the rest."""

    path: str
    parameters: str


def readable_parts(name: str) -> tuple[str, str]:
    """Return the scopes and name of a function without return type, and its parameters with what is behind them."""
    return _parts(name)


def find_readable(names: Iterable[str], written: str) -> list[ReadableName]:
    """Return the names that are meant by what is written, the best ones only, each once."""
    wanted = _parts(_normal(written))
    word = _significant(_parts(written.strip()).path or wanted.path)
    if word is None:
        return []
    whole = f"{wanted.path}{_short(wanted.parameters)}"
    demangler, found = Demangler(), dict[str, ReadableName]()
    for name in names:
        if name.startswith(_MANGLED) and word in name and name not in found:
            readable = demangler.name_of(name)
            if readable != name and (rank := -1 if readable == written else _rank(readable, whole)) is not None:
                found[name] = ReadableName(rank, name, readable)
    best = min((each.rank for each in found.values()), default=0)
    return [each for each in found.values() if each.rank == best]


def near_readable(names: Iterable[str], written: str) -> list[str]:
    """Return up to three readable names, without parameters, that ``written`` may be a misprint of."""
    path = _parts(_normal(written)).path
    ending = path.rpartition("::")[2].lower()
    demangler, paths = Demangler(), dict[str, None]()
    for name in [name for name in names if name.startswith(_MANGLED)][:_NEAR_MAX]:
        readable = demangler.name_of(name)
        if readable != name and "[clone" not in readable:
            paths[_normal(_parts(readable).path)] = None
    slack = max(2, len(path) // 4)
    likely = [each for each in paths if each.lower().endswith(ending) or abs(len(each) - len(path)) <= slack]
    same = [each for each in likely if each.rpartition("::")[2].lower() == ending]
    near = near_names(path, likely, _NEAR)
    endings = {each.rpartition("::")[2]: each for each in paths}
    ends = [endings[each] for each in near_names(ending, endings, _NEAR, cutoff=0.8)]
    return list(dict.fromkeys([*near, *same, *ends]))[:_NEAR]


def _normal(name: str) -> str:
    """Return a name with the white space that demanglers write: none but between two words."""
    name = re.sub(r"\s+", " ", name.strip())
    name = re.sub(r"(?<=[(,<] )const (\w[\w:]*)|(?<=[(,<])const (\w[\w:]*)", lambda m: f"{m[1] or m[2]} const", name)
    return re.sub(r"(?<![\w]) | (?![\w(])|(?<=[\w]) (?=\()", "", name) if " " in name else name


_WORD = lazy_pattern(r"[A-Za-z_]\w*")
_UNNAMED = lazy_pattern(r"\{[^{}]*\}|\([^()]*\)")
"""Names of what has none in the source, and parameters; linkers have them in other words."""
_ABBREVIATED = frozenset(
    ("std", "allocator", "basic_string", "string", "basic_istream", "istream", "basic_ostream", "ostream",
     "basic_iostream", "iostream")
)  # fmt: skip
"""Words that a linker's name need not have: the Itanium ABI has abbreviations for them (5.1.10, "Compression")."""


def _significant(path: str) -> str | None:
    """Return a part of the linker's name, whatever that is otherwise; None if what is written is no name."""
    bare = _without_templates(path)
    plain = re.sub(r"operator\b.*", "", bare)
    while (fewer := _UNNAMED.sub("", plain)) != plain:
        plain = fewer
    found = _WORD.findall(plain)
    if found and found[-1] in _ABBREVIATED:
        return ""
    words = [word for word in found if word not in _ABBREVIATED]
    return words[-1] if words else "" if "operator" in bare or plain != bare else None


_SPECIAL = lazy_pattern(
    r"(?:(?:construction )?vtable|VTT|typeinfo(?: name| fn)?|guard variable|(?:non-)?virtual thunk"
    r"|covariant return thunk|reference temporary(?: #\d+)?|TLS (?:init|wrapper) function|(?:non-)?transaction clone"
    r"|hidden alias|template parameter object) (?:for|to) "
)
"""What demanglers write before the name of something that something else is made for."""
_ABI_TAG = lazy_pattern(r"\[abi:\w+\]")
_STRING = r"\bstd::basic_string<char, ?std::char_traits<char>, ?std::allocator<char> ?>"


def _short(parameters: str) -> str:
    """Return parameters as people write them: without the library's versions, and ``std::string``."""
    if "std::" not in parameters:
        return parameters
    plain = re.sub(r"\bstd::(?:__cxx11|__1)::", "std::", parameters)
    return re.sub(_STRING, "std::string", re.sub(rf"{_STRING} ?(?=\w)", "std::string ", plain))


def _rank(readable: str, wanted: str) -> int | None:
    """Return how much of a readable name is written, or None if it is another one."""
    if _SPECIAL.match(readable):
        return None
    is_clone = "[clone" in readable
    parts = _parts(re.sub(r" ?\[clone [^\]]*\]", "", readable))
    path, parameters = _normal(parts.path), _normal(_short(parts.parameters))
    if "[abi:" not in wanted:
        path = _ABI_TAG.sub("", path)
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


_SCOPE = lazy_pattern(r"(?: (?:const|volatile)| ?&&?|\[abi:\w+\])*::")
"""What is behind the parameters of a function in which something else is."""


def _parts(name: str) -> _Parts:
    """Take a normal name apart: behind the return type, before the parameters."""
    start, depth, end, position = 0, 0, len(name), 0
    while position < len(name):
        if name.startswith("operator", position) and not re.match(r"\w", name[position - 1 : position] or ":"):
            position = _behind_operator(name, position)
            continue
        if name.startswith("->", position):  # of a type of Rust's
            position += 2
            continue
        character = name[position]
        if name.startswith(("(anonymous namespace)", "{lambda"), position):
            position = _closing(name, position) + 1
            continue
        if character == "(" and depth == 0:
            behind = _closing(name, position) + 1
            if _SCOPE.match(name, behind) is None:
                end = position
                break
            position = behind
            continue
        depth += (character in "<{[") - (character in ">}]")
        if character == " " and depth == 0:
            start = position + 1
        position += 1
    return _Parts(name[start:end], name[end:])


_OPERATOR = lazy_pattern(
    r"""operator(?:\(\)|\[\]|[ ]?(?:new|delete)(?:\[\])?|""[ ]?\w+|->\*?|<=>|<<=?|>>=?|&&|\|\||\+\+|--
        |[-+*/%^&|=!<>]=?|[~,]|\s[^(]+)?(?:[ ](?=<))?""",
    re.VERBOSE,
)


def _behind_operator(name: str, start: int) -> int:
    """Return the place behind the word ``operator`` and its sign, or the type that it converts to."""
    match = _OPERATOR.match(name, start)
    return match.end() if match is not None else start + len("operator")


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
        if depth and path.startswith("->", position):
            position += 2
            continue
        character = path[position]
        depth -= character == ">" and depth > 0
        if depth == 0 and character not in "<>":
            yield character
        depth += character == "<"
        position += 1
