"""Arrays: where their values are, and that they are those of the region."""

from __future__ import annotations

import pytest

from dprobes.engines.inline.shared_memory import Region, SharedArray
from dprobes.native.generated_code import MapShape


@pytest.mark.parametrize(("value_size", "stride"), [(1, 8), (8, 8), (12, 16), (64, 64)])
def test_values_are_where_handlers_look_for_them(value_size: int, stride: int) -> None:
    with Region(1 << 16) as region:
        region.place = 0x7000_0000_0000
        region.take(1)
        array = SharedArray(region, value_size, 5)
        other = SharedArray(region, value_size, 5)
        assert array.place.shape is MapShape.VALUES
        assert array.place.stride == stride
        at = array.place.address - region.place
        for n in range(5):
            array.memory[n * stride] = n + 1
            assert region.mapping[at + n * stride] == n + 1
        assert not any(other.memory)
        assert len(array.memory) == 5 * stride
        array.words[0] = (1 << 64) - 2
        assert (array.halves[0], array.halves[1]) == ((1 << 32) - 2, (1 << 32) - 1)
        array.close()
        other.close()
