"""
The head start of a one-liner that was run before: its probes are armed before most modules are imported.

A plan for it (``engines.ebpf.headstart``) is kept in the cache directory. It counts for the same command line, but
for the number of a process, in the same directory, until the next boot, and as long as what the line was compiled to
does (``keptcompilation``).
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sys
import time
from binascii import crc32

from dprobes.cachefiles import cache_directory, make_room, read_cached, write_cached
from dprobes.version import __version__

# Nothing that takes long is imported here: no typing, no click.

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dprobes.engines.linux.kernelobjects import Notes, Standing

__all__ = ["SWITCH", "HeadStart", "code_state", "file_state"]

SWITCH = "DPROBES_NO_CACHE"
"""The environment variable that switches off whatever is kept of command lines."""

_FORMAT = 1
"""The number of this form of plans."""

_PLANS_MAX = 64
_NUMBER = 4  # bytes of the checksum at the beginning

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PROCESS = ("-p", "--pid")

FileState = tuple[int, int, int, int, int]
"""What ``target.notedfiles`` has, which would take longer to import."""


def file_state(path: str) -> FileState | None:
    """Return the state of a file, None if there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - no Path is needed
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def code_state(path: str) -> tuple[str, int, int] | None:
    """Return the state of a file of code, None if there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return path, status.st_mtime_ns, status.st_size


class HeadStart:
    """The head start of one command line, which may be known; ``directory`` is by default the user's."""

    def __init__(self, arguments: Sequence[str], directory: str | None = None) -> None:
        self._directory = directory or f"{cache_directory()}/headstarts"
        self._key = ""
        self._pid: int | None = None
        self._known: bytes | None = None
        self._standing: Standing | None = None
        self._notes: Notes | None = None
        if arguments[:1] == ["run"] and "-e" in arguments and SWITCH not in os.environ:
            with contextlib.suppress(OSError, ValueError):
                self._key = self._key_of(list(arguments))

    def _key_of(self, words: list[str]) -> str:
        places = [place for place, word in enumerate(words[:-1]) if word in _PROCESS and words[place + 1].isdecimal()]
        program = ""
        if len(places) == 1:
            self._pid = int(words[places[0] + 1])
            words[places[0] + 1] = ""
            program = os.readlink(f"/proc/{self._pid}/exe")  # noqa: PTH115
        elif places:
            return ""
        with open(_BOOT_ID, encoding="ascii") as file:  # noqa: PTH123
            boot = file.read()
        user = os.getuid(), os.geteuid()
        return repr((_FORMAT, __version__, sys.version, words, os.getcwd(), user, program, boot))  # noqa: PTH109

    @property
    def _name(self) -> str:
        return f"{crc32(self._key.encode('utf-8', 'surrogateescape')):08x}"

    def begin(self) -> None:
        """Arm the probes, if a plan is known and holds; whatever goes wrong, the run begins in its usual way."""
        if not self._key or (content := read_cached(self._directory, self._name)) is None:
            return
        if int.from_bytes(content[:_NUMBER], "little") != crc32(content[_NUMBER:]):
            return
        try:
            for number in range(3):  # a missing standard file must not become one of the kernel's objects
                os.fstat(number)
            key, files, code, plan = marshal.loads(memoryview(content)[_NUMBER:])  # noqa: S302 - nobody else's, like byte code
            if key != self._key or not _are_unchanged(files, code):
                return
            self._known = content
            from dprobes.engines.ebpf.headstart import begin
            from dprobes.engines.linux.kernelobjects import stand

            self._standing = begin(plan, self._pid)
            stand(self._standing)
        except (OSError, EOFError, ValueError, TypeError, LookupError):
            return

    def settle(self, *, is_possible: bool) -> None:
        """Give up what stands if the run is one that cannot take it."""
        if self._standing is not None and not is_possible:
            from dprobes.engines.linux.kernelobjects import give_up

            give_up()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is asked of the kernel, for a plan, until that is kept."""
        if not self._key:
            yield
            return
        from dprobes.engines.linux.kernelobjects import Notes, note_into

        self._notes = Notes()
        note_into(self._notes)
        try:
            yield
        finally:
            note_into(None)

    @property
    def lead(self) -> float:
        """For how many seconds probes have been armed already."""
        return 0.0 if self._standing is None or not self._is_taken else time.monotonic() - self._standing.since

    @property
    def _is_taken(self) -> bool:
        from dprobes.engines.linux.kernelobjects import standing

        return standing() is self._standing

    def keep(
        self, pid: int | None, files: Mapping[str, FileState | None] | None, code: Iterable[tuple[str, int, int]]
    ) -> None:
        """
        Keep the plan of the run that has begun, if there is a new one; forget one that has turned out wrong.

        ``pid`` is the process of its scope, ``files`` and ``code`` what it was compiled from; None if that is not kept.
        """
        if not self._key:
            return
        from dprobes.engines.linux.kernelobjects import note_into

        note_into(None)
        if self._standing is not None and self._is_taken:
            return
        plan = self._notes.plan if self._notes is not None else None
        if plan is None or files is None or pid != self._pid:
            if self._known is not None:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._directory}/{self._name}")  # noqa: PTH108
            return
        content = marshal.dumps((self._key, dict(files), tuple(code), plan))  # type: ignore[arg-type] # a plan is
        content = crc32(content).to_bytes(_NUMBER, "little") + content
        if content != self._known:
            make_room(self._directory, _PLANS_MAX)
            write_cached(self._directory, self._name, content)


def _are_unchanged(files: Mapping[str, FileState | None], code: Iterable[tuple[str, int, int]]) -> bool:
    return all(file_state(path) == state for path, state in files.items()) and all(
        code_state(each[0]) == each for each in code
    )
