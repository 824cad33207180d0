"""What runs says which build it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dprobes.errors import TargetError
from dprobes.target.kernel.buildids import KERNEL_NOTES, running_build_id


def test_the_running_kernel_has_a_build_id() -> None:
    if not KERNEL_NOTES.exists():
        pytest.skip(f"this kernel has no {KERNEL_NOTES}")
    assert re.fullmatch(r"[0-9a-f]{32,40}", running_build_id(""))


def test_a_module_that_is_not_loaded_has_none() -> None:
    with pytest.raises(TargetError) as caught:
        running_build_id("no_such_module")
    path = Path("/sys/module/no_such_module/notes/.note.gnu.build-id")
    assert caught.value.message == f"the build-id cannot be read: {path}: no such file or directory"
