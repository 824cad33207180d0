"""Whether programs can read what records say of a thread: tried once, and then known until the next boot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from dprobes.bpf.lower.lowering_request import TaskLayout
from dprobes.engines.ebpf.kernel import task_structures
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.engines.ebpf.kernel.task_structures import task_layout
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from dprobes.engines.ebpf.kernel.kernel_features import KernelTypes


class Types:
    """Know where everything is."""

    def member_offset(self, composite: str, path: str) -> int:
        return {"pid": 8, "tgid": 12, "comm": 32, "cred": 24, "uid": 4}[path]


def features(**there: bool) -> Features:
    overrides = {feature: there.get(feature.name, True) for feature in Feature}
    return Features(cast("KernelTypes", Types()), overrides)


def test_fields_are_read_where_the_verifier_lets_programs_do_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded: list[int] = []
    refuses = True

    def load(*_: object, flags: int) -> int:
        loaded.append(flags)
        if refuses:
            raise EngineError("refused")
        return os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(task_structures, "load", load)
    assert task_layout(features(FIND_VMA=False)) is None
    assert task_layout(features(BTF=False)) is None
    assert loaded == []
    assert task_layout(features()) is None
    assert task_layout(features()) is None  # which is known now
    assert len(loaded) == 1
    refuses = False
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another boot"))
    expected = TaskLayout(tid=8, pid=12, name=32, cred=24, uid=4)
    assert task_layout(features()) == task_layout(features()) == expected
    assert len(loaded) == 3
    assert task_layout(features(SLEEPABLE_UPROBE=False)) == expected
    assert len(loaded) == 4
