"""
bpf(2) through ctypes: programs, links and maps. No other file makes this system call.

x86-64 Linux only. Commands, types and layouts are those of ``union bpf_attr`` in ``include/uapi/linux/bpf.h``. A kernel
ignores members that it does not know if they are zero. Every function raises OSError with the kernel's errno; its
caller explains the error to the user. The kernel creates all descriptors as close-on-exec.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

from dprobes.platform.linux.call_proxy import call_in_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "LINK_INFO",
    "MISSED",
    "MISSED_MANY",
    "AttachType",
    "Command",
    "KprobeMulti",
    "LogLevel",
    "MapFlag",
    "MapType",
    "Program",
    "ProgramFlag",
    "ProgramInfo",
    "ProgramRunner",
    "ProgramType",
    "UprobeMulti",
    "attributes_of",
    "call",
    "create_map",
    "delete_element",
    "enable_statistics",
    "link_kprobes",
    "link_kprobes_nowhere",
    "link_perf_event",
    "link_uprobes",
    "link_uprobes_nowhere",
    "load_btf",
    "load_program",
    "lookup_element",
    "map_keys",
    "missed_hits",
    "open_program",
    "open_raw_tracepoint",
    "program_info",
    "update_element",
    "verifier_log",
]


class Command(IntEnum):
    """Commands of bpf(2) (``enum bpf_cmd``)."""

    MAP_CREATE = 0
    MAP_LOOKUP_ELEM = 1
    MAP_UPDATE_ELEM = 2
    MAP_DELETE_ELEM = 3
    MAP_GET_NEXT_KEY = 4
    PROG_LOAD = 5
    PROG_TEST_RUN = 10
    PROG_GET_FD_BY_ID = 13
    OBJ_GET_INFO_BY_FD = 15
    RAW_TRACEPOINT_OPEN = 17
    BTF_LOAD = 18
    LINK_CREATE = 28
    ENABLE_STATS = 32


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong)
_syscall.restype = ctypes.c_long

_SYS_BPF = 321
_ADDRESS = struct.Struct("=Q")
_ATTEMPTS = 6


def call(command: Command, attributes: ctypes.Array[ctypes.c_char]) -> int:
    """Call bpf(2) and return its result, which is a descriptor or 0. Raise OSError with the kernel's errno."""
    result: int = _syscall(_SYS_BPF, command, ctypes.addressof(attributes), len(attributes))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"bpf {command.name}: {os.strerror(number)}")
    return result


@dataclass(frozen=True, slots=True)
class Request:
    """
    Request to bpf(2) for an object of the kernel, such as a map.

    ``attributes`` is the ``union bpf_attr``, with zeros in place of addresses. ``data`` has the bytes to which these
    addresses will point, by the offset of the address in ``attributes``. If ``in_proxy`` is True, as for uprobes, a
    proxy makes the call (``call_proxy``).
    """

    command: Command
    attributes: bytes
    data: Mapping[int, bytes] = field(default_factory=dict)
    in_proxy: bool = False


def issue(request: Request) -> int:
    """
    Issue a request for a kernel object, and return the object's descriptor.

    Repeat it if a signal made the verifier fail with EAGAIN.
    """
    attributes = ctypes.create_string_buffer(request.attributes, len(request.attributes))
    buffers = []
    for place, data in request.data.items():
        buffers.append(ctypes.create_string_buffer(data, len(data)))
        _ADDRESS.pack_into(attributes, place, ctypes.addressof(buffers[-1]))
    if request.in_proxy:
        # A process killed while it attaches uprobes would leave them.
        return call_in_proxy(_SYS_BPF, request.command, ctypes.addressof(attributes), len(attributes))
    for _ in range(_ATTEMPTS - 1):
        try:
            return call(request.command, attributes)
        except BlockingIOError:
            continue  # the verifier gives up when a signal is pending
    return call(request.command, attributes)


def attributes_of(layout: struct.Struct, *values: int | bytes) -> ctypes.Array[ctypes.c_char]:
    """Return ``values`` packed as the ``union bpf_attr`` of a command, with the size of ``layout``."""
    buffer = ctypes.create_string_buffer(layout.size)
    layout.pack_into(buffer, 0, *values)
    return buffer


class ProgramType(IntEnum):
    """Types of programs that the engine uses (``enum bpf_prog_type``)."""

    KPROBE = 2
    """The type of kprobe and uprobe programs."""
    TRACEPOINT = 5
    PERF_EVENT = 7
    RAW_TRACEPOINT = 17
    TRACING = 26
    SYSCALL = 31
    """The type of the programs that ``ProgramRunner`` runs; they must be sleepable."""


