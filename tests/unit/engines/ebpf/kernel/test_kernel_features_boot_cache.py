"""Numbers that are kept until the next boot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.kernel import kernel_features
from dprobes.engines.ebpf.kernel.kernel_features import KeptAnswers

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_added_is_there_the_next_time(tmp_path: Path) -> None:
    first = KeptAnswers("numbers", tmp_path / "new")
    assert first.get("task_struct.tgid") is None
    first.add("task_struct.tgid", 1234)
    first.add("TYPEDEF btf_trace_x", 7)
    second = KeptAnswers("numbers", tmp_path / "new")
    assert (second.get("task_struct.tgid"), second.get("TYPEDEF btf_trace_x")) == (1234, 7)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["numbers"]


def test_another_boot_knows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeptAnswers("numbers", tmp_path).add("x", 1)
    other = tmp_path / "boot_id"
    other.write_text("another\n")
    monkeypatch.setattr(kernel_features, "BOOT_ID", other)
    assert KeptAnswers("numbers", tmp_path).get("x") is None


@pytest.mark.parametrize("damage", ["", "\n", "garbage", "{boot}\nx\n", "{boot}\nx y\n"])
def test_a_damaged_file_is_none(tmp_path: Path, damage: str) -> None:
    kept = KeptAnswers("numbers", tmp_path)
    kept.add("x", 1)
    path = tmp_path / "numbers"
    path.write_text(damage.replace("{boot}", path.read_text().splitlines()[0]))
    again = KeptAnswers("numbers", tmp_path)
    assert again.get("x") is None
    again.add("x", 2)
    assert KeptAnswers("numbers", tmp_path).get("x") == 2


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = KeptAnswers("numbers", tmp_path / "file")
    kept.add("x", 1)
    assert kept.get("x") == 1
