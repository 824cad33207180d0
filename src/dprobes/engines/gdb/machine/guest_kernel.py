"""Kernel of a machine as the target of kernel programs, read through a stub while the machine is stopped."""

from __future__ import annotations

import contextlib
import hashlib
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import architecture
from dprobes.cache_files import cache_directory, cached_names, keep_newest, mark_used, read_cached, write_cached
from dprobes.engines.gdb.machine.guest_kernel_image import find_image, symbols_in_memory
from dprobes.engines.gdb.machine.machine_target import GuestMemory, MachineTarget
from dprobes.engines.gdb.machine.orc_tables import OrcLayout
from dprobes.engines.gdb.remote_protocol import Stopped
from dprobes.engines.gdb.stub_registers import architecture_described_as, processor_of
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_transports import open_transport
from dprobes.engines.gdb.unmet_needs import no_machine
from dprobes.errors import EngineError, FormatError, TargetError
from dprobes.escapes import escaped
from dprobes.resolve.probepoints import MACHINE
from dprobes.target.btf import Btf
from dprobes.target.kernel.kernel_files import build_id_in
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import LoadedModule, RunningKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.stub_connection import StubConnection
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.target.code.machine_code import DecodedInstruction

__all__ = [
    "WATCHPOINTS_MAX",
    "GuestKernel",
    "GuestModule",
    "KernelLayout",
    "KnownKernel",
    "described_processor",
    "keep_kernel",
    "known_kernel",
    "listed_modules",
    "symbols_of_modules",
    "visited_kernel",
]

_MODULE_TABLES = ("orc_unwind_ip", "orc_unwind", "num_orcs")


@dataclass(frozen=True, slots=True)
class KernelLayout:
    """
    Offsets in bytes of members of the kernel's structures, from its own type information (BTF).

    * ``tgid``, ``pid``, ``comm``, ``cred``, ``mm``, ``parent`` and ``stack`` are members of task_struct, ``uid`` of
      struct cred, ``pgd`` of mm_struct.
    * ``module_list`` links a loaded module into the list. ``module_state``, ``module_name``, ``module_base`` and
      ``module_size`` are its state, its name, and the address and size of its code.
    * ``module_symbols`` points to a structure with the module's symbols. ``symtab``, ``symbol_count``, ``strtab`` and
      ``typetab`` are members of that structure.
    * ``orc`` is the layout of unwind tables. ``module_orc`` has the members of a module with the addresses of its two
      tables and their number of elements. Both are None in a kernel without such tables.
    """

    tgid: int
    pid: int
    comm: int
    cred: int
    mm: int
    parent: int
    stack: int
    uid: int
    pgd: int
    module_list: int
    module_state: int
    module_name: int
    module_base: int
    module_size: int
    module_symbols: int
    symtab: int
    symbol_count: int
    strtab: int
    typetab: int
    orc: OrcLayout | None
    module_orc: tuple[int, int, int] | None


def layout_of(types: Btf) -> KernelLayout:
    """Return the offsets of the members; raise ``TargetError`` if a structure has an unknown layout."""
    task, module = "task_struct", "module"
    base, size = _module_memory(types)
    return KernelLayout(
        tgid=types.member_offset(task, "tgid"),
        pid=types.member_offset(task, "pid"),
        comm=types.member_offset(task, "comm"),
        cred=types.member_offset(task, "real_cred"),
        mm=types.member_offset(task, "mm"),
        parent=types.member_offset(task, "real_parent"),
        stack=types.member_offset(task, "stack"),
        uid=types.member_offset("cred", "uid"),
        pgd=types.member_offset("mm_struct", "pgd"),
        module_list=types.member_offset(module, "list"),
        module_state=types.member_offset(module, "state"),
        module_name=types.member_offset(module, "name"),
        module_base=base,
        module_size=size,
        module_symbols=types.member_offset(module, "kallsyms"),
        symtab=types.member_offset("mod_kallsyms", "symtab"),
        symbol_count=types.member_offset("mod_kallsyms", "num_symtab"),
        strtab=types.member_offset("mod_kallsyms", "strtab"),
        typetab=types.member_offset("mod_kallsyms", "typetab"),
        orc=OrcLayout.of(types),
        module_orc=_module_tables(types),
    )


