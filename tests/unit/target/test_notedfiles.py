"""Which files were read is noted: those that were there, and those that were not."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.elf.contents import file_contents, file_head
from dprobes.target.notedfiles import noted_files, state_of

if TYPE_CHECKING:
    from pathlib import Path


def test_files_that_are_read_are_noted_with_their_states(tmp_path: Path) -> None:
    there, head, missing = (tmp_path / name for name in ("there", "head", "missing"))
    there.write_bytes(b"bytes")
    head.write_bytes(b"more bytes")
    with noted_files() as seen:
        file_contents(there, "a file")
        file_head(head, 4)
        with pytest.raises(TargetError):
            file_contents(missing, "a file")
    file_contents(there, "a file")
    assert seen == {
        str(there): state_of(there.stat()),
        str(head): state_of(head.stat()),
        str(missing): None,
    }


def test_a_changed_file_has_another_state(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    first = state_of(path.stat())
    os.utime(path, ns=(0, 0))
    second = state_of(path.stat())
    path.unlink()
    path.write_bytes(b"other")
    assert len({first, second, state_of(path.stat())}) == 3


def test_what_other_threads_read_is_not_noted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    with noted_files() as seen:
        thread = threading.Thread(target=file_contents, args=(path, "a file"))
        thread.start()
        thread.join()
    assert seen == {}


def test_within_another_the_inner_one_notes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    with noted_files() as outer:
        with noted_files() as inner:
            file_head(path, 1)
        assert (list(outer), list(inner)) == ([], [str(path)])
        file_head(path, 1)
    assert list(outer) == [str(path)]
