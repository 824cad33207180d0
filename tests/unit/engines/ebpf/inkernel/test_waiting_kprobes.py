"""The kernel's list of what kprobes have missed."""

from __future__ import annotations

from dprobes.engines.ebpf.inkernel.waiting_kprobes import parse_misses

PROFILE = """\
  dprobes_12_345_67_0                                        10               3
  dprobes_12_345_67_1                                         0               0
  somebody_else                                               7               1
"""


def test_misses_are_found_by_the_names_of_events() -> None:
    assert parse_misses(PROFILE) == {"dprobes_12_345_67_0": 3, "dprobes_12_345_67_1": 0, "somebody_else": 1}
    assert parse_misses("") == {}
