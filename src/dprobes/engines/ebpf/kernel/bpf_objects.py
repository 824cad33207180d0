"""
BPF programs and maps in the kernel, their descriptors, and the memory that BPF programs and this process share.

A map exists as long as its object here is open, or a loaded BPF program uses it.

The layout of a ring buffer is that of ``struct bpf_ringbuf`` in ``kernel/bpf/ringbuf.c``, as user space sees it::

    page 0                 u64 consumer position, which the reader writes
    page 1                 u64 producer position, which the kernel writes
    from page 2 on         the data, mapped twice, so that an entry at the end of the ring is contiguous

    entries                as in ``ring_spans``; the second half of a header is a page offset

Positions only grow; their low bits are offsets in the data.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal, Self

from dprobes.bpf.bpf_instructions import INSN_SIZE, Register, encode
from dprobes.bpf.map_layouts import Status
from dprobes.engines.keyed_table_maps import TableMaps
from dprobes.engines.ring_spans import complete_end, entries_in
from dprobes.errors import EngineError, PrivilegeError, reason_of_number
from dprobes.platform.linux.bpf_calls import (
    AttachType,
    MapFlag,
    MapType,
    Program,
    ProgramFlag,
    ProgramType,
    create_map,
    delete_element,
    load_btf,
    load_program,
    lookup_element,
    map_keys,
    update_element,
)
from dprobes.platform.linux.procfs import cpu_limit
from dprobes.target.btf import encode_functions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dprobes.bpf.bpf_assembler import Assembled, Assembler
    from dprobes.bpf.map_layouts import MapName
    from dprobes.rpn.keyed_tables import Table

__all__ = [
    "PERF_REMEDY",
    "TOO_MANY_FILES",
    "ArrayMap",
    "Descriptor",
    "Descriptors",
    "HashMap",
    "KernelTables",
    "OuterMap",
    "RingBuffer",
    "explained",
    "finished",
    "load",
    "loadable",
    "refused",
    "wait",
    "with_descriptors",
]

PERF_REMEDY = "run as root, or with the capabilities CAP_BPF and CAP_PERFMON; a container must allow perf_event_open(2)"
"""Hint for events or tracepoints that the kernel does not permit."""

TOO_MANY_FILES = "maps, handlers and links take a descriptor each: raise the limit of open files (ulimit -n)"


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """
    Return a context manager in which the kernel's refusal of ``what`` raises ``EngineError``.

    A refusal is an OSError without a file name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise EngineError(
            f"the kernel refuses {what}: {reason_of_number(error.errno or 0)}",
            hint="'dprobes doctor' shows what works on this machine",
        ) from error


