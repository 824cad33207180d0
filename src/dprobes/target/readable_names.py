"""
Readable names of Rust's and C++'s functions, from the names that compilers pass to linkers.

A Rust name has one of two forms: that of C++ with a hash as its last part, ``_ZN4core3fmt5write17h0123456789abcdefE``,
or that of RFC 2603, ``_RNvNtCs1234_4core3fmt5write``. Hashes, which distinguish builds and crates, are left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import near_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Demangler", "ReadableName", "find_readable", "near_readable", "readable_parts", "rust_name"]

_LEGACY = re.compile(r"_ZN(?P<parts>.*)17h[0-9a-f]{16}E(?P<clone>\..*)?", re.DOTALL)
_ESCAPES = {"SP": "@", "BP": "*", "RF": "&", "LT": "<", "GT": ">", "LP": "(", "RP": ")", "C": ","}
_ESCAPE = re.compile(r"\$(\w{1,8})\$")

_RESULT_MAX = 4096
"""Maximum length of a name in characters. Repeated references can make a name of any length."""
_DEPTH_MAX = 200
_STEPS_MAX = 10_000

_BASIC = {
    "a": "i8", "b": "bool", "c": "char", "d": "f64", "e": "str", "f": "f32", "h": "u8", "i": "isize", "j": "usize",
    "l": "i32", "m": "u32", "n": "i128", "o": "u128", "p": "_", "s": "i16", "t": "u16", "u": "()", "v": "...",
    "x": "i64", "y": "u64", "z": "!",
}  # fmt: skip
_SIGNED = "aslxni"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def rust_name(symbol: str) -> str | None:
    """Return the readable name of a Rust symbol, or None if it is another symbol, or malformed."""
    if (match := _LEGACY.fullmatch(symbol)) is not None:
        return _legacy(match["parts"])
    if not symbol.startswith("_R"):
        return None
    try:
        return _Reader(symbol.partition(".")[0][2:]).name()
    except (IndexError, ValueError, KeyError):
        return None


def _legacy(parts: str) -> str | None:
    found = []
    while parts:
        match = re.match(r"\d+", parts)
        if match is None or len(parts) < (end := match.end() + int(match[0])):
            return None
        found.append(_plain(parts[match.end() : end]))
        parts = parts[end:]
    return "::".join(found)


def _plain(part: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code in _ESCAPES:
            return _ESCAPES[code]
        if code.startswith("u") and (number := re.fullmatch(r"u([0-9a-f]{1,6})", code)) is not None:
            return chr(min(int(number[1], 16), 0x10FFFF))
        return match[0]

    if part.startswith("_$"):
        part = part[1:]
    return _ESCAPE.sub(character, part.replace("..", "::"))


class _Reader:
    """
    A parser of mangled Rust names of RFC 2603 (v0).

    It raises ValueError, IndexError or KeyError for malformed ones.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._steps = 0
        self._bound = 0
        """Number of lifetimes that are bound at this place."""

    def name(self) -> str:
        """Return the demangled name of the whole text; raise ValueError if it is malformed."""
        if self._peek().isdigit():
            raise ValueError("another version")
        found = self._path(is_value=True)
        if self._at < len(self._text):
            self._path(is_value=False)  # the crate that instantiates it
        if self._at < len(self._text):
            raise ValueError("something is left")
        return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        letter = self._text[self._at]
        self._at += 1
        return letter

    def _takes(self, letter: str) -> bool:
        if self._peek() != letter:
            return False
        self._at += 1
        return True

    def _number(self) -> int:
        """Parse a base-62 number that ends with ``_`` and return its value: ``_`` is 0, ``0_`` is 1."""
        value = 0
        if self._takes("_"):
            return 0
        while not self._takes("_"):
            value = value * 62 + _DIGITS.index(self._take())
        return value + 1

    def _optional(self, letter: str) -> int:
        """
        Parse an optional number after ``letter``, such as a disambiguator.

        Return the number plus one, or 0 if it is missing.
        """
        return self._number() + 1 if self._takes(letter) else 0

    def _identifier(self) -> tuple[str, int]:
        """Parse an identifier. Return it with its disambiguator, a number that distinguishes equal names."""
        number = self._optional("s")
        return self._undistinguished(), number

    def _undistinguished(self) -> str:
        is_encoded = self._takes("u")
        start = self._at
        if not self._takes("0"):
            while self._peek().isdigit():
                self._at += 1
        size = int(self._text[start : self._at])
        self._takes("_")
        name = self._text[self._at : self._at + size]
        if len(name) < size:
            raise ValueError("a name that ends too early")
        self._at += size
        if is_encoded:
            base, _, rest = name.rpartition("_")
            return f"{base}-{rest}".lstrip("-").encode("ascii").decode("punycode")
        return name

    def _enter(self) -> None:
        self._depth += 1
        self._steps += 1
        if self._depth > _DEPTH_MAX or self._steps > _STEPS_MAX:
            raise ValueError("too much")

    def _checked(self, text: str) -> str:
        self._depth -= 1
        if len(text) > _RESULT_MAX:
            raise ValueError("too long")
        return text

    def _path(self, *, is_value: bool) -> str:
        self._enter()
        match self._take():
            case "C":
                text = self._identifier()[0]
            case "M":
                self._skip_place()
                text = f"<{self._type()}>"
            case "X":
                self._skip_place()
                text = f"<{self._type()} as {self._path(is_value=False)}>"
            case "Y":
                text = f"<{self._type()} as {self._path(is_value=False)}>"
            case "N":
                text = self._nested(is_value=is_value)
            case "I":
                text = self._path(is_value=is_value)
                text += f"{'::' * is_value}<{', '.join(self._arguments())}>"
            case "B":
                text = self._again(lambda: self._path(is_value=is_value))
            case letter:
                raise ValueError(letter)
        return self._checked(text)

    def _skip_place(self) -> None:
        """Parse the path of the module that contains an `impl` block, which is not part of the readable name."""
        self._optional("s")
        self._path(is_value=False)

    def _nested(self, *, is_value: bool) -> str:
        space = self._take()
        outer = self._path(is_value=is_value)
        name, number = self._identifier()
        if space.islower():
            return f"{outer}::{name}" if name else outer
        kind = {"C": "closure", "S": "shim"}.get(space, space)
        return f"{outer}::{{{kind}{':' * bool(name)}{name}#{number}}}"

    def _arguments(self) -> list[str]:
        found = []
        while not self._takes("E"):
            if self._takes("L"):
                found.append(self._lifetime(self._number()))
            elif self._takes("K"):
                found.append(self._constant())
            else:
                found.append(self._type())
        return found

    def _again(self, read: object) -> str:
        """
        Parse a back reference, and return the result of ``read`` at the earlier position to which it leads.

        Raise ValueError if it leads forward.
        """
        place = self._number()
        here = self._at
        if place >= here - 1:
            raise ValueError("a reference forwards")
        self._at = place
        assert callable(read)
        text: str = read()
        self._at = here
        return text

    def _lifetime(self, number: int) -> str:
        if number == 0:
            return "'_"
        depth = self._bound - number
        if depth < 0:
            raise ValueError("a lifetime that nothing binds")
        return f"'{chr(ord('a') + depth)}" if depth < 26 else f"'_{depth}"

    def _binder(self) -> tuple[str, int]:
        """Return the text of a binder of lifetimes, such as ``for<'a> ``, and the number of lifetimes."""
        count = self._optional("G")
        if count > _DEPTH_MAX:
            raise ValueError("too many lifetimes")
        names = []
        for _ in range(count):
            self._bound += 1
            names.append(self._lifetime(1))
        return (f"for<{', '.join(names)}> " if names else ""), count

    def _type(self) -> str:
        self._enter()
        letter = self._take()
        if letter in _BASIC:
            return self._checked(_BASIC[letter])
        match letter:
            case "A":
                text = f"[{self._type()}; {self._constant()}]"
            case "S":
                text = f"[{self._type()}]"
            case "T":
                parts = self._arguments()
                text = f"({', '.join(parts)}{',' * (len(parts) == 1)})"
            case "R" | "Q":
                lifetime = self._number() if self._takes("L") else 0
                text = f"&{self._lifetime(lifetime) + ' ' if lifetime else ''}{'mut ' * (letter == 'Q')}{self._type()}"
            case "P":
                text = f"*const {self._type()}"
            case "O":
                text = f"*mut {self._type()}"
            case "F":
                text = self._function()
            case "D":
                text = self._dynamic()
            case "B":
                text = self._again(self._type)
            case _:
                self._at -= 1
                text = self._path(is_value=False)
        return self._checked(text)

    def _function(self) -> str:
        text, bound = self._binder()
        if self._takes("U"):
            text += "unsafe "
        if self._takes("K"):
            abi = "C" if self._takes("C") else self._undistinguished().replace("_", "-")
            text += f'extern "{abi}" '
        text += f"fn({', '.join(self._arguments())})"
        result = self._type()
        self._bound -= bound
        return text if result == "()" else f"{text} -> {result}"

    def _dynamic(self) -> str:
        binder, bound = self._binder()
        traits = []
        while not self._takes("E"):
            trait = self._path(is_value=False)
            bindings = []
            while self._takes("p"):
                bindings.append(f"{self._undistinguished()} = {self._type()}")
            if bindings:
                is_open = trait.endswith(">")
                trait = f"{trait[:-1]}, " if is_open else f"{trait}<"
                trait += f"{', '.join(bindings)}>"
            traits.append(trait)
        self._bound -= bound
        if not self._takes("L"):
            raise ValueError("no lifetime")
        lifetime = self._number()
        return f"dyn {binder}{' + '.join(traits)}{f' + {self._lifetime(lifetime)}' if lifetime else ''}"

    def _constant(self) -> str:
        self._enter()
        if self._takes("B"):
            return self._checked(self._again(self._constant))
        if self._takes("p"):
            return self._checked("_")
        kind = self._take()
        sign = "-" * (kind in _SIGNED and self._takes("n"))
        start = self._at
        while not self._takes("_"):
            if self._take() not in "0123456789abcdef":
                raise ValueError("no constant")
        value = int(self._text[start : self._at - 1] or "0", 16)
        match kind:
            case "b":
                text = ("false", "true")[value]
            case "c":
                text = repr(chr(value)) if value <= 0x10FFFF else f"{value:#x}"
            case _ if _BASIC[kind] in ("str", "()", "!", "...", "f32", "f64", "_"):
                raise ValueError("no constant")
            case _:
                text = f"{sign}{value}"
        return self._checked(text)


