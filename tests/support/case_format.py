r"""
The format of ``.case`` files, independent of the back ends that run them.

A case is a text with sections, each starting with ``-- name`` on a line of its own; its value is on the lines below
it. ``//`` starts a comment in all sections except the texts of programs and diagnostics::

    -- title
    A string is logged after token 1 and the length that it really has.
    -- context
    reg ecx = 0x1000
    mem 0x1000 = "hello" 00
    -- source
    push 256
    push r, ecx
    log str
    exit
    -- log
    01 h:5 "hello"

The program: ``source`` (the instructions of one handler, and procedures) with ``file header`` and ``probe header``
(lines of keywords), or ``program`` (a whole file), or ``c source`` (a whole program in DProbes C, whose RPN source
``rpn`` shows, and the text of whose record ``printed``). ``allow write`` is ``yes`` unless it says ``no``.

The processor: ``word`` (4, 8, or both as by default) and ``byte order`` (little as by default, big, or both), or
``architecture`` (names). These, ``hits`` (of the handler, default 1), ``allow write``, ``end``, ``major`` and ``minor``
have their value on the line of their name.

The simulated context, in the section ``context``, on one line each::

    reg NAME = N             user NAME = N            mem A = items            ro A = items     (read-only)
    lv = N ...               gv = N ...               cv = N ...               tv = N ...
    port N = N               phys A = items (physical memory)      frame A = A (the physical address of a page)
    segment N = BASE [LAST]  symbol NAME = ADDRESS    cpuid LEAF = EAX EBX ECX EDX
    failing NAME =           (an extension that fails)                         field NAME = N
    comm NAME =              (the name of the process)
    kstack = N ...           entry NAME = N           (a register at the entry of the call that returns, or time)
    ustack = N ...
    msr N = N                gdtr = BASE LIMIT        idtr = BASE LIMIT
    pid = N   (also tid, uid, cpu, task, time)

Expectations: ``log``, ``trace`` (items); ``stack`` (cells, the top first), ``lv``, ``gv``, ``cv``, ``tv`` (numbers);
``registers`` (lines ``NAME = N``); ``memory`` (lines ``A = items``); ``ports`` (lines ``PORT BYTES = N``, the writes in
order); ``tables`` (the lines that show them); ``extensions`` (names, ``all`` for a bare callk); ``end`` (exit, abort,
remove, exit 1, skip 0x5 ..., followed by ``cut`` if the log buffer had no room for all); ``major``; ``minor``;
``diagnostics`` (all of them, literally). Properties without a section are not compared, with two exceptions: a case
without ``diagnostics`` has no error, and a case without ``end`` ends by ``exit``. A 4 or 8 after the name of an
expectation or of ``context`` restricts it to words of that number of bytes.

Items are bytes in hexadecimal (``41 42``), strings (``"AB"``), and numbers in the byte order of the target: ``w:1`` in
a word, ``h:1`` in 2 bytes, ``d:1`` in 4, ``q:1`` in 8; ``o:name`` is, in a word, the offset of a label or procedure in
the encoded program. ``x3`` after an item repeats it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Case", "CaseError", "ContextLine", "Item", "Target", "encode_items", "parse_case"]

ByteOrder = Literal["little", "big"]

_ARCHITECTURES = {"i386": (4, "little"), "x86_64": (8, "little"), "s390": (4, "big"), "s390x": (8, "big")}
_OTHERS = {"ppc": (4, "big"), "ppc64": (8, "big")}

_TEXTS = ("title", "file header", "probe header", "source", "program", "c source", "rpn", "printed", "diagnostics")
_PROGRAMS = ("source", "program", "c source")
_VALUES = ("word", "byte order", "architecture", "allow write", "hits", "end", "major", "minor")
_VISIBLE = ("log", "trace", "stack", "lv", "gv", "cv", "tv", "tables", "registers", "memory", "ports", "extensions")
_BY_WORD = (*_VISIBLE, "context")
_SECTIONS = (*_TEXTS, *_VALUES, *_BY_WORD)


class CaseError(Exception):
    """A case is malformed; the message has file and line."""


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of an expectation: ``data`` if ``kind`` is "b", otherwise a number ``value`` of kind w, h, d, q or o."""

    kind: str
    data: bytes = b""
    value: int | str = 0


