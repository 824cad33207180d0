"""
What handlers look at to know whether the tool lives: a word of 32 bits in the memory that it shares with them.

::

    u32   thread id of the tool; bit 30: it has ended, as the kernel notes it (FUTEX_OWNER_DIED, futex(2))
"""

from __future__ import annotations

__all__ = ["HAS_ENDED"]

HAS_ENDED = 1 << 30
