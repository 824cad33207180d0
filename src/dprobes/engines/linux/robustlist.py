"""
The list of words in memory in which the kernel notes that a thread has ended: set_robust_list(2).

The only file that makes these calls, through ctypes. It is meant for locks, but serves whoever wants to let others know
of its end, a ``kill -9`` included. The C library has a list for each thread; a thread that takes another one gives the
locks of that up, so it must be one that has none.

::

    struct robust_list_head    next          the first element, or the head itself (include/uapi/linux/futex.h)
                               offset        from an element to its word
                               pending
    struct robust_list         next
    word                       thread id, until the kernel sets bit 30 instead
"""

from __future__ import annotations

import ctypes
import struct
import threading

from dprobes.errors import system_error

__all__ = ["SIZE", "note_end_of_thread"]

_LAYOUT = struct.Struct("=IxxxxQQqQ")
"""The word, an element, and the head."""
SIZE = _LAYOUT.size
_ELEMENT, _HEAD = 8, 16
_HEAD_SIZE = 24

_SET_ROBUST_LIST = 273
"""arch/x86/entry/syscalls/syscall_64.tbl"""

_libc = ctypes.CDLL(None, use_errno=True)


def note_end_of_thread(memory: memoryview, address: int) -> None:
    """
    Have the kernel set bit 30 of the word at the beginning of ``memory`` when the calling thread ends.

    ``address`` is where this process has the memory, of SIZE bytes, which must stay there. Raise OSError if the kernel
    cannot do that.
    """
    head, element = address + _HEAD, address + _ELEMENT
    memory[:SIZE] = _LAYOUT.pack(threading.get_native_id(), head, element, -_ELEMENT, 0)
    if _libc.syscall(ctypes.c_long(_SET_ROBUST_LIST), ctypes.c_void_p(head), ctypes.c_size_t(_HEAD_SIZE)) < 0:
        raise system_error(ctypes.get_errno())
