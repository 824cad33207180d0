"""By which name people know a file that a process maps: **the** rule, for all outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.target.modules import matches

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["module_name"]


def module_name(path: str, soname: str | None, known: Iterable[str], root: str = "") -> str:
    """
    Return the name of a mapped file.

    It is the first of the ``known`` ones, those of programs and processes, that means the file: 'redis-server' is a
    link to the file that is mapped. Else it is the SONAME, by which others are linked with it, or the name of the file.
    ``root`` leads to the files of a process in another mount namespace.
    """
    for name in known:
        if name and matches(name, root + path, soname):
            return name.rpartition("/")[2]
    return soname if soname and "/" not in soname else path.rpartition("/")[2] or path
