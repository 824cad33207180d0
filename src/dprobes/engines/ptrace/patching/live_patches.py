"""
Live patches of a process: planned from files, inserted and removed while all threads are stopped.

``patch_records`` describes the memory of a patch. Contexts that a signal has interrupted, and that the program has then
saved outside of its stacks, are not searched for addresses in the displaced instructions.
"""

from __future__ import annotations

import contextlib
import errno
import time
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.ptrace.patching.exception_tables import REGISTER_FRAME, registration_code
from dprobes.engines.ptrace.patching.kept_registers import expectation_of
from dprobes.engines.ptrace.patching.patch_object import ORIGINAL, PatchObject, Piece
from dprobes.engines.ptrace.patching.patch_records import (
    CODE_COPY,
    FORMER_CALL,
    JUMP_SIZE,
    OBJECT,
    REGISTRATION,
    PatchRecord,
    former_call,
    link_to,
    memory_of,
    patches_of,
    record_bytes,
    stack_at,
    take_from_stack,
)
from dprobes.engines.ptrace.patching.patch_symbols import ProcessModules, ProcessSymbols, function_named
from dprobes.engines.ptrace.patching.thread_hold import HeldProcess, ThreadHold, TracedBrieflyError
from dprobes.engines.ptrace.site_patches import SitePatch
from dprobes.engines.ptrace.tracer.call_injection import MMAP, MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.native.jump_patcher import write_jump
from dprobes.engines.ptrace.tracer.native.thread_places import ThreadPlaces
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError
from dprobes.errors import EngineError, TargetError, reason_of, reason_of_number
from dprobes.platform.linux.process_calls import processes_in_memory_of
from dprobes.platform.linux.procfs import first_stack_of
from dprobes.platform.x86.patches.branch_targets import ModuleCode
from dprobes.platform.x86.patches.displaced_code import displaced, jump
from dprobes.platform.x86.patches.patch_plans import Plan, look_at
from dprobes.platform.x86.patches.trampoline_space import AddressSpace as TrampolineSpace
from dprobes.target.code.function_exits import CallFrames, function_exits
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import PAGE_SIZE, growth_of, mappings_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dprobes.engines.ptrace.patching.patch_symbols import ForeignFiles, MappedModule
    from dprobes.engines.ptrace.tracer.call_injection import Call
    from dprobes.engines.ptrace.tracer.tracer_state import Thread

__all__ = [
    "Inserted",
    "PlannedPatch",
    "description_of",
    "inlined_text",
    "insert_patch",
    "plan_patch",
    "remove_patch",
    "restored_text",
]

_MPROTECT = 10
_PROT_READ, _PROT_READ_WRITE, _PROT_READ_EXECUTE = 1, 3, 5
_MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_FIXED_NOREPLACE = 0x02, 0x20, 0x100000

_PATIENCE = 5.0
"""Seconds for which a stop in which the patch cannot be written is repeated."""
_PAUSE = 0.01
_REST = 9
"""Minimum ratio of the time between two stops to the duration of a stop."""
_LISTED = 4
"""Maximum number of inlined copies of a function that a message lists."""
_BASES = 8
"""Maximum number of addresses that are tried for a patch's memory: the process may map others meanwhile."""


class PlannedPatch(NamedTuple):
    """
    A patch that can be inserted into process ``pid``.

    The function ``name`` of ``module`` begins at ``begin``, and has its code in ``ranges`` of addresses (end excluded).
    ``plan`` is the jump in it.
    ``addresses`` are those of the symbols that the object uses, except ``originals``, the names of the replaced
    function. ``inlined`` are the places, known from debug information, with inlined copies of the function, which are
    not patched. ``stack`` is the bottom of the process's first stack, by which an exec is detected; None if unknown.

    ``former`` is the patch that is at the function's entry already. The object calls it as ``orig_NAME``, or with
    ``replaces`` the original function. ``register`` is the address of ``__register_frame``, if exceptions may pass
    through the object; else 0. ``doubt`` is a message about a caller that may rely on registers which the patch
    changes; None without one.
    """

    pid: int
    object: PatchObject
    symbol: str
    module: MappedModule
    name: str
    begin: int
    ranges: tuple[tuple[int, int], ...]
    plan: Plan
    addresses: dict[str, int]
    originals: frozenset[str]
    inlined: tuple[str, ...]
    stack: int | None
    former: PatchRecord | None = None
    replaces: bool = False
    register: int = 0
    doubt: str | None = None