def refused(error: OSError, problem: str, denied: str, remedy: str) -> EngineError:
    """Return ``PrivilegeError`` with ``denied`` and ``remedy`` for EPERM or EACCES, otherwise ``EngineError``."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(denied, hint=remedy)
    return EngineError(problem, hint=TOO_MANY_FILES if error.errno == errno.EMFILE else None)


class Descriptor:
    """
    File descriptor and its owner, a context manager. It may be closed more than once.

    ``fd`` is -1 after the descriptor was closed or detached.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        """Give up ownership of the descriptor, and return it."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Descriptors:
    """File descriptors that this object owns, and that are closed together."""

    def __init__(self, descriptors: Iterable[int] = ()) -> None:
        self._descriptors = list(descriptors)

    def __len__(self) -> int:
        return len(self._descriptors)

    def add(self, fd: int) -> int:
        """Take ownership of a descriptor, and return it."""
        self._descriptors.append(fd)
        return fd

    def detach(self) -> list[int]:
        """Give up ownership of all descriptors, and return them."""
        left, self._descriptors = self._descriptors, []
        return left

    def remove(self, fd: int) -> int:
        """Give up ownership of one descriptor, and return it."""
        self._descriptors.remove(fd)
        return fd

    def renew(self, cpu: int) -> None:
        """
        Attach an event of each CPU on a CPU that has come online.

        Links of such events override this method. For other descriptors, do nothing.
        """

    def close(self) -> None:
        """Close the descriptors, the last one first."""
        while self._descriptors:
            # The kernel frees a descriptor also when close(2) reports an error.
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_IMMEDIATE = struct.Struct("=i")
_IMMEDIATE_OFFSET = 4  # in struct bpf_insn
_FUNCTION_RECORD = struct.Struct("=II")  # struct bpf_func_info


def with_descriptors(assembled: Assembled, maps: Mapping[MapName, int]) -> bytes:
    """Return the bytes of a program for bpf(2): file descriptors replace the names of maps."""
    code = bytearray(encode(assembled.code))
    for reference in assembled.maps:
        _IMMEDIATE.pack_into(code, reference.index * INSN_SIZE + _IMMEDIATE_OFFSET, maps[reference.map])
    return bytes(code)


def finished(asm: Assembler) -> Assembled:
    """Append the end of a program that returns 0, and return the assembled program."""
    asm.mov(Register.R0, 0)
    asm.exit()
    return asm.assemble()


def load(
    assembled: Assembled,
    maps: Mapping[MapName, int],
    kind: ProgramType,
    *,
    attach_type: AttachType = AttachType.NONE,
    flags: ProgramFlag = ProgramFlag.NONE,
    attach_btf_id: int = 0,
    name: str = "",
) -> int:
    """
    Load a BPF program and return its descriptor, which the caller closes; raise OSError with the kernel's error.

    ``maps`` has the descriptors of the maps that the code names. ``attach_btf_id`` is the BTF id of the function or
    tracepoint to attach to, or 0. ``name`` is the name that bpftool shows.
    """
    with loadable(assembled, maps, kind, attach_type, flags, attach_btf_id, name) as program:
        return load_program(program)


@contextlib.contextmanager
def loadable(
    assembled: Assembled,
    maps: Mapping[MapName, int],
    kind: ProgramType,
    attach_type: AttachType = AttachType.NONE,
    flags: ProgramFlag = ProgramFlag.NONE,
    attach_btf_id: int = 0,
    name: str = "",
) -> Iterator[Program]:
    """
    Return a context manager that yields the arguments of BPF_PROG_LOAD for a program.

    Within the context, the BTF of a program with several functions is loaded. The parameters are those of ``load``.
    """
    code = with_descriptors(assembled, maps)
    if len(assembled.functions) == 1:
        yield Program(kind, code, attach_type, flags, name, attach_btf_id=attach_btf_id)
        return
    called = {index + 1 + insn.imm for index, insn in enumerate(assembled.code) if insn.is_local_call}
    blob, ids = encode_functions(
        [f"f{number}" for number in range(len(assembled.functions))],
        [number for number, start in enumerate(assembled.functions) if start in called],
    )
    functions = b"".join(_FUNCTION_RECORD.pack(*pair) for pair in zip(assembled.functions, ids, strict=True))
    btf = load_btf(blob)
    try:
        yield Program(kind, code, attach_type, flags, name, btf, functions, attach_btf_id)
    finally:
        os.close(btf)


class ArrayMap(Descriptor):
    """
    An array whose elements this process accesses as memory.

    Any thread may use the views of the memory, until ``close``. BPF programs may address the value of a map with one
    element directly. Elements begin at multiples of ``stride`` bytes.
    """

    def __init__(self, value_size: int, entries: int = 1, name: str = "") -> None:
        super().__init__(create_map(MapType.ARRAY, 4, value_size, entries, MapFlag.MMAPABLE, name))
        self.stride = (value_size + 7) & ~7
        self._size = self.stride * entries
        self._mapping: mmap.mmap | None = None
        self._views: dict[str, memoryview] = {}
        self._mapping_lock = threading.Lock()

    def _view(self, kind: Literal["B", "I", "Q"]) -> memoryview:
        view = self._views.get(kind)
        return self._map(kind) if view is None else view

    def _map(self, kind: Literal["B", "I", "Q"]) -> memoryview:
        with self._mapping_lock:
            if self._mapping is None:
                # mmap(2) maps whole pages; the array ends in the last one.
                self._mapping = mmap.mmap(self.fd, -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE)
            if kind not in self._views:
                with memoryview(self._mapping) as whole, whole[: self._size] as used:
                    self._views[kind] = used.cast(kind)
            return self._views[kind]

    @property
    def memory(self) -> memoryview:
        """Elements as bytes."""
        return self._view("B")

    @property
    def words(self) -> memoryview:
        """Elements as unsigned 64-bit numbers, each of which is read and written atomically."""
        return self._view("Q")

    @property
    def halves(self) -> memoryview:
        """Elements as unsigned 32-bit numbers."""
        return self._view("I")

    def close(self) -> None:
        """Unmap the memory of the map, and close its descriptor."""
        for view in self._views.values():
            view.release()
        self._views.clear()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        super().close()


class OuterMap(Descriptor):
    """
    Map whose only element is another map, which can be stored after BPF programs were loaded.

    ``example`` is the descriptor of a map with the layout of the element. The kernel keeps the stored map as long as it
    is the element.
    """

    def __init__(self, example: int, name: str = "") -> None:
        super().__init__(create_map(MapType.ARRAY_OF_MAPS, 4, 4, 1, name=name, inner=example))

    def put(self, descriptor: int) -> None:
        """Store the map with this descriptor; BPF programs find it when this returns."""
        update_element(self.fd, bytes(4), descriptor.to_bytes(4, "little"))


class LruHashMap(Descriptor):
    """Hash table that only BPF programs use. When it is full, it evicts the least recently used entries."""

    def __init__(self, key_size: int, value_size: int, entries: int, name: str = "") -> None:
        super().__init__(create_map(MapType.LRU_HASH, key_size, value_size, entries, MapFlag.NONE, name))


class HashMap(Descriptor):
    """
    Hash table with room for ``entries`` keys; ``key_size`` and ``value_size`` are in bytes.

    With ``preallocated``, the kernel allocates all memory at once. Programs on perf events require this before Linux
    kernel commit 34dd3bad1a6f ("bpf: Relax the requirement to use preallocated hash maps in tracing progs.") (in v6.1).
    With ``per_cpu``, a value is the concatenation of the values of all possible CPUs.
    """

    def __init__(
        self,
        key_size: int,
        value_size: int,
        entries: int,
        name: str = "",
        *,
        preallocated: bool = False,
        per_cpu: bool = False,
    ) -> None:
        flags = MapFlag.NONE if preallocated else MapFlag.NO_PREALLOC
        kind = MapType.PERCPU_HASH if per_cpu else MapType.HASH
        super().__init__(create_map(kind, key_size, value_size, entries, flags, name))
        self._key_size = key_size
        self._value_size = cpu_limit() * (-(-value_size // 8) * 8) if per_cpu else value_size

    def __getitem__(self, key: bytes) -> bytes:
        value = lookup_element(self.fd, key, self._value_size)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        update_element(self.fd, key, value)

    def __contains__(self, key: bytes) -> bool:
        return lookup_element(self.fd, key, self._value_size) is not None

    def __iter__(self) -> Iterator[bytes]:
        return map_keys(self.fd, self._key_size)

    def discard(self, key: bytes) -> bool:
        """Delete a key from the map; return whether it existed."""
        return delete_element(self.fd, key)


class _KernelMaps:
    """Factory of maps in the kernel."""

    def array(self, size: int, name: str) -> ArrayMap:
        """Create an array of one element of ``size`` bytes, and map it now, because mmap(2) needs a free descriptor."""
        made = ArrayMap(size, name=name)
        _ = made.words
        return made

    def hash(self, key_size: int, value_size: int, entries: int, name: str, *, per_cpu: bool) -> HashMap:
        """
        Create a preallocated hash table with at most ``entries`` keys; sizes are in bytes.

        With ``per_cpu``, each CPU has a value of ``value_size`` bytes for a key.
        """
        return HashMap(key_size, value_size, entries, name, preallocated=True, per_cpu=per_cpu)


class KernelTables(TableMaps[ArrayMap, HashMap]):
    """BPF maps of the keyed tables of a probe program; the arguments are those of ``TableMaps``."""

    def __init__(self, tables: Sequence[Table], shared: AbstractSet[int], cpus: int) -> None:
        super().__init__(tables, shared, cpus, _KernelMaps())

    @property
    def descriptors(self) -> Mapping[MapName, int]:
        """File descriptors of the maps, keyed by the names that handlers use."""
        return {name: each.fd for name, each in self.maps.items()}


class RingBuffer(Descriptor):
    """
    A ring buffer of ``size`` bytes, a power of two and at least a page, to which BPF programs write.

    There is one reader at a time. Views of the data must be released before ``close``.
    """

    def __init__(self, size: int, name: str = "") -> None:
        super().__init__(create_map(MapType.RINGBUF, 0, 0, size, name=name))
        self.size = size
        page = mmap.PAGESIZE
        self._closed = False
        with contextlib.ExitStack() as undoing:
            undoing.callback(super().close)
            self._own = undoing.enter_context(mmap.mmap(self.fd, page))
            self._kernels = mmap.mmap(self.fd, page + 2 * size, prot=mmap.PROT_READ, offset=page)
            undoing.pop_all()
        with memoryview(self._own) as own, memoryview(self._kernels) as kernels:
            self._consumer = own.cast("Q")
            with kernels[:8] as position:
                self._producer = position.cast("Q")
            self._data = kernels[page:]
        self._words = self._data.cast("I")

    @property
    def pending(self) -> int:
        """Number of bytes that have not been released by the reader, including incomplete entries."""
        pending: int = self._producer[0] - self._consumer[0]
        return pending

    def drain(self) -> list[bytes]:
        """Return the data of all entries before the first incomplete one, and release their room."""
        with self.window() as window:
            entries = [bytes(window[start:stop]) for start, stop in entries_in(window)]
            size = len(window)
        self.advance(size)
        return entries

    def window(self, size: int = sys.maxsize) -> memoryview:
        """
        Return a view of the entries before the first incomplete one, with headers and discarded entries.

        Only entries that begin in the first ``size`` bytes are included. After ``advance`` the kernel may overwrite
        them.
        """
        begin = self._consumer[0]
        start = begin & self.size - 1
        end = start + min(self._producer[0] - begin, size)
        return self._data[start : complete_end(self._words, start, end)]

    def advance(self, size: int) -> None:
        """Release the room of the first ``size`` bytes, which are whole entries of ``window``."""
        self._consumer[0] += size

    def close(self) -> None:
        """Unmap and close the ring."""
        if not self._closed:
            self._closed = True
            for view in (self._words, self._data, self._producer, self._consumer):
                view.release()
            self._kernels.close()
            self._own.close()
        super().close()


_FIRST_SLEEP = 0.01
_LONGEST_SLEEP = 0.5


def wait(ring: RingBuffer, status: memoryview, timeout: float, others: Iterable[int] = ()) -> bool:
    """
    Sleep until the ring contains an entry, and return True if it does.

    The sleep also ends when one of the descriptors ``others`` is readable, or after ``timeout`` seconds. ``status`` has
    the 64-bit words of STATUS. A BPF program that finds ``Status.WAITING`` set clears it and wakes this process. If it
    is clear, no wake-up is needed.

    poll(2) checks the ring before it sleeps, after a barrier; epoll_wait(2) would miss an entry that arrived without a
    wake-up. A BPF program may read the word before this function sets it, and write its entry after this function has
    checked the ring. Then it wakes no process. So the ring is checked again after a short sleep, and then at growing
    intervals. If the word has been set since the last call, no such BPF program exists, and short sleeps are omitted.
    """
    poll = select.poll()
    for descriptor in (ring.fd, *others):
        poll.register(descriptor, select.POLLIN)
    end = time.monotonic() + timeout
    word = Status.WAITING // 8
    sleep = timeout if status[word] else _FIRST_SLEEP
    while True:
        status[word] = 1
        left = end - time.monotonic()
        if poll.poll(max(0.0, min(sleep, left)) * 1000) or left <= sleep:
            break
        sleep = min(2 * sleep, _LONGEST_SLEEP)
    if not ring.pending:
        return False
    status[word] = 0
    return True
