"""The bit is that which the kernel sets."""

from __future__ import annotations

from dprobes.native.process_page import HAS_ENDED


def test_the_bit_is_that_of_robust_locks() -> None:
    assert HAS_ENDED == 0x40000000  # FUTEX_OWNER_DIED of include/uapi/linux/futex.h
    assert HAS_ENDED > 1 << 22  # above all thread ids (FUTEX_TID_MASK)
