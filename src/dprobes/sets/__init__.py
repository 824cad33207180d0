"""
Instrumentation sets: probe programs whose probes have promised names and fields.

A set is a directory with ``set.toml``, its description, and files in DProbes C. ``set_description`` reads the
description, ``set_library`` finds sets by name, and ``set_program`` makes a program of a set. The names and fields of
probes are promised; the places at which they are inserted are not, and may differ between versions of a module.
"""

import re

__all__ = ["SET_FILE", "is_set_name"]

SET_FILE = "set.toml"
"""The name of the description in the directory of a set. A program with this name is a set."""

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?", re.ASCII)


def is_set_name(word: str) -> bool:
    """Return whether a word can be the name of a set: ``sqlite``, ``net.tcp``."""
    return _NAME.fullmatch(word) is not None