def _module_tables(types: Btf) -> tuple[int, int, int] | None:
    """Return the offsets in a module of the addresses of its unwind tables and of their length; None without tables."""
    try:
        found = [types.member_offset("module", f"arch.{member}") for member in _MODULE_TABLES]
    except TargetError:
        return None
    return found[0], found[1], found[2]


def _module_memory(types: Btf) -> tuple[int, int]:
    """Return the offsets in a module of the address and the size of its code."""
    # Since Linux kernel commit ac3b43283923 ("module: replace module_layout with module_memory") (in v6.4).
    try:
        start = types.member_offset("module", "mem")
        base, size = (types.member_offset("module_memory", member) for member in ("base", "size"))
        return start + base, start + size
    except TargetError:
        return types.member_offset("module", "core_layout.base"), types.member_offset("module", "core_layout.size")


# The list of modules: ``modules ─► list_head in a struct module ─► … ─► modules``. A module that is being loaded is
# listed before its code is complete; its state shows that (``enum module_state``).


_LIVE = 0
_MODULES_MAX = 4096
_SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Sym: name, info, other, section index, value, size."""
_SYMBOLS_MAX = 1 << 17
_NAMES_MAX = 1 << 23
_NAME_MAX = 512
_READ_MAX = 1 << 27
"""Maximum number of bytes read for symbols of modules; all modules of a distribution's kernel need a third of it."""
_LISTING_MAX = 1 << 26
"""Maximum size in bytes of the listing of symbols."""
_UNDEFINED = 0
_GRAPHIC = re.compile(rb"[!-~]+")
_KIND = re.compile("[A-Za-z?]")


class GuestModule(NamedTuple):
    """A kernel module and the address of its struct module."""

    loaded: LoadedModule
    address: int


class ModuleList(NamedTuple):
    """Modules that were found; ``is_whole`` is False if the list has more than ``_MODULES_MAX`` of them."""

    found: Sequence[GuestModule]
    is_whole: bool


class ModuleSymbols(NamedTuple):
    """
    Symbols of modules in the format of ``/proc/kallsyms``, and the number of those left out.

    Symbols are left out if there are too many, if they cannot be read, or if their names cannot be listed. ``first`` is
    the first module with such symbols.
    """

    lines: bytes
    left_out: int
    first: str


def listed_modules(memory: GuestMemory, layout: KernelLayout, head: int) -> ModuleList:
    """Return the modules that are in use; ``head`` is the address of their list."""
    at = memory.word(head)
    found = []
    for _ in range(_MODULES_MAX):
        if at in (head, 0):
            break
        module = at - layout.module_list
        name = memory.string(module + layout.module_name).decode("utf-8", "replace")
        size = memory.word(module + layout.module_size, 4)
        if memory.word(module + layout.module_state, 4) == _LIVE:
            found.append(GuestModule(LoadedModule(name, memory.word(module + layout.module_base), size), module))
        at = memory.word(at)
    return ModuleList(found, is_whole=at in (head, 0))


def symbols_of_modules(memory: GuestMemory, layout: KernelLayout, modules: ModuleList) -> ModuleSymbols:
    """Return the symbols of modules, up to a limit that no real kernel reaches."""
    lines, left_out, first = bytearray(), 0, ""
    room = _READ_MAX
    for module in modules.found:
        count, symbols = _count_of(memory, layout, module)
        if 0 < count <= _SYMBOLS_MAX and room > 0 and len(lines) <= _LISTING_MAX:
            listed = _symbols_of(memory, layout, module, symbols, count)
            lines += listed.lines
            room -= listed.read
            count = listed.left_out
        if count and not left_out:
            first = module.loaded.name
        left_out += count
    return ModuleSymbols(bytes(lines), left_out, first)


class _Listed(NamedTuple):
    """Symbols of a kernel module as lines of ``/proc/kallsyms``, and the number of bytes that were read for them."""

    lines: bytes
    left_out: int
    read: int