class AttachType(IntEnum):
    """Attach types of programs (``enum bpf_attach_type``)."""

    NONE = 0
    TRACE_RAW_TP = 23
    TRACE_FENTRY = 24
    TRACE_FEXIT = 25
    MODIFY_RETURN = 26
    PERF_EVENT = 41
    TRACE_KPROBE_MULTI = 42
    TRACE_UPROBE_MULTI = 48


class ProgramFlag(IntFlag):
    """Flags of a program (BPF_F_*)."""

    NONE = 0
    SLEEPABLE = 1 << 4
    """Permits the program to fault pages in. (In v5.10; for uprobes in v6.0.)"""


class LogLevel(IntFlag):
    """Levels of detail of the verifier's log (BPF_LOG_*)."""

    LEVEL1 = 1
    LEVEL2 = 2
    STATS = 4


class Program(NamedTuple):
    """
    BPF program to load, with the attributes of BPF_PROG_LOAD.

    * ``instructions`` has 8 bytes for each instruction, with the descriptors of maps in place.
    * ``btf`` is a descriptor of type information, which a program with callbacks needs. ``functions`` has a record {u32
      first instruction, u32 type id} for each function (``struct bpf_func_info``).
    * ``attach_btf_id`` is the kernel's type id of the function to which a TRACING program is attached.
    """

    type: ProgramType
    instructions: bytes
    attach_type: AttachType = AttachType.NONE
    flags: ProgramFlag = ProgramFlag.NONE
    name: str = ""
    btf: int = 0
    functions: bytes = b""
    attach_btf_id: int = 0


_LICENSE = b"GPL\0"
_FUNCTION_RECORD_SIZE = 8

#   0 u32 prog_type, insn_cnt; u64 insns, license; u32 log_level, log_size; u64 log_buf
#  40 u32 kern_version, prog_flags; char prog_name[16]
#  64 u32 prog_ifindex, expected_attach_type, prog_btf_fd, func_info_rec_size; u64 func_info; u32 func_info_cnt
#  92 u32 line_info_rec_size; u64 line_info; u32 line_info_cnt, attach_btf_id, attach_prog_fd, core_relo_cnt
_PROG_LOAD = struct.Struct("=II16xIIQ4xI16s4xIII8xI4x8x4xI8x")
_INSTRUCTIONS, _LICENSE_AT, _FUNCTIONS = 8, 16, 80


def _load_request(program: Program, log: ctypes.Array[ctypes.c_char] | None, level: LogLevel) -> Request:
    functions = program.functions
    attributes = _PROG_LOAD.pack(
        program.type,
        len(program.instructions) // 8,
        level if log is not None else 0,
        len(log) if log is not None else 0,
        0 if log is None else ctypes.addressof(log),
        program.flags,
        program.name.encode()[:15],
        program.attach_type,
        program.btf,
        _FUNCTION_RECORD_SIZE if functions else 0,
        len(functions) // _FUNCTION_RECORD_SIZE,
        program.attach_btf_id,
    )
    data = {_INSTRUCTIONS: program.instructions, _LICENSE_AT: _LICENSE}
    if functions:
        data[_FUNCTIONS] = functions
    return Request(Command.PROG_LOAD, attributes, data)


def load_program(
    program: Program, log: ctypes.Array[ctypes.c_char] | None = None, level: LogLevel = LogLevel.LEVEL1
) -> int:
    """
    Load a program and return its descriptor.

    If ``log`` is given, the verifier writes a zero-terminated string to it, in the detail of ``level``. Raise OSError
    with the kernel's errno; ENOSPC means that the buffer is too small.
    """
    return issue(_load_request(program, log, level))


_LOG_SIZE = 1 << 16
_LOG_SIZE_MAX = 1 << 26


def verifier_log(program: Program, level: LogLevel = LogLevel.LEVEL1) -> str:
    """
    Load a program, close it, and return the verifier's log in the detail of ``level``.

    The verifier may accept the program or reject it.
    """
    size = _LOG_SIZE
    while True:
        log = ctypes.create_string_buffer(size)
        try:
            os.close(load_program(program, log, level))
        except OSError as error:
            if error.errno == errno.ENOSPC and size < _LOG_SIZE_MAX:
                size *= 8
                continue
        return log.value.decode(errors="replace")


#   0 u32 prog_fd, retval, data_size_in, data_size_out; u64 data_in, data_out
#  32 u32 repeat, duration, ctx_size_in, ctx_size_out; u64 ctx_in, ctx_out; u32 flags, cpu, batch_size
_PROG_TEST_RUN = struct.Struct("=II24x8xI4xQ8x16x")
_RETURN_VALUE = struct.Struct("=4xI")


