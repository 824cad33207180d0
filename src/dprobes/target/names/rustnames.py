"""
Names of Rust's functions as people write them, from those that its compiler gives linkers.

There are two forms: that of C++ with a hash as its last part, ``_ZN4core3fmt5write17h0123456789abcdefE``, and the one
of RFC 2603, ``_RNvNtCs1234_4core3fmt5write``. Hashes, which tell builds and crates apart, are left out.
"""

from __future__ import annotations

import re

from dprobes.lazypattern import lazy_pattern

__all__ = ["rust_name"]

_LEGACY = lazy_pattern(r"_ZN(?P<parts>.*)17h[0-9a-f]{16}E(?P<clone>\..*)?", re.DOTALL)
_ESCAPES = {"SP": "@", "BP": "*", "RF": "&", "LT": "<", "GT": ">", "LP": "(", "RP": ")", "C": ","}
_ESCAPE = lazy_pattern(r"\$(\w{1,8})\$")

_RESULT_MAX = 4096
"""Characters of a name; what is referred to again and again may stand for any number."""
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
    """Return the name that a symbol of Rust stands for; None if it is none, or no well-formed one."""
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
    """Read a name of RFC 2603; ValueError, IndexError and KeyError say that it is none."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._steps = 0
        self._bound = 0
        """How many lifetimes are bound around here."""

    def name(self) -> str:
        """Return the whole name."""
        if self._peek().isdigit():
            raise ValueError("another version")
        found = self._path(is_value=True)
        if self._at < len(self._text):
            self._path(is_value=False)  # the crate that it was made for
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
        """Return a number of base 62: ``_`` is 0, ``0_`` is 1."""
        value = 0
        if self._takes("_"):
            return 0
        while not self._takes("_"):
            value = value * 62 + _DIGITS.index(self._take())
        return value + 1

    def _optional(self, letter: str) -> int:
        """Return the number behind a letter plus one, 0 without it."""
        return self._number() + 1 if self._takes(letter) else 0

    def _identifier(self) -> tuple[str, int]:
        """Return a name, and its number among those of the same name."""
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
        """Skip where an implementation is written."""
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
        """Read what is at an earlier place once more."""
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
        """Return what binds lifetimes, and how many."""
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
