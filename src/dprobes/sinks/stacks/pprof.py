"""
Profiles for pprof: a gzipped protobuf message (github.com/google/pprof, proto/profile.proto).

::

    Profile    1 sample_type (ValueType: 1 type, 2 unit) | 2 sample (Sample: 1 location ids, 2 values)
               | 4 location (Location: 1 id, 4 line (Line: 1 function id)) | 5 function (Function: 1 id, 2 name)
               | 6 string_table, of which the first is empty
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

from dprobes.sinks.perfetto.protobuf import length_field, text_field, varint, varint_field

if TYPE_CHECKING:
    from dprobes.sinks.stacks.profile import StackProfile

__all__ = ["pprof_of"]


class _Strings:
    """The table of strings, in which others name them by their numbers."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 0}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def pprof_of(profile: StackProfile) -> bytes:
    """Return the bytes of a profile; a function has one location, because nobody asks for lines."""
    strings = _Strings()
    kind = varint_field(1, strings.number(profile.unit)) + varint_field(2, strings.number(_unit(profile.unit)))
    message = length_field(1, kind)
    locations: dict[str, int] = {}
    for stack, weight in sorted(profile.weights.items()):
        ids = b"".join(varint(locations.setdefault(name, len(locations) + 1)) for name in reversed(stack))
        message += length_field(2, length_field(1, ids) + length_field(2, varint(weight)))
    for name, number in locations.items():
        message += length_field(4, varint_field(1, number) + length_field(4, varint_field(1, number)))
        message += length_field(5, varint_field(1, number) + varint_field(2, strings.number(name)))
    message += b"".join(text_field(6, text) for text in strings.numbers)
    return gzip.compress(message, mtime=0)


def _unit(what: str) -> str:
    return what if what in ("bytes", "nanoseconds") else "count"
