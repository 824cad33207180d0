"""The mark is where handlers look at it, and says so when the tool has ended."""

from __future__ import annotations

from dprobes.engines.inline.handler_hits import LifeMark
from dprobes.engines.inline.shared_memory import Region, SharedArray
from dprobes.native.process_page import HAS_ENDED
from dprobes.platform.linux.process_calls import ROBUST_LIST_SIZE


def test_handlers_see_a_living_tool_until_it_closes_the_mark() -> None:
    with Region(1 << 16) as region:
        region.place = 0x7000_0000_0000
        region.take(1)
        mark = LifeMark(SharedArray(region, ROBUST_LIST_SIZE))
        at = mark.address - region.place

        def word() -> int:
            return int.from_bytes(region.mapping[at : at + 4], "little")

        assert word() == mark.word
        assert word() > 0
        assert not word() & HAS_ENDED
        mark.close()
        assert word() & HAS_ENDED