# Demangling of C++ and Rust.
# The C++ library of this machine demangles C++ names (``__cxa_demangle`` of the Itanium ABI). It has no limits, so it
# gets only names of files that no user but root and the current one can have written.


_LIBRARIES = ("libstdc++.so.6", "libc++abi.so.1")
_SYMBOL_MAX = 4096
_NAME_MAX = 4096
"""Maximum length in characters of a name that is shown. Names with templates can be longer."""


class Demangler:
    """Readable names of symbols. The C++ library is loaded when the first C++ name is demangled."""

    def __init__(self) -> None:
        self._cpp: Callable[[str], str | None] | None = None

    def name_of(self, symbol: str, *, is_trusted: bool = True) -> str:
        """
        Return the readable name, or the symbol itself for one of C.

        C++ names of an untrusted file stay as they are.
        """
        if not symbol.startswith(("_Z", "_R")) or len(symbol) > _SYMBOL_MAX:
            return symbol
        if (rust := rust_name(symbol)) is not None:
            return rust
        if not symbol.startswith("_Z") or not is_trusted:
            return symbol
        if self._cpp is None:
            self._cpp = _library()
        name = self._cpp(symbol)
        return symbol if name is None else name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX - 3]}..."


def _library() -> Callable[[str], str | None]:
    """Return the demangler of this machine's C++ library. The demangler returns None for a name that is not of C++."""
    import ctypes

    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            demangle, free = getattr(library, "__cxa_demangle"), ctypes.CDLL(None).free
        except (OSError, AttributeError):
            continue
        demangle.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        demangle.restype = ctypes.c_void_p
        free.argtypes = (ctypes.c_void_p,)

        def find(symbol: str) -> str | None:
            status = ctypes.c_int()
            address = demangle(symbol.encode("utf-8", "surrogateescape"), None, None, ctypes.byref(status))  # noqa: B023
            if not address:
                return None
            try:
                return ctypes.string_at(address).decode("utf-8", "backslashreplace")
            finally:
                free(address)  # noqa: B023

        return find
    return lambda _: None


