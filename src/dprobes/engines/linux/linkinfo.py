"""What bpf(2) tells of links: how many hits at kprobes ran no program."""

from __future__ import annotations

import ctypes
import struct

from dprobes.engines.linux.bpfcalls import Command, attributes_of, call

__all__ = ["LINK_INFO", "MISSED", "MISSED_MANY", "missed_hits"]

LINK_INFO = "bpf_link_info"
"""
What the kernel's types call the answer::

     0 u32 type, id, prog_id
    16 kprobe_multi: u64 addrs; u32 count, flags; u64 missed
    16 perf_event: u32 type; 24 kprobe: u64 func_name; u32 name_len, offset; u64 addr, missed
"""
MISSED, MISSED_MANY = "perf_event.kprobe.missed", "kprobe_multi.missed"
"""
The members with the count: of single kprobes and of those with many functions.

Since Linux kernel commits 3acf8ace6823 ("bpf: Add missed value to kprobe perf link info") and e2b2cd592adb ("bpf: Add
missed value to kprobe_multi link info") (in v6.7).
"""

_INFO = 64
# struct { u32 bpf_fd, info_len; u64 info; }
_OBJECT_INFO = struct.Struct("=IIQ")
_COUNT = struct.Struct("=Q")


def missed_hits(link: int, offset: int) -> int:
    """Return how many hits of a link ran no program; ``offset`` is where its member with the count begins."""
    info = ctypes.create_string_buffer(_INFO)
    call(Command.OBJ_GET_INFO_BY_FD, attributes_of(_OBJECT_INFO, link, len(info), ctypes.addressof(info)))
    (count,) = _COUNT.unpack_from(info.raw, offset)
    return int(count)
