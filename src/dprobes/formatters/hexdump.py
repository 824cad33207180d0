"""Data as a dump, in the original's form (recovered reference 3.1)."""

from __future__ import annotations

__all__ = ["hex_dump"]


def hex_dump(data: bytes) -> str:
    """Return data 16 bytes a line, with offset, groups of four bytes, and the ASCII column, which ignores bit 7."""
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        groups = " ".join(row[n : n + 4].hex() for n in range(0, len(row), 4))
        characters = "".join(chr(code) if 0x20 <= (code := byte & 0x7F) < 0x7F else "." for byte in row)
        lines.append(f"{start:#010x} : {groups:<35} : {characters}")
    return "\n".join(lines)