# Search for readable names among those that C++ and Rust compilers give linkers.
# A readable name may be written in part: without its parameters, without the scopes before it, without the arguments of
# templates, without tags of the ABI. The name with the most in common is the best; several equally good ones are
# ambiguous. Names of code that compilers generate for a function, such as thunks, must be written as a whole.


_MANGLED = ("_Z", "_R")
_NEAR = 3
_PARTLY = 6
"""The first rank of names without some scopes or template arguments."""
_NEAR_MAX = 200_000
"""Maximum number of mangled names of a file that are searched for a similar name."""


class ReadableName(NamedTuple):
    """
    Linker name and its readable name.

    ``rank`` is lower if more of the name was written. It is -1 for the complete name as a demangler writes it, and 0
    for the complete name with other white space.
    """

    rank: int
    linker_name: str
    readable: str

    @property
    def is_whole(self) -> bool:
        """True if all scopes and arguments of templates were written."""
        return self.rank < _PARTLY


class _Parts(NamedTuple):
    """A readable name without its return type: ``path`` before the parameters, ``parameters`` with the rest."""

    path: str
    parameters: str


def find_readable(names: Iterable[str], written: str) -> list[ReadableName]:
    """Return the names that match ``written`` with the best rank, each once. The list is empty if none matches."""
    wanted = readable_parts(_normal(written))
    word = _significant(readable_parts(written.strip()).path or wanted.path)
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
    """Return up to three readable names, without parameters, that are similar to ``written``."""
    path = readable_parts(_normal(written)).path
    ending = path.rpartition("::")[2].lower()
    demangler, paths = Demangler(), dict[str, None]()
    for name in [name for name in names if name.startswith(_MANGLED)][:_NEAR_MAX]:
        readable = demangler.name_of(name)
        if readable != name and "[clone" not in readable:
            paths[_normal(readable_parts(readable).path)] = None
    slack = max(2, len(path) // 4)
    likely = [each for each in paths if each.lower().endswith(ending) or abs(len(each) - len(path)) <= slack]
    same = [each for each in likely if each.rpartition("::")[2].lower() == ending]
    near = near_names(path, likely, _NEAR)
    endings = {each.rpartition("::")[2]: each for each in paths}
    ends = [endings[each] for each in near_names(ending, endings, _NEAR, cutoff=0.8)]
    return list(dict.fromkeys([*near, *same, *ends]))[:_NEAR]


def _normal(name: str) -> str:
    """Return a demangled name without white space, except one blank between two words."""
    name = re.sub(r"\s+", " ", name.strip())
    name = re.sub(r"(?<=[(,<] )const (\w[\w:]*)|(?<=[(,<])const (\w[\w:]*)", lambda m: f"{m[1] or m[2]} const", name)
    return re.sub(r"(?<![\w]) | (?![\w(])|(?<=[\w]) (?=\()", "", name) if " " in name else name


_WORD = re.compile(r"[A-Za-z_]\w*")
_UNNAMED = re.compile(r"\{[^{}]*\}|\([^()]*\)")
"""Entities that have no name in the source, and parameters. Linker names spell them differently."""
_ABBREVIATED = frozenset(
    ("std", "allocator", "basic_string", "string", "basic_istream", "istream", "basic_ostream", "ostream",
     "basic_iostream", "iostream")
)  # fmt: skip
"""Words that may be missing in a linker name, because the Itanium ABI abbreviates them (5.1.10, "Compression")."""


def _significant(path: str) -> str | None:
    """Return a word that every matching linker name contains, or None if the text is not a name."""
    bare = _without_templates(path)
    plain = re.sub(r"operator\b.*", "", bare)
    while (fewer := _UNNAMED.sub("", plain)) != plain:
        plain = fewer
    found = _WORD.findall(plain)
    if found and found[-1] in _ABBREVIATED:
        return ""
    words = [word for word in found if word not in _ABBREVIATED]
    return words[-1] if words else "" if "operator" in bare or plain != bare else None


_SPECIAL = re.compile(
    r"(?:(?:construction )?vtable|VTT|typeinfo(?: name| fn)?|guard variable|(?:non-)?virtual thunk"
    r"|covariant return thunk|reference temporary(?: #\d+)?|TLS (?:init|wrapper) function|(?:non-)?transaction clone"
    r"|hidden alias|template parameter object) (?:for|to) "
)
"""Prefixes of demangled names of generated entities, before the name of the entity that they belong to."""
_ABI_TAG = re.compile(r"\[abi:\w+\]")
_STRING = r"\bstd::basic_string<char, ?std::char_traits<char>, ?std::allocator<char> ?>"


def _short(parameters: str) -> str:
    """Return a function's parameters as written in source: without inline namespaces, and with ``std::string``."""
    if "std::" not in parameters:
        return parameters
    plain = re.sub(r"\bstd::(?:__cxx11|__1)::", "std::", parameters)
    return re.sub(_STRING, "std::string", re.sub(rf"{_STRING} ?(?=\w)", "std::string ", plain))


def _rank(readable: str, wanted: str) -> int | None:
    """Return the rank of a readable name for a written one, or None if it does not match."""
    if _SPECIAL.match(readable):
        return None
    is_clone = "[clone" in readable
    parts = readable_parts(re.sub(r" ?\[clone [^\]]*\]", "", readable))
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


_SCOPE = re.compile(r"(?: (?:const|volatile)| ?&&?|\[abi:\w+\])*::")
"""The text after the parameters of a function that is a scope."""


def readable_parts(name: str) -> _Parts:
    """Return the scopes and name of a function without return type, and its parameters with the text after them."""
    start, depth, end, position = 0, 0, len(name), 0
    while position < len(name):
        if name.startswith("operator", position) and not re.match(r"\w", name[position - 1 : position] or ":"):
            position = _behind_operator(name, position)
            continue
        if name.startswith("->", position):  # of a Rust type
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


_OPERATOR = re.compile(
    r"""operator(?:\(\)|\[\]|[ ]?(?:new|delete)(?:\[\])?|""[ ]?\w+|->\*?|<=>|<<=?|>>=?|&&|\|\||\+\+|--
        |[-+*/%^&|=!<>]=?|[~,]|\s[^(]+)?(?:[ ](?=<))?""",
    re.VERBOSE,
)


def _behind_operator(name: str, start: int) -> int:
    """Return the position after ``operator`` at ``start`` and its symbol, such as ``()``, or its type."""
    match = _OPERATOR.match(name, start)
    return match.end() if match is not None else start + len("operator")


def _closing(name: str, start: int) -> int:
    """Return the position in ``name`` of the bracket that closes the first opening one from ``start`` on."""
    depth = 0
    for position in range(start, len(name)):
        depth += (name[position] in "({") - (name[position] in ")}")
        if depth == 0 and name[position] in ")}":
            return position
    return len(name) - 1


def _without_templates(path: str) -> str:
    """Return a C++ path without template arguments: ``a::B<int>::f`` becomes ``a::B::f``."""
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