@dataclass(frozen=True, slots=True)
class ContextLine:
    """A line such as ``reg eax = 5``: the words before "=", and the numbers or items after it."""

    words: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A processor for which a case is compiled and run."""

    architecture: str
    word_size: int
    byte_order: str


@dataclass(frozen=True)
class Case:
    """
    A parsed case.

    ``title`` is the fact that it demonstrates, ``program`` the source text, ``targets`` the processors for which it is
    valid. The methods return a section's contents for one of these.
    """

    name: str
    title: str
    program: str
    targets: tuple[Target, ...]
    allow_write: bool = True
    hits: int = 1
    is_c: bool = False
    sections: Mapping[tuple[str, int], _Section] = field(default_factory=dict, repr=False, hash=False)

    @property
    def is_run(self) -> bool:
        """True if the handler is run; otherwise only diagnostics are compared."""
        expectations = {*_BY_WORD, "end", "major", "minor", "printed"} - {"context"}
        return any(name in expectations for name, _ in self.sections)

    def text(self, section: str, target: Target) -> str | None:
        """Return the text of a section that holds for ``target``; None if the case has none."""
        found = self._find(section, target)
        return None if found is None else found.text

    def items(self, section: str, target: Target) -> tuple[Item, ...] | None:
        """Return a section as items; None if the case has no such section for ``target``."""
        found = self._find(section, target)
        return None if found is None else _items(found.text, found)

    def numbers(self, section: str, target: Target) -> list[int] | None:
        """Return a section as numbers; None if the case has no such section for ``target``."""
        found = self._find(section, target)
        return None if found is None else [_number(word, found) for word in found.text.split()]

    def lines(self, section: str, target: Target) -> list[ContextLine] | None:
        """Return a section of lines ``words = values``; None if the case has no such section for ``target``."""
        found = self._find(section, target)
        return None if found is None else [_line(line, found) for line in found.text.splitlines() if line.strip()]

    def _find(self, section: str, target: Target) -> _Section | None:
        return self.sections.get((section, target.word_size)) or self.sections.get((section, 0))


@dataclass(frozen=True, slots=True)
class _Section:
    place: str
    text: str


def encode_items(items: tuple[Item, ...], target: Target, offsets: Mapping[str, int]) -> bytes:
    """
    Return the bytes of items in the word size and byte order of ``target``.

    ``offsets`` are the byte offsets of labels and procedures in the encoded program.
    """
    order: ByteOrder = "big" if target.byte_order == "big" else "little"
    sizes = {"w": target.word_size, "o": target.word_size, "h": 2, "d": 4, "q": 8}
    data = b""
    for item in items:
        if item.kind == "b":
            data += item.data
            continue
        value = offsets[item.value] if isinstance(item.value, str) else item.value
        size = sizes[item.kind]
        data += (value & ((1 << 8 * size) - 1)).to_bytes(size, order)
    return data


def parse_case(path: Path, name: str) -> Case:
    """Return the case in a file; raise ``CaseError`` if it is malformed."""
    sections = _split(path)
    plain = {section: found for (section, word), found in sections.items() if word == 0}
    if "title" not in plain or not plain["title"].text.strip().endswith("."):
        raise CaseError(f"{path}: no '-- title' that is a sentence")
    if sum(section in plain for section in _PROGRAMS) != 1:
        raise CaseError(f"{path}: needs one of '-- source', '-- program' and '-- c source'")
    if "source" not in plain and ("file header" in plain or "probe header" in plain):
        raise CaseError(f"{path}: a whole program has headers of its own")
    case = Case(
        name,
        " ".join(plain["title"].text.split()),
        next((plain[section].text for section in ("program", "c source") if section in plain), "") or _program(plain),
        _targets(path, plain),
        allow_write=_choice(plain, "allow write", ("yes", "no"), "yes") == "yes",
        hits=int(plain["hits"].text) if "hits" in plain else 1,
        is_c="c source" in plain,
        sections=sections,
    )
    if not case.is_run and not any(section in ("diagnostics", "rpn") for section, _ in sections):
        raise CaseError(f"{path}: expects nothing")
    for target in case.targets:  # so that a malformed expectation is an error of the case, not of a back end
        for section in ("log", "trace"):
            case.items(section, target)
        for section in ("stack", "lv", "gv", "cv", "tv", "major", "minor"):
            case.numbers(section, target)
        for section in ("context", "registers", "memory", "ports"):
            case.lines(section, target)
    return case


def _split(path: Path) -> dict[tuple[str, int], _Section]:
    sections: dict[tuple[str, int], _Section] = {}
    key: tuple[str, int] | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate([*path.read_text(encoding="utf-8").split("\n"), "-- end of file"], 1):
        if not line.startswith("-- "):
            if key is None and line.strip():
                raise CaseError(f"{path}:{number}: text before the first section")
            lines.append(line)
            continue
        if key is not None:
            sections[key] = _section(path, start, key[0], lines)
        if line == "-- end of file":
            break
        key, rest = _heading(path, number, line)
        if key in sections:
            raise CaseError(f"{path}:{number}: a second '-- {key[0]}'")
        lines, start = [rest], number
    return sections


def _heading(path: Path, number: int, line: str) -> tuple[tuple[str, int], str]:
    text = line.removeprefix("-- ").strip()
    for section in _VALUES:
        if text.startswith(section + " "):
            return (section, 0), text.removeprefix(section).strip()
    for section in _BY_WORD:
        if text in (f"{section} 4", f"{section} 8"):
            return (section, int(text[-1])), ""
    if text not in _TEXTS and text not in _BY_WORD:
        raise CaseError(f"{path}:{number}: unknown section '{text}'")
    return (text, 0), ""


def _section(path: Path, start: int, name: str, lines: list[str]) -> _Section:
    if name not in _TEXTS:
        lines = [re.sub(r'("(?:[^"\\]|\\.)*")|//.*', lambda m: m.group(1) or "", line) for line in lines]
    else:
        lines = lines[1:]
    return _Section(f"{path}:{start}", "\n".join(lines).rstrip("\n") + ("\n" if name in _PROGRAMS else ""))


def _program(plain: Mapping[str, _Section]) -> str:
    def lines(section: str) -> list[str]:
        return [line for line in plain[section].text.splitlines() if line.strip()] if section in plain else []

    file_header = lines("file header")
    probe_header = lines("probe header")
    if not any(line.split("=")[0].strip() == "name" for line in file_header):
        file_header = ["name = case", *file_header]
    if not any(line.split("=")[0].strip() in ("offset", "address", "sampler") for line in probe_header):
        probe_header = ["offset = 0", *probe_header]
    return "\n".join([*file_header, *probe_header, plain["source"].text])


def _choice(plain: Mapping[str, _Section], section: str, known: tuple[str, ...], default: str) -> str:
    if section not in plain:
        return default
    value = plain[section].text.strip()
    if value not in known:
        raise CaseError(f"{plain[section].place}: '-- {section}' is one of {', '.join(known)}, not '{value}'")
    return value


def _targets(path: Path, plain: Mapping[str, _Section]) -> tuple[Target, ...]:
    if "architecture" in plain:
        if "word" in plain or "byte order" in plain:
            raise CaseError(f"{path}: '-- architecture' says word and byte order already")
        known = _ARCHITECTURES | _OTHERS
        names = plain["architecture"].text.split()
        if bad := [name for name in names if name not in known]:
            raise CaseError(f"{plain['architecture'].place}: unknown architecture '{bad[0]}'")
        return tuple(Target(name, *known[name]) for name in names)
    word = _choice(plain, "word", ("4", "8", "both"), "both")
    order = _choice(plain, "byte order", ("little", "big", "both"), "little")
    return tuple(
        Target(name, size, byte_order)
        for name, (size, byte_order) in _ARCHITECTURES.items()
        if word in ("both", str(size)) and order in ("both", byte_order)
    )


def _number(word: str, section: _Section) -> int:
    try:
        return int(word, 0)
    except ValueError:
        raise CaseError(f"{section.place}: '{word}' is not a number") from None


_ITEM = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")
      | (?P<number>[whdq]:\S+)
      | (?P<offset>o:\w+)
      | x(?P<times>[0-9]+)
      | (?P<byte>[0-9a-fA-F]{2})(?=\s|$)""",
    re.VERBOSE,
)


