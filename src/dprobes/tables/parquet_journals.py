"""
Journals of a directory of Parquet files: trace files of records that are in no Parquet file yet.

::

    .journal-STAMP.dpt     a trace file, which readers of Parquet ignore
    .journal-STAMP.lock    locked by the writer of the journal, and then by its converter
    damaged-STAMP.dpt      a journal that was unreadable, for manual inspection

An unlocked journal was left by a killed process. The next sink starts its conversion.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from dprobes.errors import DprobesError, FormatError, reason_of
from dprobes.tables.parquet_files import convert, locked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Journal", "abandoned", "journal_paths", "start_converter"]

_PREFIX = ".journal-"
_TEMPORARIES = "program=*/major=*/minor=*/.part-*.parquet.tmp"


@dataclass(frozen=True, slots=True)
class Journal:
    """A locked journal. The open file ``lock`` holds the lock, also in processes that inherit the file."""

    directory: Path
    stamp: str
    lock: int

    @classmethod
    def begin(cls, directory: Path) -> Self:
        """Lock a new journal, whose file does not exist yet."""
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        with locked(directory):
            journal = cls.locked(directory, f"{now}-{secrets.token_hex(4)}")
        assert journal is not None, "a random name is there already"
        return journal

    @classmethod
    def locked(cls, directory: Path, stamp: str) -> Self | None:
        """
        Lock the journal whose file name has this stamp; return None if another process has locked it.

        The caller must hold the lock of the directory.
        """
        lock = os.open(_lock_path(directory, stamp), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return cls(directory, stamp, lock)

    @property
    def path(self) -> Path:
        """The path of the trace file."""
        return self.directory / f"{_PREFIX}{self.stamp}.dpt"

    def convert(self) -> None:
        """Convert the journal to Parquet files. If it is damaged, keep it and raise ``FormatError``."""
        try:
            convert(self.path, self.directory, self.stamp)
        except FormatError as error:
            kept = self.directory / f"damaged-{self.stamp}.dpt"
            self.path.rename(kept)
            raise FormatError(f"{error.message}; it is kept as '{kept}'") from None
        finally:
            if not self.path.exists():
                _lock_path(self.directory, self.stamp).unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock of the journal, so that another process may convert it."""
        os.close(self.lock)


def _lock_path(directory: Path, stamp: str) -> Path:
    return directory / f"{_PREFIX}{stamp}.lock"


def _stamps(directory: Path) -> list[str]:
    names = (path.name for path in directory.glob(f"{_PREFIX}*.dpt"))
    return sorted(name.removeprefix(_PREFIX).removesuffix(".dpt") for name in names)


def journal_paths(directory: Path) -> list[Path]:
    """Return the journals of a directory, which the caller must have locked."""
    return [directory / f"{_PREFIX}{stamp}.dpt" for stamp in _stamps(directory)]


def abandoned(directory: Path) -> list[Journal]:
    """Lock and return the journals of processes that have ended. Remove other files of theirs."""
    with locked(directory):
        found = [journal for stamp in _stamps(directory) if (journal := Journal.locked(directory, stamp)) is not None]
        stamps = _stamps(directory)
        for path in directory.glob(_TEMPORARIES):
            if path.name.removeprefix(".part-").rpartition("-")[0] not in stamps:
                path.unlink(missing_ok=True)
        for path in directory.glob(f"{_PREFIX}*.lock"):
            stamp = path.name.removeprefix(_PREFIX).removesuffix(".lock")
            if stamp not in stamps and (journal := Journal.locked(directory, stamp)) is not None:
                path.unlink(missing_ok=True)
                journal.release()
        return found


def start_converter(journals: Sequence[Journal]) -> subprocess.Popen[str]:
    """
    Start a process that converts journals, and release them. It reports problems on its standard error.

    A separate process takes no time from the writer of records, and continues if the writer ends.
    """
    words = [str(word) for journal in journals for word in (journal.directory, journal.stamp, journal.lock)]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        pass_fds=[journal.lock for journal in journals],
        start_new_session=True,  # a Ctrl-C at the terminal must not reach it
    )
    for journal in journals:
        journal.release()
    return process


def _main(words: Sequence[str]) -> int:
    """
    Convert journals, and return the exit status.

    ``words`` has three words for each journal: its directory, its stamp, and the inherited descriptor of its lock.
    """
    from pathlib import Path

    problems = []
    for n in range(0, len(words), 3):
        journal = Journal(Path(words[n]), words[n + 1], int(words[n + 2]))
        try:
            journal.convert()
        except DprobesError as error:
            problems.append(error.message)
        except OSError as error:
            problems.append(f"'{journal.directory}': {reason_of(error)}")
    with contextlib.suppress(OSError):
        sys.stderr.write("; ".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