def _count_of(memory: GuestMemory, layout: KernelLayout, module: GuestModule) -> tuple[int, int]:
    """Return the number of symbols of a module, the null symbol included, and the address of struct mod_kallsyms."""
    symbols = memory.word(module.address + layout.module_symbols)
    return (memory.word(symbols + layout.symbol_count, 4) if symbols else 0), symbols


def _symbols_of(memory: GuestMemory, layout: KernelLayout, module: GuestModule, symbols: int, count: int) -> _Listed:
    table = memory.read(memory.word(symbols + layout.symtab), count * _SYMBOL.size)
    kinds = memory.read(memory.word(symbols + layout.typetab), count)
    rows = list(_SYMBOL.iter_unpack(table[: len(table) // _SYMBOL.size * _SYMBOL.size]))
    last = max((name for name, *_ in rows), default=0)
    names = memory.read(memory.word(symbols + layout.strtab), min(last + _NAME_MAX, _NAMES_MAX))
    read = len(table) + len(kinds) + len(names)
    owner = module.loaded.name.encode()
    if not _GRAPHIC.fullmatch(owner):
        return _Listed(b"", count, read)
    lines, left_out = [], count - min(len(rows), len(kinds))
    for (name, _, _, section, value, _), kind in zip(rows[1:], kinds[1:], strict=False):
        if section == _UNDEFINED:
            continue
        text, end, _ = names[name : name + _NAME_MAX].partition(b"\0")
        # The listing has one symbol a line: names with blanks or control characters would be parsed wrongly.
        if end and _GRAPHIC.fullmatch(text) and _KIND.fullmatch(chr(kind)):
            lines.append(b"%016x %c %b\t[%b]\n" % (value, kind, text, owner))
        elif not end or text:
            left_out += 1
    return _Listed(b"".join(lines), left_out, read)


# Kernels of machines are kept in the user's cache directory: reading one takes seconds, during which the machine is
# stopped. A kernel is identified by its address and its banner, which names its version, builder and build time. A
# file's name contains both, with the banner's distance from the address::
#
#     guestkernel-BASE-BANNER-DIGEST    u64 size of the symbols │ symbols │ types


_PREFIX = "guestkernel"
_BANNER_START = b"Linux version "
_BANNER_MAX = 512
_SIZE = struct.Struct("<Q")
_KEPT = 4
"""Maximum number of cached kernels; the least recently used ones are deleted."""


class KnownKernel(NamedTuple):
    """A kernel's symbols as ``/proc/kallsyms`` lists them, and its types (BTF)."""

    listing: bytes
    types: bytes


def _name(start: int, offset: int, banner: bytes) -> str:
    return f"{_PREFIX}-{start:x}-{offset:x}-{hashlib.sha256(banner).hexdigest()[:32]}"


def _banner_at(read: Callable[[int, int], bytes], address: int) -> bytes | None:
    text = read(address, _BANNER_MAX)
    end = text.find(b"\0")
    return text[:end] if text.startswith(_BANNER_START) and end > 0 else None


def known_kernel(read: Callable[[int, int], bytes], start: int) -> KnownKernel | None:
    """Return the cached kernel that begins at an address, or None if it is not cached. ``read`` reads memory."""
    directory = cache_directory()
    for name in cached_names(directory, f"{_PREFIX}-{start:x}-"):
        try:
            offset = int(name.split("-")[2], 16)
        except (ValueError, IndexError):
            continue
        banner = _banner_at(read, start + offset)
        if banner is None or name != _name(start, offset, banner):
            continue
        content = read_cached(directory, name)
        if content is not None and len(content) > _SIZE.size:
            size = _SIZE.unpack_from(content)[0]
            mark_used(directory, name)
            return KnownKernel(content[_SIZE.size : _SIZE.size + size], content[_SIZE.size + size :])
    return None


def keep_kernel(read: Callable[[int, int], bytes], start: int, banner_place: int, kernel: KnownKernel) -> None:
    """Cache a kernel that begins at ``start``, with its banner at ``banner_place``; delete the least recently used."""
    banner = _banner_at(read, banner_place)
    if banner is None:
        return
    directory = cache_directory()
    content = _SIZE.pack(len(kernel.listing)) + kernel.listing + kernel.types
    if write_cached(directory, _name(start, banner_place - start, banner), content):
        keep_newest(directory, f"{_PREFIX}-", _KEPT)


WATCHPOINTS_MAX = 1 << 10
"""Maximum number of watchpoints; an emulated processor checks each access, and needs no debug registers."""
_TYPES = ("__start_BTF", "__stop_BTF")
_NOTES = ("__start_notes", "__stop_notes")
_NOTES_MAX = 1 << 16
_TYPES_MAX = 1 << 26
"""Maximum size in bytes of BTF that is read; the kernels of distributions have about 10 MB."""
_MODULES = "modules"
_BANNER = "linux_banner"
_STATE, _SCHEDULING = "system_state", 1
"""States above SYSTEM_SCHEDULING begin when user space does (enum system_states in include/linux/kernel.h)."""


class GuestKernel(RunningKernel):
    """
    The kernel in the memory of a ``target``.

    Its code is read on demand: the machine must be stopped. The constructor raises ``EngineError`` if there is no
    kernel, or if the kernel has no BTF.
    """

    watchpoints = WATCHPOINTS_MAX

    def __init__(self, target: MachineTarget, registers: Registers) -> None:
        image = find_image(target, registers)
        self.guest_memory = GuestMemory(target, image.root, image.paging)
        known = known_kernel(self.guest_memory.read, image.start)
        listing = symbols_in_memory(target, image) if known is None else known.listing
        self._core = Kallsyms(listing)
        types = self._read_types() if known is None else known.types
        try:
            self.types = Btf(types)
        except FormatError:
            raise EngineError(
                f"the kernel behind the stub {target.stub.name} does not describe its structures",
                hint="a kernel with CONFIG_DEBUG_INFO_BTF is needed",
            ) from None
        if known is None and (banner := self._address_of(_BANNER)):
            keep_kernel(self.guest_memory.read, image.start, banner, KnownKernel(listing, types))
        try:
            self.layout: KernelLayout = layout_of(self.types)
        except (TargetError, FormatError) as error:
            raise EngineError(f"the kernel behind the stub {target.stub.name} is not known: {error.message}") from None
        modules = self._read_modules()
        listed = symbols_of_modules(self.guest_memory, self.layout, modules)
        self.left_out = _left_out(listed, is_whole=modules.is_whole)
        """Description of the modules and symbols that were left out; empty if there are none."""
        loaded = {each.loaded.name: each.loaded for each in modules.found}
        super().__init__(Kallsyms(listing + listed.lines), _GuestText(self.guest_memory), modules=loaded)

    def _address_of(self, name: str) -> int:
        return next((symbol.address for symbol in self._core.find(name, "") if not symbol.is_code), 0)

    def _read_types(self) -> bytes:
        start, end = (self._address_of(name) for name in _TYPES)
        return self.guest_memory.read(start, end - start) if 0 < start < end <= start + _TYPES_MAX else b""

    def _read_modules(self) -> ModuleList:
        head = self._address_of(_MODULES)
        return listed_modules(self.guest_memory, self.layout, head) if head else ModuleList((), is_whole=True)

    def source_files(self, name: str, module: str) -> dict[int, str]:
        """
        Return the source files of the kernel's static symbols ``name``, keyed by their address.

        Empty for symbols of modules, and without a file of the same build with debug information on this machine.
        """
        from dprobes.target.kernel.kernel_files import kernel_of_build, sources_in_kernel

        start, end = (self._address_of(each) for each in _NOTES)
        notes = self.guest_memory.read(start, end - start) if 0 < start < end <= start + _NOTES_MAX else b""
        build_id = build_id_in(notes)
        if module or build_id is None:
            return {}
        return sources_in_kernel(kernel_of_build(build_id), name, self.base_of(""))

    @property
    def has_started(self) -> bool:
        """True if the kernel is about to free its initialization code and data, or has done so."""
        address = self._address_of(_STATE)
        return int.from_bytes(self.guest_memory.read(address, 4), "little") > _SCHEDULING if address else True

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...]:
        """Empty: a stub can probe whatever the machine executes."""
        return ()

    @cached_property
    def skippable(self) -> None:
        """None: memory contains no list by name of the functions that may be skipped."""
        return

    def is_traceable(self, address: int) -> bool | None:  # noqa: ARG002 - nothing needs to be redirected
        """Return None: the machine's ftrace is not known."""
        return None


def _left_out(listed: ModuleSymbols, *, is_whole: bool) -> str:
    """Return a description of the symbols that were left out, and of modules unless ``is_whole``, or "" for none."""
    said = [] if is_whole else ["the kernel lists more modules than are looked at, or its list has no end"]
    if listed.left_out:
        said.append(
            f"{listed.left_out} symbols of the kernel's modules, the first of '{escaped(listed.first)}', are left out: "
            "they are too many, cannot be read, or are none that a kernel has"
        )
    return "; ".join(said)


class _GuestText:
    """Code of the machine's kernel, read from its memory through the stub."""

    shift: int | None = None

    def __init__(self, memory: GuestMemory) -> None:
        self._memory = memory

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address on; none if they cannot be read."""
        return self._memory.read(address, size)

    def problem_at(self, address: int) -> str | None:
        """Return a clause with the reason why an address cannot be read, or None if it can be read."""
        return None if self.read(address, 1) else "it is not in the machine's memory"

    def origin_of(self, _address: int) -> str:
        """Return an empty string: the code is that in memory, not of a file."""
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        """Return False: the instruction was read from the machine's memory, not from a file that may differ from it."""
        return False


_PROCESSOR = "x86_64"
"""The only processor whose kernel can be found in memory."""


def described_processor(connection: StubConnection) -> Architecture | None:
    """Return the processor that a stub describes, or None if it is unknown. The target remains stopped."""
    target = connection.target = _target_of(connection.open())
    return architecture_described_as(target.description.architecture)


@contextlib.contextmanager
def visited_kernel(endpoint: str) -> Iterator[GuestKernel]:
    """Stop the machine at an endpoint during the context, and yield its kernel; raise ``EngineError`` without one."""
    processor = processor_of(architecture(_PROCESSOR))
    assert processor is not None
    with _visited(endpoint) as target:
        if target.description.architecture not in processor.descriptions:
            raise EngineError(
                f"the stub {target.stub.name} serves a processor '{target.description.architecture}', and kernels "
                f"are probed on {_PROCESSOR} only",
                hint=f"write a program about its addresses: 'name = {MACHINE}' and 'address = NUMBER'",
            )
        yield GuestKernel(target, target.registers(target.stub.current_thread()))


@contextlib.contextmanager
def _visited(endpoint: str) -> Iterator[MachineTarget]:
    if endpoint.startswith("|"):
        raise EngineError(
            "a machine cannot be reached through a command's input and output",
            hint="let QEMU listen: -gdb tcp::1234, or -gdb unix:PATH,server=on,wait=off",
        )
    with contextlib.closing(Stub(open_transport(endpoint))) as stub:
        stub.start()
        target = _target_of(stub)
        try:
            if not stub.is_machine:
                raise no_machine(stub.name)
            yield target
        finally:
            target.let_go()


def _target_of(stub: Stub) -> MachineTarget:
    processor = processor_of(architecture(_PROCESSOR))
    assert processor is not None
    target = MachineTarget(stub, "little", processor.default_description(), processor.breakpoint)
    reply = stub.reason()
    thread = (reply.thread if isinstance(reply, Stopped) else None) or stub.current_thread()
    target.process = 0 if thread is None else thread.process
    return target


def kernel_types(endpoint: str) -> Btf:
    """Return the types of the kernel of the machine at an endpoint; raise ``EngineError`` if there is none."""
    with visited_kernel(endpoint) as kernel:
        return kernel.types
