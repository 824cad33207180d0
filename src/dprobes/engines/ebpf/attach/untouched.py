"""
Whether all processes that map a file have its code at certain places: a quick answer, for a head start.

``conflicts`` has the whole answer. Whatever is not certain here is left to it.
"""

from __future__ import annotations

import os

from dprobes.engines.linux.mapquery import MapQuestion

# Nothing that takes long is imported here: no typing.

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["is_untouched", "maps_file"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_QUESTIONS_MAX = 1 << 12


def is_untouched(path: str, identity: tuple[int, int], places: Sequence[tuple[int, bytes]]) -> bool:
    """
    Return whether each process that maps a file has the file's bytes at these offsets.

    ``identity`` is its device and inode.
    """
    base = os.path.basename(os.path.realpath(path))
    question = MapQuestion(identity[1], base)
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            if question.answer(int(name), _QUESTIONS_MAX) is False:
                continue
            if not _is_untouched_in(name, identity, base, places):
                return False
        except (FileNotFoundError, ProcessLookupError):
            # It has ended, or is one of the kernel; or else its first thread has ended, and others go on.
            if _has_threads(name):
                return False
        except PermissionError:
            continue  # what is not ours to see is not looked at later either
        except OSError:
            return False
    return True


def _has_threads(name: str) -> bool:
    try:
        return len(os.listdir(f"/proc/{name}/task")) > 1
    except OSError:
        return False


def maps_file(pid: int, path: str, identity: tuple[int, int]) -> bool:
    """Return whether a process executes a file."""
    return any(True for _ in _mappings(str(pid), identity, os.path.basename(path)))


def _is_untouched_in(process: str, identity: tuple[int, int], base: str, places: Sequence[tuple[int, bytes]]) -> bool:
    for start, end, offset in _mappings(process, identity, base):
        here = [(place - offset + start, data) for place, data in places if offset <= place < offset + end - start]
        if not here:
            continue
        memory = os.open(f"/proc/{process}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for address, data in here:
                if os.pread(memory, len(data), address) != data:
                    return False
        finally:
            os.close(memory)
    return True


def _mappings(process: str, identity: tuple[int, int], base: str) -> Iterator[tuple[int, int, int]]:
    """Iterate over the executable mappings of a file: start, end, and offset in the file."""
    device, inode = identity
    numbers = f"{os.major(device):02x}:{os.minor(device):02x}", str(inode)
    with open(f"/proc/{process}/maps", encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    if f" {inode} " not in text and base not in text:
        return
    for line in text.splitlines():
        span, flags, offset, *shown, path = (line + " ").split(" ", 5)
        if "x" not in flags or not (shown[1] == numbers[1] or base in path):
            continue
        if tuple(shown) != numbers:
            # On some file systems (btrfs, overlayfs) maps shows other numbers than stat.
            status = os.stat(f"/proc/{process}/map_files/{_short(span)}")
            if (status.st_dev, status.st_ino) != identity:
                continue
        start, end = (int(each, 16) for each in span.split("-"))
        yield start, end, int(offset, 16)


def _short(span: str) -> str:
    return "-".join(f"{int(each, 16):x}" for each in span.split("-"))
