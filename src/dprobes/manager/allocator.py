"""
Have the C library give large blocks back to the kernel as soon as they are freed.

Every insertion reads the file that it is about, and frees what it has read if that is held already (``sharedfiles``).
The GNU C library would keep such a block for its next user: after the first one that is freed it takes blocks of that
size, up to 32 MiB, from the arena of the thread, of which there are eight for each processor (mallopt(3),
M_MMAP_THRESHOLD). Other C libraries have no such habit, and no ``mallopt``.
"""

from __future__ import annotations

import ctypes

__all__ = ["LARGE", "give_large_blocks_back"]

LARGE = 1 << 20
"""Size in bytes from which on a block has pages of its own."""

# malloc.h of the GNU C library
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_large_blocks_back() -> None:
    """Fix from which size on blocks go back, which otherwise grows with those that are freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        # Of small blocks so much may stay free behind the last one: twice as much, as the library has it, too.
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGE)