class Inserted(NamedTuple):
    """A patch that was inserted: number of threads, seconds of the last stop, and number of stops."""

    record: PatchRecord
    threads: int
    seconds: float
    stops: int


def inlined_text(planned: PlannedPatch) -> str | None:
    """Return the message about inlined copies of the function, which a patch does not replace; None without any."""
    count = len(planned.inlined)
    if not count:
        return None
    places = ", ".join(planned.inlined[:_LISTED]) + (", ..." if count > _LISTED else "")
    return (
        f"{count} inlined cop{'ies' if count > 1 else 'y'} of '{planned.name}' {'are' if count > 1 else 'is'} not "
        f"patched: {places}"
    )


def description_of(planned: PlannedPatch, inserted: Inserted) -> str:
    """Return the message about a patch that was inserted."""
    record = inserted.record
    count = f"{inserted.threads} thread{'s' * (inserted.threads != 1)}"
    stops = f", at stop {inserted.stops}" if inserted.stops > 1 else ""
    return (
        f"patched '{planned.name}' of '{planned.module.name}' in process {planned.pid}: {count} stopped for "
        f"{inserted.seconds * 1000:.1f} ms{stops}; {record.size >> 10} KiB at {record.base:#x}"
    )


def restored_text(pid: int, record: PatchRecord) -> str:
    """Return the message about a patch that was removed."""
    return (
        f"restored '{record.function}' in process {pid}; {record.size >> 10} KiB of the patch stay mapped, as threads "
        "may be in it"
    )


def plan_patch(
    pid: int,
    path: Path,
    symbol: str,
    function: str | None,
    build_id: str | None,
    *,
    replaces: bool = False,
    foreign: ForeignFiles | None = None,
) -> PlannedPatch:
    """
    Return the plan to replace a function of a process by the function ``symbol`` of the object at ``path``.

    ``function`` is the replaced one, ``[MODULE:]FUNCTION``; None: it has the name ``symbol``. ``build_id``, in hex, is
    that of the module; None: the one that the object names, if any. ``replaces`` is as in ``PlannedPatch``.
    ``foreign`` limits the files of other users that are read. Raise ``TargetError`` if the object, the module or a
    symbol is unsuitable, and ``EngineError`` if memory of the process cannot be read.
    """
    found = PatchObject.read(path)
    found.function(symbol)
    stack = first_stack_of(pid)
    with memory_of(pid) as space:
        modules = ProcessModules(pid, space.read, foreign)
    if modules.program.elf.machine != "x86_64":
        raise TargetError(f"process {pid} executes {modules.program.elf.machine} code, and only x86_64 can be patched")
    module, name = function_named(function or symbol, modules, pid)
    _check_build_id(module, build_id or found.wanted_build_id, path if build_id is None else None)
    link_address = module.module.address_of(name)
    _refuse_go(module)
    begin, ranges = module.bias + link_address, _ranges(module, link_address)
    plan = _plan_jump(ModuleCode.of(module.module, module.bias), begin, name)
    originals = frozenset(ORIGINAL + each for each in (name.rpartition(":")[2], symbol))
    with memory_of(pid) as space:
        symbols = ProcessSymbols(pid, modules, module, space.read)
        register = _register_frame(found, symbols, pid)
        addresses = _addresses(found, symbols, originals, pid)
        former = next(iter(stack_at(space, patches_of(pid), plan.start)), None)
    from dprobes.resolve.breakpoints import inlined_places

    inlined = tuple(inlined_places(module.module, name.rpartition(":")[2]))
    if former is not None:
        ranges += ((former.base, former.base + former.size),)
    return PlannedPatch(
        pid, found, symbol, module, name, begin, ranges, plan, addresses, originals, inlined, stack, former, replaces,
        register, _doubt(module, name, link_address, found, symbol),
    )  # fmt: skip


