"""A small writer of modules: relocatable ELF files with the sections that the kernel's loader knows."""

from __future__ import annotations

import struct

__all__ = ["module_bytes"]

_ALLOC, _EXEC = 2, 4
_PROGBITS, _SYMTAB, _STRTAB, _RELA = 1, 2, 3, 4

ENDBR = bytes.fromhex("f30f1efa")
CALL = bytes.fromhex("e800000000")
RETURN = bytes.fromhex("e900000000")
FUNCTION = ENDBR + CALL + b"\x90\x90" + RETURN
"""16 bytes: a function that ftrace knows, and whose return the loader may replace."""

_SECTIONS = {
    ".text": (_ALLOC | _EXEC, 16, FUNCTION + FUNCTION + b"\x31\xc0" + RETURN),
    ".init.text": (_ALLOC | _EXEC, 16, FUNCTION),
    ".data": (_ALLOC | 1, 8, bytes(16)),
    "__mcount_loc": (_ALLOC, 1, bytes(24)),
    ".return_sites": (_ALLOC, 1, bytes(4)),
    ".gnu.linkonce.this_module": (_ALLOC | 1, 64, bytes(64)),
}
_SYMBOLS = (
    ("first", ".text", 0, 2, 0),
    ("second", ".text", 16, 2, 0),
    ("twice", ".text", 16, 2, 0),
    ("untraced", ".text", 32, 2, 1),
    ("twice", ".data", 8, 1, 0),
    ("begins", ".init.text", 0, 2, 0),
    ("init_module", ".init.text", 0, 2, 1),
    ("counter", ".data", 0, 1, 0),
)
"""Name, section, offset, kind and binding of each."""
_RELOCATIONS = {
    "__mcount_loc": ((".text", 4), (".text", 20), (".init.text", 4)),
    ".return_sites": ((".text", 11),),
}


def module_bytes(name: str = "sample", release: str = "6.1.0") -> bytes:
    """Return the file of a module for a release of Linux."""
    sections = dict(_SECTIONS)
    sections[".modinfo"] = (_ALLOC, 1, f"name={name}\0vermagic={release} SMP\0".encode())
    numbers = {section: number for number, section in enumerate(sections, 1)}
    strings, rows = b"\0", bytes(24)
    for section in sections:  # the symbols of the sections themselves come first
        rows += struct.pack("<IBBHQQ", 0, 3, 0, numbers[section], 0, 0)
    for symbol, section, offset, symbol_kind, binding in _SYMBOLS:
        rows += struct.pack("<IBBHQQ", len(strings), binding << 4 | symbol_kind, 0, numbers[section], offset, 0)
        strings += symbol.encode() + b"\0"
    headers: list[tuple[str, int, int, int, bytes, int]] = [("", 0, 0, 0, b"", 0)]
    headers += [(each, _PROGBITS, flags, align, data, 0) for each, (flags, align, data) in sections.items()]
    for table, places in _RELOCATIONS.items():
        data = b"".join(struct.pack("<QQq", 8 * n, numbers[s] << 32 | 1, at) for n, (s, at) in enumerate(places))
        headers.append((f".rela{table}", _RELA, 0, 8, data, 0))
    headers.append((".symtab", _SYMTAB, 0, 8, rows, len(headers) + 1))
    headers.append((".strtab", _STRTAB, 0, 1, strings, 0))
    names = b"\0".join(each.encode() for each in (*(header[0] for header in headers), ".shstrtab")) + b"\0"
    headers.append((".shstrtab", _STRTAB, 0, 1, names, 0))
    body = rest = b""
    for each, kind, flags, align, data, link in headers:
        rest += struct.pack(
            "<IIQQQQIIQQ", names.index(each.encode() + b"\0") if each else 0, kind, flags, 0, 64 + len(body), len(data),
            link, 0, align, 24 if kind in (_SYMTAB, _RELA) else 0,
        )  # fmt: skip
        body += data
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    fields = (1, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(headers), len(headers) - 1)
    return ident + struct.pack("<HHIQQQIHHHHHH", *fields) + body + rest
