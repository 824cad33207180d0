"""Text that comes from templates and targets, made harmless to lines and terminals."""

from __future__ import annotations

__all__ = ["escaped"]


def escaped(text: str, keep: str = "") -> str:
    """Return text with escapes in the place of characters that would disturb a line or a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return _ESCAPES.get(character) or (f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}")


_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}