def _check_build_id(module: MappedModule, wanted: str | None, path: Path | None) -> None:
    if wanted is None:
        return
    found = module.elf.build_id or "none"
    if wanted.lower() != found:
        source = f"'{path}' was made for" if path is not None else "--build-id names"
        raise TargetError(f"{source} build {wanted}, and '{module.name}' has the build-id {found}")


def _refuse_go(module: MappedModule) -> None:
    if module.elf.section(".gopclntab") is not None:
        raise TargetError(f"'{module.name}' is a Go program, whose functions have other calling conventions")


def _ranges(module: MappedModule, link_address: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of addresses of the process with the code of a function, cold parts included."""
    covering = module.module.symbols.covering(link_address)
    size = covering.size if covering is not None and covering.address == link_address else 0
    try:
        ranges = function_exits(module.module, CallFrames(module.elf), link_address, size).ranges
    except TargetError:  # it may be patched nevertheless
        ranges = ((link_address, link_address + max(size, JUMP_SIZE)),)
    return tuple((module.bias + start, module.bias + end) for start, end in ranges)


def _plan_jump(code: ModuleCode, address: int, name: str) -> Plan:
    site = look_at(code, address)
    plan: Plan | str = site if isinstance(site, str) else site.jump()
    if isinstance(plan, str) and not isinstance(site, str):
        plan = site.window(())
    if isinstance(plan, str):
        raise TargetError(f"'{name}' cannot begin with a jump: its first instruction: {plan}")
    if plan.crosses_page:
        raise TargetError(f"'{name}' cannot begin with a jump: its first bytes are in two pages")
    return plan


def _addresses(found: PatchObject, symbols: ProcessSymbols, originals: frozenset[str], pid: int) -> dict[str, int]:
    """Return the addresses of the symbols that an object uses, except ``originals``, whose address comes later."""
    addresses: dict[str, int] = {}
    for each in found.names:
        if each in originals:
            continue
        address = symbols.address_of(each)
        if address is None and each.startswith(ORIGINAL):  # the object also has replacements of other functions
            address = symbols.address_of(each.removeprefix(ORIGINAL))
        if address is None and not found.is_weak(each):
            names = " or ".join(f"'{name}'" for name in sorted(originals))
            raise TargetError(
                f"'{each}', which '{found.path}' uses, is not a symbol of process {pid}",
                hint=f"the function that is replaced is called {names}" if each.startswith(ORIGINAL) else None,
            )
        addresses[each] = address or 0
    return addresses


def _doubt(module: MappedModule, name: str, link_address: int, found: PatchObject, symbol: str) -> str | None:
    """
    Return the message about a caller that may rely on registers that the patch changes; None without one.

    Raise ``TargetError`` if a caller certainly does.
    """
    expectation = expectation_of(module.module, link_address, Module.load(found.path), symbol)
    if expectation is None:
        return None
    place, register = expectation.place, expectation.register
    if expectation.is_certain:
        raise TargetError(
            f"'{name}' cannot be replaced by '{symbol}', which changes {register}: its caller expects at {place} that "
            "it does not",
            hint="gcc -O2 makes such callers (-fipa-ra): compile the program -fno-ipa-ra, or replace the caller",
        )
    return (
        f"the caller of '{name}' at {place} may expect that it does not change {register}, and '{symbol}' does: check "
        "it, or compile the program -fno-ipa-ra"
    )


def _register_frame(found: PatchObject, symbols: ProcessSymbols, pid: int) -> int:
    """Return the address of the function that registers exception tables; 0 if the object needs none."""
    if found.exception_tables is None:
        return 0
    address = symbols.address_of(REGISTER_FRAME)
    if address is None:
        raise TargetError(
            f"'{found.path}' throws or handles exceptions, and process {pid} has no '{REGISTER_FRAME}' for its tables",
            hint="compile it -fno-exceptions",
        )
    return address


# Insertion and removal


class _Memory(NamedTuple):
    """The bytes of a patch's memory for one base address, the ranges of pages, and the jump to it."""

    record: PatchRecord
    image: bytes
    pieces: tuple[Piece, ...]
    site: SitePatch


class NotNowError(Exception):
    """Error that a patch cannot be written during this stop, with the reason, a clause."""


def insert_patch(
    planned: PlannedPatch, *, idle: float | None = None, pause: Callable[[float], None] = time.sleep
) -> Inserted:
    """
    Insert a patch; return its record with figures of the stops.

    With ``idle``, wait at most so many seconds until no thread has a frame in the function. ``pause`` sleeps between
    two stops. Raise ``EngineError`` if the patch cannot be inserted.
    """
    pid = planned.pid
    hold = ThreadHold(pid)
    until = time.monotonic() + (_PATIENCE if idle is None else idle)
    memory: _Memory | None = None
    bases = stops = 0
    try:
        while True:
            prepared = memory or _prepare(planned)
            stops += 1
            began = time.monotonic()
            try:
                with hold.stopped() as held:
                    _check_program(planned, held, memory)
                    if memory is None:
                        _map(held, prepared)
                        memory = prepared
                    _write(planned, held, memory, is_idle=idle is not None)
                    count = len(held.threads)
                return Inserted(memory.record, count, time.monotonic() - began, stops)
            except NotNowError as error:
                if time.monotonic() > until:
                    raise EngineError(f"'{planned.name}' was not patched: {error}") from error
            except TracedBrieflyError:
                if time.monotonic() > until:
                    raise
            except FileExistsError as error:
                bases += 1
                if bases == _BASES:
                    raise EngineError(f"'{planned.name}' was not patched: no place for it stays free") from error
                continue
            pause(max(_PAUSE, _REST * (time.monotonic() - began)))
    except ProcessLookupError as error:
        raise EngineError(f"process {pid} ended before it was patched") from error
    except (InjectionError, ThreadGoneError) as error:
        raise EngineError(f"'{planned.name}' was not patched: {error}") from error
    finally:
        hold.release_rest(_PATIENCE)


def _check_program(planned: PlannedPatch, held: HeldProcess, memory: _Memory | None) -> None:
    """
    Raise ``EngineError`` if the stopped process is not as it was planned, or ``memory`` is no longer that of the patch.

    A process may execute another program, or the same one anew, between two stops.
    """
    if first_stack_of(planned.pid) != planned.stack:
        raise EngineError(f"'{planned.name}' was not patched: process {planned.pid} executes another program now")
    if memory is not None:
        text = record_bytes(memory.record)
        try:
            is_there = held.space.read(memory.record.base, len(text)) == text
        except OSError:
            is_there = False
        if not is_there:
            raise EngineError(f"'{planned.name}' was not patched: the memory of the patch was unmapped")
    if not held.running and (others := processes_in_memory_of(planned.pid)):
        raise EngineError(
            f"'{planned.name}' was not patched: process {others[0]} shares the memory of process {planned.pid}, and "
            "only one of them can be stopped"
        )


def _prepare(planned: PlannedPatch) -> _Memory:
    """
    Choose an address for the memory of a patch, and relocate the object for it.

    Raise ``EngineError`` if the process has no free memory within reach of a jump from the function.
    """
    pid, found, plan = planned.pid, planned.object, planned.plan
    state, tables = OBJECT + found.size, found.exception_tables
    size = state if tables is None else state + PAGE_SIZE
    near = [each for each in mappings_of(pid) if each.path == planned.module.name]
    if not near:
        raise EngineError(f"process {pid} no longer maps '{planned.module.name}'")
    space = TrampolineSpace(mappings_of(pid), near[0].start, near[-1].end, growth=growth_of(pid))
    reach = plan.reaches[0]
    base = space.allocate(reach.first, reach.last - size, size)
    if base is None:
        raise EngineError(f"process {pid} has no {size} free bytes within reach of '{planned.name}'")
    copy = displaced(plan.raw, plan.start, base + CODE_COPY)
    assert copy is not None, "the memory is within reach of the module"
    former = None if planned.replaces else planned.former
    called = base + (CODE_COPY if former is None else FORMER_CALL)
    known = {**planned.addresses, **dict.fromkeys(planned.originals, called)}
    target = base + OBJECT + found.function(planned.symbol)
    written = jump(plan.start, target if tables is None else base + REGISTRATION)
    # Bytes after the displaced instructions are no code: padding after a short function.
    original = planned.module.elf.read(plan.start - planned.module.bias, JUMP_SIZE)
    record = PatchRecord(
        base, size, plan.start, original, written, planned.name, planned.module.name, str(found.path.absolute()),
        planned.symbol, planned.replaces,
    )  # fmt: skip
    image = bytearray(size)
    text = record_bytes(record)
    image[: len(text)] = text
    link = link_to(planned.former)
    image[PAGE_SIZE - len(link) : PAGE_SIZE] = link
    image[CODE_COPY : CODE_COPY + len(copy.code)] = copy.code
    to_former = former_call(base + CODE_COPY if former is None else former.target)
    image[FORMER_CALL : FORMER_CALL + len(to_former)] = to_former
    image[OBJECT:state] = found.image(base + OBJECT, lambda name: known[name])
    pieces = [
        Piece(CODE_COPY, PAGE_SIZE, _PROT_READ_EXECUTE),
        *(piece._replace(offset=piece.offset + OBJECT) for piece in found.pieces()),
    ]
    if tables is not None:
        registering = base + REGISTRATION, base + OBJECT + tables, planned.register, base + state, target
        code = registration_code(*registering)
        image[REGISTRATION : REGISTRATION + len(code)] = code
        pieces.append(Piece(state, PAGE_SIZE, _PROT_READ_WRITE))
    moves = tuple((at, to) for at in plan.boundaries[1:] if (to := copy.copy_of(at)) is not None)
    site = SitePatch(
        ((0, 0, planned.begin),), plan.start, plan.raw, (plan.start + len(plan.raw), original[len(plan.raw) :]),
        ((plan.start, written),), (original,), moves,
        copy.boundaries, base + CODE_COPY + len(copy.code), begin=base + CODE_COPY,
    )  # fmt: skip
    return _Memory(record, bytes(image), tuple(pieces), site)


def _map(held: HeldProcess, memory: _Memory) -> None:
    """
    Map the memory of a patch in a stopped process, and write it.

    Raise ``NotNowError`` if no thread can make a system call now, ``FileExistsError`` if the address is occupied, and
    ``EngineError`` if a call fails.
    """
    if held.running:
        raise NotNowError(f"thread {held.running} does not stop")
    if not held.ready:
        raise NotNowError("no thread can make a system call now")
    if not all(may_inject(thread) for thread in held.threads):
        raise InjectionError("the process has a seccomp filter or a shadow stack, so it cannot be made to map memory")
    reason: InjectionError | None = None
    for thread in held.ready:
        try:
            with injecting(thread) as call:
                _map_at_base(call, memory)
                _fill(thread, call, memory)
        except InjectionError as error:
            reason = error
            continue
        return
    raise NotNowError(str(reason))


def _map_at_base(call: Call, memory: _Memory) -> None:
    base, size = memory.record.base, memory.record.size
    found = call(MMAP[8], base, size, _PROT_READ, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE, -1, 0)
    if found == -errno.EEXIST:
        raise FileExistsError
    if found < 0:
        raise EngineError(f"the memory of the patch cannot be mapped: {reason_of_number(-found)}")
    if found != base:  # a kernel that treats the address as a hint
        call(MUNMAP[8], found, size)
        raise FileExistsError


def _fill(thread: Thread, call: Call, memory: _Memory) -> None:
    """Write the mapped memory of a patch, and protect it; unmap it and raise ``EngineError`` if that fails."""
    base, size = memory.record.base, memory.record.size
    try:
        problem = "" if thread.space.write(base, memory.image) == size else reason_of_number(errno.EFAULT)
        for offset, length, protection in memory.pieces:
            if not problem and (result := call(_MPROTECT, base + offset, length, protection)):
                problem = reason_of_number(-result)
    except OSError as error:
        problem = reason_of(error)
    except InjectionError as error:
        problem = str(error)
    if problem:
        with contextlib.suppress(InjectionError):
            call(MUNMAP[8], base, size)
        raise EngineError(f"the memory of the patch cannot be written and protected: {problem}")


def _write(planned: PlannedPatch, held: HeldProcess, memory: _Memory, *, is_idle: bool) -> None:
    """Write the jump of a patch whose memory is mapped; raise ``NotNowError`` if threads are in the way."""
    if held.running:
        raise NotNowError(f"thread {held.running} does not stop")
    if is_idle and (inside := held.threads_in(planned.ranges)):
        raise NotNowError(f"a frame of the function may be on the stack of thread {', '.join(map(str, inside))}")
    if planned.former is not None:
        _write_over(planned, planned.former, held, memory)
        return
    places = ThreadPlaces(held.space, held.threads, [memory.site])
    if (why := places.obstacle(memory.site)) is not None:
        raise NotNowError(why)
    if (why := write_jump(held.space, memory.site, places)) is not None:
        raise EngineError(
            f"'{planned.name}' was not patched: {why}",
            hint="another tool, or another run of dprobes, may have a breakpoint or a jump there",
        )


def _write_over(planned: PlannedPatch, former: PatchRecord, held: HeldProcess, memory: _Memory) -> None:
    """
    Write the jump of a patch over that of the former one.

    No thread can be at an address within a jump that is there already, so none is moved.
    """
    plan, jump_now = planned.plan, memory.record.jump
    expected = former.jump + plan.raw[JUMP_SIZE:]
    try:
        is_expected = held.space.read(plan.start, len(expected)) == expected
        if is_expected and held.space.write(plan.start, jump_now) == len(jump_now):
            return
    except OSError as error:
        raise EngineError(f"'{planned.name}' was not patched: {reason_of(error)}") from error
    raise EngineError(
        f"'{planned.name}' was not patched: memory differs from the jump of the former patch",
        hint="another run of dprobes may have inserted or removed a patch meanwhile: try it again",
    )


def remove_patch(pid: int, record: PatchRecord) -> bool:
    """
    Remove a patch from those of its function, in any order; return whether it was there.

    Its memory stays mapped. Raise ``EngineError`` if the threads of the process cannot be stopped.
    """
    hold = ThreadHold(pid)
    until = time.monotonic() + _PATIENCE
    try:
        while True:
            began = time.monotonic()
            running = 0
            try:
                with hold.stopped() as held:
                    if not held.running:
                        return take_from_stack(pid, held.space, record)
                    running = held.running
            except TracedBrieflyError:
                if time.monotonic() > until:
                    raise
            if running and time.monotonic() > until:
                raise EngineError(
                    f"the patch of '{record.function}' was not removed: thread {running} does not stop",
                    hint=f"try it later: dprobes patch --remove -p {pid} --allow-write",
                )
            time.sleep(max(_PAUSE, _REST * (time.monotonic() - began)))
    except ProcessLookupError:
        return False
    finally:
        hold.release_rest(_PATIENCE)
