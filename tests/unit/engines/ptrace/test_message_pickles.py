"""Jumps arrive in the other process as they were."""

from __future__ import annotations

import dataclasses
import pickle

from dprobes.engines.ptrace.site_patches import NativeStop, PatchSwitch, SitePatch
from dprobes.platform.x86.instruction_relocation import CodeCopy


def test_each_field_of_a_jump_arrives() -> None:
    copies, stops = (CodeCopy(1, 2, True),), (NativeStop(1, 2, True, False, True, 3, 4, 5),)
    switches = (PatchSwitch(1, b"a", b"b", 2, ((1, 2, 3),)),)
    patch = SitePatch(
        ((1, 2, 3),), 4, b"c", (5, b"d"), ((6, b"e"),), (b"f",), ((7, 8),), copies, 9, "jump", ((10, 11),), stops, 12,
        switches, 13, traps=False,
    )  # fmt: skip
    found = pickle.loads(pickle.dumps(patch))
    assert dataclasses.astuple(found) == dataclasses.astuple(patch)
    assert isinstance(found.copies[0], CodeCopy)
    assert isinstance(found.stops[0], NativeStop)
    assert not any(value == field.default for field, value in _fields(patch))


def _fields(value: SitePatch) -> list[tuple[dataclasses.Field[object], object]]:
    return [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