class ProgramRunner:
    """
    SYSCALL program that runs in the calling process, as often as ``run`` is called.

    ``context`` is the memory that the program's r1 points to. The program may change it, and its helpers for user
    memory access the memory of this process. The size must not change while the runner exists.
    """

    def __init__(self, program_fd: int, context: bytearray) -> None:
        self._context = (ctypes.c_char * len(context)).from_buffer(context)
        self._attributes = attributes_of(_PROG_TEST_RUN, program_fd, 0, len(context), ctypes.addressof(self._context))

    def run(self) -> int:
        """Run the program once, and return its 32-bit result."""
        call(Command.PROG_TEST_RUN, self._attributes)
        value: int = _RETURN_VALUE.unpack_from(self._attributes)[0]
        return value


class ProgramInfo(NamedTuple):
    """
    Kernel's statistics about a loaded BPF program.

    ``run_time`` (nanoseconds) and ``runs`` increase only while statistics are enabled. ``recursion_misses`` counts runs
    that were omitted because the CPU was already running the program.
    """

    id: int
    run_time: int
    runs: int
    recursion_misses: int
    verified: int


# struct { u32 bpf_fd, info_len; u64 info; }
_OBJECT_INFO = struct.Struct("=IIQ")
# struct bpf_prog_info: 0 u32 type, id ... 192 u64 run_time_ns, run_cnt, recursion_misses; u32 verified_insns
_PROGRAM_INFO = struct.Struct("=4xI184xQQQI4x")


def program_info(program_fd: int) -> ProgramInfo:
    """Return the kernel's statistics about a loaded BPF program, by its descriptor."""
    info = ctypes.create_string_buffer(_PROGRAM_INFO.size)
    call(Command.OBJ_GET_INFO_BY_FD, attributes_of(_OBJECT_INFO, program_fd, len(info), ctypes.addressof(info)))
    return ProgramInfo(*_PROGRAM_INFO.unpack(info.raw))


def open_program(number: int) -> int:
    """Return a descriptor of a loaded program by its id (BPF_PROG_GET_FD_BY_ID), whichever process loaded it."""
    return call(Command.PROG_GET_FD_BY_ID, attributes_of(struct.Struct("=I8x"), number))


def enable_statistics() -> int:
    """Have the kernel count runs and run time of all programs while the returned descriptor is open (in v5.8)."""
    return call(Command.ENABLE_STATS, attributes_of(struct.Struct("=I"), 0))


# struct { u64 name; u32 prog_fd; }
_RAW_TRACEPOINT = struct.Struct("=8xI4x")


def open_raw_tracepoint(program_fd: int, name: str = "") -> int:
    """
    Attach a program to a tracepoint and return the descriptor of the link. Closing the descriptor detaches the program.

    A RAW_TRACEPOINT program needs the tracepoint's ``name``. The tracepoint of a TRACING program is in the program's
    attributes.
    """
    data = {0: name.encode() + b"\0"} if name else {}
    return issue(Request(Command.RAW_TRACEPOINT_OPEN, _RAW_TRACEPOINT.pack(program_fd), data))


# struct { u64 btf, btf_log_buf; u32 btf_size, btf_log_size, btf_log_level; }
_BTF_LOAD = struct.Struct("=16xI12x")


def load_btf(blob: bytes) -> int:
    """Load BTF type information into the kernel (BPF_BTF_LOAD) and return its descriptor."""
    return issue(Request(Command.BTF_LOAD, _BTF_LOAD.pack(len(blob)), {0: blob}))


class KprobeMulti(IntFlag):
    """Flags of a kprobe_multi link (BPF_F_KPROBE_MULTI_*)."""

    NONE = 0
    RETURN = 1 << 0


#  16 kprobe_multi: u32 flags, cnt; u64 syms, addrs, cookies
_LINK_KPROBES = struct.Struct("=I4xI4xII8xQQ")


def link_kprobes(
    program_fd: int, addresses: Sequence[int], cookies: Sequence[int], flags: KprobeMulti = KprobeMulti.NONE
) -> int:
    """
    Attach a TRACE_KPROBE_MULTI program to the entries of many functions of the kernel; return the link's descriptor.

    ``addresses`` has the addresses of their first instructions. At a hit, ``bpf_get_attach_cookie`` returns the item of
    ``cookies`` with the same index. Since Linux kernel commit 0dcac2725406 ("bpf: Add multi kprobe link") (in v5.18).
    """
    arrays = [(ctypes.c_uint64 * len(addresses))(*numbers) for numbers in (addresses, cookies)]
    return _link_kprobes(program_fd, flags, len(addresses), *map(ctypes.addressof, arrays))