def _items(text: str, section: _Section) -> tuple[Item, ...]:
    items: list[Item] = []
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        match = _ITEM.match(text, position)
        if match is None:
            raise CaseError(f"{section.place}: cannot read '{text[position:].split(maxsplit=1)[0]}'")
        position = match.end()
        kind, found = match.lastgroup, match.group(match.lastgroup or 0)
        if kind == "text":
            items.append(Item("b", found[1:-1].encode().decode("unicode_escape").encode("latin-1")))
        elif kind == "byte":
            items.append(Item("b", bytes.fromhex(found)))
        elif kind == "number":
            items.append(Item(found[0], value=_number(found[2:], section)))
        elif kind == "offset":
            items.append(Item("o", value=found[2:]))
        elif not items:
            raise CaseError(f"{section.place}: 'x{found}' repeats nothing")
        else:
            items += [items[-1]] * (int(found) - 1)
    return tuple(items)


def _line(line: str, section: _Section) -> ContextLine:
    left, equals, right = line.partition("=")
    words = tuple(left.split())
    if not equals or not words:
        raise CaseError(f"{section.place}: expected 'words = values', found '{line.strip()}'")
    is_memory = len(words) == 1 and words[0][0].isdigit()
    if words[0] in ("mem", "ro", "phys") or is_memory:
        return ContextLine(words, items=_items(right, section))
    return ContextLine(words, numbers=tuple(_number(word, section) for word in right.split()))
