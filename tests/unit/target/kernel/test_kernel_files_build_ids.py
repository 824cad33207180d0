"""What runs says which build it is."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from dprobes.errors import TargetError
from dprobes.target.kernel.kernel_files import KERNEL_NOTES, build_id_of_notes, running_build_id


def test_the_running_kernel_has_a_build_id() -> None:
    if not KERNEL_NOTES.exists():
        pytest.skip(f"this kernel has no {KERNEL_NOTES}")
    assert re.fullmatch(r"[0-9a-f]{32,40}", running_build_id(""))


def test_a_module_that_is_not_loaded_has_none() -> None:
    with pytest.raises(TargetError) as caught:
        running_build_id("no_such_module")
    path = Path("/sys/module/no_such_module/notes/.note.gnu.build-id")
    assert caught.value.message == f"the build-id cannot be read: {path}: no such file or directory"


def test_the_build_id_stands_behind_other_notes(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    other = struct.pack("<3I4s4s", 4, 4, 1, b"Xen", b"\1\2\3\4")
    path.write_bytes(other + struct.pack("<3I4s5s3x", 4, 5, 3, b"GNU", bytes.fromhex("0123456789")))
    assert build_id_of_notes(path) == "0123456789"


def test_notes_without_a_build_id(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"")
    with pytest.raises(TargetError) as caught:
        build_id_of_notes(path)
    assert caught.value.message == f"there is no build-id in {path}"