def link_kprobes_nowhere(program_fd: int) -> int:
    """
    Try to attach a TRACE_KPROBE_MULTI program with an unmapped array of addresses; always raise OSError.

    A kernel that supports such links fails to read the array (EFAULT). Any other kernel reports another error.
    """
    return _link_kprobes(program_fd, KprobeMulti.NONE, 1, 8, 0)


def _link_kprobes(program_fd: int, flags: KprobeMulti, count: int, addresses: int, cookies: int) -> int:
    kind = AttachType.TRACE_KPROBE_MULTI
    attributes = attributes_of(_LINK_KPROBES, program_fd, kind, flags, count, addresses, cookies)
    return call(Command.LINK_CREATE, attributes)


class UprobeMulti(IntFlag):
    """Flags of a uprobe_multi link (BPF_F_UPROBE_MULTI_*)."""

    NONE = 0
    RETURN = 1 << 0


#   0 u32 prog_fd, target_fd, attach_type, flags
#  16 uprobe_multi: u64 path, offsets, ref_ctr_offsets, cookies; u32 cnt, flags, pid
_LINK_UPROBES = struct.Struct("=I4xI4xQQQQIII4x")
_PATH, _OFFSETS, _COUNTERS, _COOKIES = 16, 24, 32, 40
#  16 perf_event: u64 bpf_cookie
_LINK_PERF_EVENT = struct.Struct("=IIIIQ")


def link_uprobes(
    program_fd: int,
    path: str | bytes,
    offsets: Sequence[int],
    cookies: Sequence[int],
    flags: UprobeMulti = UprobeMulti.NONE,
    pid: int = 0,
    counters: Sequence[int] = (),
) -> int:
    """
    Attach a TRACE_UPROBE_MULTI program to many offsets of one file; return the descriptor of the link.

    ``counters`` has the file offset of a 16-bit counter for each breakpoint, or 0 for none. The kernel increments the
    counter in each process as long as the breakpoint exists. At a hit, ``bpf_get_attach_cookie`` returns the item of
    ``cookies`` for the offset. Only the process ``pid`` is probed; 0 selects all processes. Since Linux kernel commit
    89ae89f53d20 ("bpf: Add multi uprobe link") (in v6.6).
    """
    data = {
        _PATH: os.fsencode(path) + b"\0",
        _OFFSETS: _words(offsets),
        _COOKIES: _words(cookies),
    }
    if any(counters):
        data[_COUNTERS] = _words(counters)
    kind = AttachType.TRACE_UPROBE_MULTI
    attributes = _LINK_UPROBES.pack(program_fd, kind, 0, 0, 0, 0, len(offsets), flags, pid)
    return issue(Request(Command.LINK_CREATE, attributes, data, in_proxy=True))


def _words(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"={len(numbers)}Q", *numbers)


def link_uprobes_nowhere(program_fd: int, pid: int = 0) -> int:
    """
    Try to attach a TRACE_UPROBE_MULTI program to the root directory, which has no code; always raise OSError.

    A kernel that supports such links refuses the directory (EBADF). Any other kernel refuses the attach type.
    """
    path, zero = ctypes.create_string_buffer(b"/"), ctypes.c_uint64(0)
    at, kind = ctypes.addressof(zero), AttachType.TRACE_UPROBE_MULTI
    attributes = attributes_of(
        _LINK_UPROBES, program_fd, kind, ctypes.addressof(path), at, 0, at, 1, UprobeMulti.NONE, pid
    )
    return call(Command.LINK_CREATE, attributes)


def link_perf_event(program_fd: int, event_fd: int, cookie: int = 0) -> int:
    """
    Attach a program to a perf event and return the descriptor of the link.

    At a hit, ``bpf_get_attach_cookie`` returns ``cookie``. Since Linux kernel commit b89fbfbb854c ("bpf: Implement
    minimal BPF perf link") (in v5.15).
    """
    return call(
        Command.LINK_CREATE,
        attributes_of(_LINK_PERF_EVENT, program_fd, event_fd, AttachType.PERF_EVENT, 0, cookie),
    )


class MapType(IntEnum):
    """Types of maps that the engine uses (``enum bpf_map_type``)."""

    HASH = 1
    ARRAY = 2
    PERF_EVENT_ARRAY = 4
    PERCPU_HASH = 5
    LRU_HASH = 9
    ARRAY_OF_MAPS = 12
    RINGBUF = 27


