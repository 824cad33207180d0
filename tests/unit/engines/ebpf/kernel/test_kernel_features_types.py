"""The kernel's types are read where they cannot be mapped."""

from __future__ import annotations

import errno
import mmap
from typing import TYPE_CHECKING, NoReturn

from dprobes.engines.ebpf.kernel import kernel_features

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENODEV, "No such device")

    path = tmp_path / "vmlinux"
    path.write_bytes(b"types")
    assert kernel_features._contents(str(path))[:] == b"types"
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert kernel_features._contents(str(path)) == b"types"
