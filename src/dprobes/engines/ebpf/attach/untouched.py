"""
Whether all processes that map a file have its code at certain places: a quick answer, for a head start.

``conflicts`` has the whole answer. Whatever is not certain here is left to it.
"""

from __future__ import annotations

import os

from dprobes.engines.linux.mapquery import MapQuestion
from dprobes.engines.linux.procfs import living_thread

# Nothing that takes long is imported here: no typing.

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["is_untouched", "maps_file"]

_QUESTIONS_MAX = 1 << 12


def is_untouched(path: str, identity: tuple[int, int], places: Sequence[tuple[int, bytes]]) -> bool:
    """
    Return whether each process that maps a file has the file's bytes at these offsets.

    ``identity`` is its device and inode.
    """
    base = os.path.basename(os.path.realpath(path))
    question = MapQuestion.about(path, identity[1], base)
    return all(
        _is_untouched_in(int(name), question, identity, base, places)
        for name in os.listdir("/proc")
        if name.isdecimal()
    )


def _is_untouched_in(
    pid: int, question: MapQuestion, identity: tuple[int, int], base: str, places: Sequence[tuple[int, bytes]]
) -> bool:
    try:
        return question.answer(pid, _QUESTIONS_MAX) is False or _has_bytes(pid, identity, base, places)
    except (FileNotFoundError, ProcessLookupError):
        # It has ended, or is one of the kernel; or else its first thread has ended, and others go on.
        thread = living_thread(pid)
        return thread == pid or _is_untouched_in(thread, question, identity, base, places)
    except PermissionError:
        return True  # what is not ours to see is not looked at later either
    except OSError:
        return False


def maps_file(pid: int, path: str, identity: tuple[int, int]) -> bool:
    """Return whether a process executes a file."""
    return any(True for _ in _mappings(pid, identity, os.path.basename(path)))


def _has_bytes(thread: int, identity: tuple[int, int], base: str, places: Sequence[tuple[int, bytes]]) -> bool:
    for start, end, offset in _mappings(thread, identity, base):
        here = [(place - offset + start, data) for place, data in places if offset <= place < offset + end - start]
        if not here:
            continue
        memory = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for address, data in here:
                found = os.pread(memory, len(data), address)
                if found and found != data:  # there is nothing where the process has just ended
                    return False
        finally:
            os.close(memory)
    return True


def _mappings(thread: int, identity: tuple[int, int], base: str) -> Iterator[tuple[int, int, int]]:
    """Iterate over the executable mappings of a file: start, end, and offset in the file."""
    device, inode = identity
    numbers = f"{os.major(device):02x}:{os.minor(device):02x}", str(inode)
    with open(f"/proc/{thread}/maps", encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    if f" {inode} " not in text and base not in text:
        return
    for line in text.splitlines():
        span, flags, offset, *shown, path = (line + " ").split(" ", 5)
        if "x" not in flags or not (shown[1] == numbers[1] or base in path):
            continue
        if tuple(shown) != numbers:
            # On some file systems (btrfs, overlayfs) maps shows other numbers than stat.
            status = os.stat(f"/proc/{thread}/map_files/{_short(span)}")
            if (status.st_dev, status.st_ino) != identity:
                continue
        start, end = (int(each, 16) for each in span.split("-"))
        yield start, end, int(offset, 16)


def _short(span: str) -> str:
    return "-".join(f"{int(each, 16):x}" for each in span.split("-"))