class MapFlag(IntFlag):
    """Flags of a map (BPF_F_*)."""

    NONE = 0
    NO_PREALLOC = 1 << 0
    """Allocate the elements of a hash when they are inserted."""
    MMAPABLE = 1 << 10
    """Let user space map the elements of an array, each 8-aligned (in v5.5)."""


# struct { u32 map_type, key_size, value_size, max_entries, map_flags, inner_map_fd, numa_node; char map_name[16]; ... }
_MAP_CREATE = struct.Struct("=IIIIII4x16s20x")


def create_map(
    kind: MapType,
    key_size: int,
    value_size: int,
    entries: int,
    flags: MapFlag = MapFlag.NONE,
    name: str = "",
    inner: int = 0,
) -> int:
    """
    Create a map and return its descriptor.

    Sizes are in bytes. For a ring buffer, ``entries`` is its size in bytes, a power of two and at least a page.
    ``name`` is cut to 15 characters; letters, digits, underscores and dots are valid. For a map of maps, ``inner`` is
    the descriptor of a map of the same form as the elements.
    """
    attributes = _MAP_CREATE.pack(kind, key_size, value_size, entries, flags, inner, name.encode()[:15])
    return issue(Request(Command.MAP_CREATE, attributes))


# struct { u32 map_fd; u64 key; u64 value or next_key; u64 flags; }
_ELEMENT = struct.Struct("=I4xQQQ")


def lookup_element(map_fd: int, key: bytes, value_size: int) -> bytes | None:
    """Return the ``value_size`` bytes of the value of a key, or None if the map does not have the key."""
    key_buffer, value = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value_size)
    try:
        call(
            Command.MAP_LOOKUP_ELEM,
            attributes_of(_ELEMENT, map_fd, ctypes.addressof(key_buffer), ctypes.addressof(value), 0),
        )
    except FileNotFoundError:
        return None
    return value.raw


def update_element(map_fd: int, key: bytes, value: bytes) -> None:
    """Set the value of a key; insert the key if it is missing."""
    key_buffer, value_buffer = (
        ctypes.create_string_buffer(key, len(key)),
        ctypes.create_string_buffer(value, len(value)),
    )
    call(
        Command.MAP_UPDATE_ELEM,
        attributes_of(_ELEMENT, map_fd, ctypes.addressof(key_buffer), ctypes.addressof(value_buffer), 0),
    )


def delete_element(map_fd: int, key: bytes) -> bool:
    """Delete a key; return False if the map does not have the key."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    try:
        call(Command.MAP_DELETE_ELEM, attributes_of(_ELEMENT, map_fd, ctypes.addressof(key_buffer), 0, 0))
    except FileNotFoundError:
        return False
    return True


def map_keys(map_fd: int, key_size: int) -> Iterator[bytes]:
    """Iterate over the keys of a hash map. After a deletion the kernel may start again and return some keys twice."""
    key, following = None, ctypes.create_string_buffer(key_size)
    while True:
        start = 0 if key is None else ctypes.addressof(key)
        try:
            call(
                Command.MAP_GET_NEXT_KEY,
                attributes_of(_ELEMENT, map_fd, start, ctypes.addressof(following), 0),
            )
        except FileNotFoundError:
            return
        yield following.raw
        key = ctypes.create_string_buffer(following.raw, key_size)


LINK_INFO = "bpf_link_info"
"""
The type's name in the kernel's BTF. Offsets of its members::

     0  u32 type, id, prog_id
    16  kprobe_multi: u64 addrs; u32 count, flags; u64 missed
    16  perf_event: u32 type; 24 kprobe: u64 func_name; u32 name_len, offset; u64 addr, missed
"""
MISSED, MISSED_MANY = "perf_event.kprobe.missed", "kprobe_multi.missed"
"""
Members with the number of missed hits: for a single kprobe, and for a link with many functions.

Since Linux kernel commits 3acf8ace6823 ("bpf: Add missed value to kprobe perf link info") and e2b2cd592adb ("bpf: Add
missed value to kprobe_multi link info") (in v6.7).
"""

_INFO = 64
_COUNT = struct.Struct("=Q")


def missed_hits(link: int, offset: int) -> int:
    """
    Return how many hits of a link's probes ran no program, as the kernel has counted them.

    ``offset`` is the byte offset of the count in ``bpf_link_info``.
    """
    info = ctypes.create_string_buffer(_INFO)
    call(Command.OBJ_GET_INFO_BY_FD, attributes_of(_OBJECT_INFO, link, len(info), ctypes.addressof(info)))
    (count,) = _COUNT.unpack_from(info.raw, offset)
    return int(count)
