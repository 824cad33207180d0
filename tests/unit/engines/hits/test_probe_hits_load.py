"""Which hits run the handler that was thinned."""

from __future__ import annotations

from dprobes.engines.hits.probe_hits import HitLoad


def test_one_hit_of_so_many_is_not_skipped() -> None:
    load = HitLoad()
    assert [load.skips() for _ in range(3)] == [False] * 3
    load.thinning = 3
    assert [load.skips() for _ in range(7)] == [False, True, True, False, True, True, False]
