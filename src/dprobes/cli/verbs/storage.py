"""
The verb ``storage``: reads and writes of the fields of a structure by the functions of a module.

::

    debug information ─► address and layout of the variable
    code of the module ─► instructions that access memory ─► a probepoint at each, with a check of the address
    hits, by instruction and distance from the variable ─► reads and writes by field and function

All probepoints have the same handler, except those at string instructions, whose range depends on a count. Reads and
writes are known from the instruction. A handler runs before its instruction: so an access that faults counts as well.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from dprobes.cli import console
from dprobes.cli.console import Progress, counted, print_lines, print_table
from dprobes.cli.output.storage_profile import (
    TEXT_HEADER,
    Field,
    Layout,
    StorageProfile,
    UnseenCode,
    json_lines,
    layout_of,
    map_lines,
    text_rows,
)
from dprobes.cli.runs.code_places import CodePlaces
from dprobes.cli.runs.early_interrupt import EarlyInterrupt
from dprobes.cli.scope_and_engine import (
    check_scope,
    command_option,
    engine_option,
    follow_option,
    note_engine,
    note_process,
    process_option,
    scope_of,
    verbose_option,
)
from dprobes.cli.shared_options import symbols_option
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_capabilities import Capability
from dprobes.engines.engine_interface import EngineOptions, ScopeKind
from dprobes.engines.engine_registry import AUTO, fastest_engine, rows
from dprobes.errors import TargetError
from dprobes.record.log_record import Item
from dprobes.runs import run_steps
from dprobes.runs.run_steps import ProgramInput, Request, record_source
from dprobes.target.code.function_exits import CallFrames
from dprobes.target.code.memory_accesses import MemoryAccess, OtherMemory, StringAccess, accesses_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dprobes.engines.engine_interface import Attachment, Finished, Scope
    from dprobes.keyed.table_layout import TableContents
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.runs.run_steps import RunPlan, Vantage
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.probed_module import Module

__all__ = ["storage_command"]

_STANDARD_ERROR = 2
_KERNELS = ("kernel", "vmlinux")
"""Names of the kernel as a module."""
_RANGE_MAX = 1 << 20
"""Maximum size in bytes of the structure or array."""
_ROOM = 1 << 17
"""Number of pairs of an instruction and a distance for which the table has room."""

# The object and the code that may access it.


class StoredObject(NamedTuple):
    """Variable of a module: its link address and its layout."""

    address: int
    layout: Layout

    @property
    def end(self) -> int:
        """Link address of the first byte after the variable."""
        return self.address + self.layout.whole


def _stored_object(module: Module, name: str) -> StoredObject:
    """Return the variable of a module with a name; raise ``TargetError`` if it is unknown, or its size is."""
    from dprobes.dpc.modules.debug_module import DebugModule
    from dprobes.dpc.modules.debug_names import ModuleNames, names_in

    file = module.path.name
    names = names_in(DebugModule(module.elf), None, at_return=False)
    if not isinstance(names, ModuleNames):
        raise TargetError(
            f"'{module.path}' has no debug information, which describes variables and their fields",
            hint="compile it with -g, install its debug symbols, or give a file that has them with --sym",
        )
    found = names.static_variable(name)
    if found is None:
        raise TargetError(
            f"'{file}' has no variable '{name}' with a fixed address in its debug information",
            hint="variables of functions and of threads have none; gdb's 'info variables' lists the others",
        )
    address, type_ = found
    layout = layout_of(type_, name)
    if not 0 < layout.whole <= _RANGE_MAX:
        what = f"{layout.whole} bytes" if layout.whole else "no known size"
        raise TargetError(f"'{name}' has {what}; storage takes variables of 1 to {_RANGE_MAX} bytes")
    return StoredObject(address, layout)


class _Place(NamedTuple):
    """Instruction that accesses memory, in a function of the module."""

    address: int
    offset: int
    function: str
    access: MemoryAccess | StringAccess


class _AccessingCode(NamedTuple):
    """
    Instructions of a module that may access an object.

    ``unseen`` has the number of other instructions that access memory, by a noun phrase.
    """

    places: tuple[_Place, ...]
    unseen: dict[str, int]


def _accessing_code(module: Module, target: StoredObject) -> _AccessingCode:
    """Return the instructions in the functions of a module that may access an object."""
    from dprobes.target.readable_names import Demangler

    elf, demangler, frames = module.elf, Demangler(), CallFrames(module.elf)
    frame_pointers = _FramePointers(frames)
    places: dict[int, _Place] = {}
    unseen = Counter[str]()
    for start, end, symbol in _functions(module):
        name = demangler.name_of(symbol)
        for address, _, access in accesses_in(elf.read(start, end - start), start):
            if address in places:
                continue
            if isinstance(access, OtherMemory):
                unseen[access.value] += 1
                continue
            if isinstance(access, MemoryAccess) and not _may_touch(access, target):
                continue
            if isinstance(access, MemoryAccess) and frame_pointers.are_used_by(access, address):
                unseen[OtherMemory.STACK.value] += 1
                continue
            offset = elf.file_offset(address)
            assert offset is not None
            if not _is_boundary(module, offset):
                unseen[_INSIDE] += 1
                continue
            places[address] = _Place(address, offset, name, access)
    return _AccessingCode(tuple(places.values()), unseen)


def _may_touch(access: MemoryAccess, target: StoredObject) -> bool:
    """Return whether an access may touch an object; False only for a fixed address elsewhere."""
    if not access.is_relative:
        return True
    return target.address - access.size < access.displacement < target.end


class _FramePointers:
    """A check whether a register points to the stack frame at an instruction, by the unwind table of the file."""

    def __init__(self, frames: CallFrames) -> None:
        self._frames = frames

    def are_used_by(self, access: MemoryAccess, address: int) -> bool:
        """Return whether the access of the instruction at a link address is to the frame of its function."""
        if access.base not in _DWARF_NUMBERS:
            return False
        frame = self._frames.frame_address(address)
        return frame is not None and frame.register == _DWARF_NUMBERS[access.base]


_DWARF_NUMBERS = {"rbp": 6, "rsp": 7}
"""Numbers of registers in unwind tables (System V ABI, figure 3.36)."""


def _functions(module: Module) -> Iterator[tuple[int, int, str]]:
    """
    Iterate over the code of the functions of a module: start, end and name, the address if no symbol is known.

    Ranges do not overlap. Those of symbols take precedence over those of the unwind table: the description of a signal
    frame begins one byte before its function, since unwinders look up the byte before a return address.
    """
    elf = module.elf
    symbols = ((symbol.address, symbol.address + symbol.size) for symbol in module.symbols.functions())
    known = list(_disjoint(symbols))
    extents = (elf.frames.extent(elf, start) for start in elf.frames.starts)
    others = [
        each
        for each in _without(_disjoint(extent for extent in extents if extent is not None), known)
        if not _is_signal_frame(elf, each[0])
    ]
    for start, end in sorted(known + others):
        offset = elf.file_offset(start)
        if offset is None or not elf.is_executable_offset(offset):
            continue
        named = module.symbol_at(offset)
        name = f"{start:#x}" if named is None else named[0] if not named[1] else f"{named[0]}+{named[1]:#x}"
        yield start, end, name


def _disjoint(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Iterate over ranges by ascending start, each without the part that is in ranges before it."""
    reached = 0
    for start, end in sorted(ranges, key=lambda each: (each[0], -each[1])):
        if max(start, reached) < end:
            yield max(start, reached), end
            reached = end


def _without(ranges: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Iterate over the parts of ranges that are in none of the others, which are disjoint and sorted."""
    for start, end in ranges:
        at, number = start, max(0, bisect_right(others, (start, start)) - 1)
        while at < end and number < len(others) and others[number][0] < end:
            if at < others[number][0]:
                yield at, others[number][0]
            at = max(at, others[number][1])
            number += 1
        if at < end:
            yield at, end


def _is_signal_frame(elf: ElfFile, address: int) -> bool:
    """Return whether a link address is in code that returns from signal handlers, by the unwind table."""
    from dprobes.target.unwind.exception_frames import read_description

    description = elf.frames.description_of(elf, address)
    try:
        return description is not None and read_description(elf, description).common.is_signal_frame
    except (TargetError, ValueError, IndexError):
        return False  # its range is known all the same


_INSIDE = "instructions inside other instructions"
"""Description of places at which probepoints are refused: functions whose code overlaps disagree about them."""


def _is_boundary(module: Module, offset: int) -> bool:
    """Return whether a probepoint is accepted at a file offset: no instruction around it is known."""
    from dprobes.target.code.machine_code import Boundary, check_boundary, instruction_at

    if check_boundary(module, offset).status is Boundary.ON_BOUNDARY:
        return True
    try:
        instruction_at(module, offset)
    except TargetError:
        return False
    return True


# The program.

_DIRECTION_FLAG = 0x400

_HANDLER = '@accesses[(void *)pc, reg("accessed")]++;'


def _string_handler(place: _Place, target: StoredObject) -> str:
    """Return the handler of a string instruction, which counts the elements in the object by the first one's offset."""
    access = place.access
    assert isinstance(access, StringAccess)
    size, whole = access.size, target.layout.whole
    count = 'reg("rcx")' if access.repeats else "1"
    text = (
        f"unsigned long object = pc - {place.address:#x} + {target.address:#x}, count = {count}, skip, first, left;\n"
    )
    for register, is_used in (("rsi", access.reads_source), ("rdi", access.reads_target or access.writes_target)):
        if not is_used:
            continue
        text += f"""
    first = reg("{register}");
    if ((reg("eflags") & {_DIRECTION_FLAG}) != 0 && count > 0) first = first - (count - 1) * {size};
    skip = 0;
    if (first + {size - 1} < object) skip = (object - first) / {size};
    first = first + skip * {size};
    if (count > skip && first < object + {whole} && first + {size - 1} >= object) {{
        left = (object + {whole} - first + {size - 1}) / {size};
        if (left > count - skip) left = count - skip;
        @elements_{register}[(void *)pc, first - object, left]++;
    }}"""
    return text


def _program_for(name: str, code: _AccessingCode, target: StoredObject) -> Program:
    """Return the program that counts the accesses of code of the module with the given name to an object."""
    from dprobes.api.compiled_program import parse_c
    from dprobes.rpn.compilation_passes import CompileOptions
    from dprobes.rpn.rpn_program import AccessCheck, Expression, Offset
    from dprobes.source_text import SourceFile

    checked = [each for each in code.places if isinstance(each.access, MemoryAccess)]
    strings = [each for each in code.places if isinstance(each.access, StringAccess)]
    handlers = [_HANDLER] if checked else []
    handlers += [_string_handler(each, target) for each in strings]
    text = "".join(f"{number:#x} {{ {handler} }}\n" for number, handler in enumerate(handlers))
    # A path may contain characters that a string in a program may not, so it is no part of the text.
    source = SourceFile("<storage>", f"module profiled;\n{text}")
    program = parse_c(source, Diagnostics(), CompileOptions(), "").programs[0]
    definitions = list(program.definitions)
    common = definitions.pop(0) if checked else None

    def at(definition: ProbeDefinition, place: _Place, check: AccessCheck | None) -> ProbeDefinition:
        location = Offset(Expression(place.offset, None))
        return replace(definition, location=location, minor=0, access=check, logonfault=True)

    made = []
    for place in checked:
        assert common is not None
        check = AccessCheck(place.address, target.address, target.layout.whole)
        made.append(at(common, place, check))
    made += [at(definition, place, None) for definition, place in zip(definitions, strings, strict=True)]
    tables = tuple(replace(table, room=_ROOM) for table in program.tables)
    return replace(program, name=name, definitions=tuple(made), tables=tables)


# The results.


class _Counts:
    """Reads and writes by field and function, under construction; ``lost`` counts accesses of unknown instructions."""

    def __init__(self, layout: Layout, places: CodePlaces[_Place]) -> None:
        self._layout = layout
        self._places = places
        self._counts: dict[tuple[Field, str], list[int]] = {}
        self.lost = 0
        self.bounded = 0
        """Number of elements of instructions that may have stopped before them."""

    def add_table(self, contents: TableContents) -> None:
        """Add the counts of a table of the program."""
        from dprobes.keyed.table_layout import row_parts

        register = contents.table.name.rpartition("_")[2]
        for row in contents.rows:
            keys = [part for part in row_parts(contents.table, row.key, row.cells) if isinstance(part, int)]
            place = self._places.at(keys[0])
            if place is None:
                self.lost += row.cells[0]
                continue
            offset = keys[1] - (keys[1] >> 63 << 64)
            match place.access:
                case MemoryAccess(size=size, reads=reads, writes=writes):
                    self._add(place, offset, size, row.cells[0], reads=reads, writes=writes)
                case StringAccess() as access:
                    is_source = register == "rsi"
                    self.bounded += keys[2] * row.cells[0] if access.may_stop else 0
                    for number in range(keys[2]):
                        at = offset + number * access.size
                        reads = access.reads_source if is_source else access.reads_target
                        writes = access.writes_target and not is_source
                        self._add(place, at, access.size, row.cells[0], reads=reads, writes=writes)

    def _add(self, place: _Place, offset: int, size: int, count: int, *, reads: bool, writes: bool) -> None:
        for field in self._layout.fields_at(offset, size):
            mine = self._counts.setdefault((field, place.function), [0, 0])
            mine[0] += count if reads else 0
            mine[1] += count if writes else 0

    def finished(self) -> Mapping[tuple[Field, str], tuple[int, int]]:
        """Return (reads, writes) by field and function."""
        return {key: (reads, writes) for key, (reads, writes) in self._counts.items()}


# The run.


class _Options(NamedTuple):
    """Values of the options of ``storage``."""

    variable: str
    scope: Scope
    engine: str
    symbols: Path | None
    as_json: bool
    as_map: bool
    verbose: bool


class _StorageFace(run_steps.Face[int]):
    """The steps of a run that counts accesses to a variable; ``stack`` closes what they open."""

    def __init__(self, given: _Options, progress: Progress, stack: contextlib.ExitStack) -> None:
        self._given = given
        self._progress = progress
        self._stack = stack

    def request(self) -> Request:
        """Return the request for the processes and the engine of the command line."""
        options = EngineOptions()
        chosen = fastest_engine() if self._given.engine == AUTO else self._given.engine
        scope = self._given.scope
        if scope.command and self._given.as_json:
            scope = replace(scope, output=_STANDARD_ERROR)
        engine, scope = check_scope(chosen, scope, options)
        return Request(engine, scope, options)

    def load(self, vantage: Vantage) -> ProgramInput:
        """Find the variable and the instructions that may access it, and return the program that counts accesses."""
        from dprobes.cli.verbs.locate import not_there
        from dprobes.target.module_lookup import find_module
        from dprobes.target.probed_module import FileSymbols, Module

        given = self._given
        note_process(given.scope, vantage.request.scope)
        self._progress.begin("looking for the variable")
        name, _, variable = given.variable.rpartition(":")
        if name in _KERNELS:
            raise TargetError(
                "storage cannot profile variables of the kernel",
                hint=f"watch up to four fields of 1 to 8 bytes: dprobes run -e 'watch rw (long)kernel:{variable} "
                "{ @[kstack(1)]++; }'",
            )
        path = find_module(name, pid=vantage.tid, command=vantage.command)
        if path is None:
            raise not_there(name, vantage.tid)
        module = Module.load(path, given.symbols)
        if module.elf.machine != "x86_64":
            raise TargetError(f"'{path}' is for {module.elf.machine}; accesses are checked in code of x86_64 only")
        self._object = _stored_object(module, variable)
        self._progress.begin("looking for the instructions")
        self._code = _accessing_code(module, self._object)
        if not self._code.places:
            raise TargetError(f"no instruction of '{path.name}' can access '{variable}'")
        self._module, self._inode = path, path.stat().st_ino
        program = _program_for(name, self._code, self._object)
        self._source = record_source(program, {}, names_addresses=True)
        return ProgramInput((program,), (FileSymbols(given.symbols),), Diagnostics(), self._source, Item(0))

    def announce(self, planned: RunPlan) -> None:
        """Print the engine."""
        self._progress.end()
        note_engine(planned.engine, planned.reason, verbose=self._given.verbose)
        self._progress.begin("inserting the probepoints")
        is_command = bool(planned.members[0].job.scope.command)
        self._early = self._stack.enter_context(EarlyInterrupt(deferred=not is_command))

    def follow(self, planned: RunPlan, attachment: Attachment) -> int:
        """Wait for the end of the run, print the profile, and return the exit status."""
        self._stack.callback(attachment.close)
        from dprobes.cli.output.run_outputs import Outputs
        from dprobes.cli.output.run_summary import SummaryOptions
        from dprobes.cli.runs.run_follower import Run

        run = Run(
            planned.compiled.program,
            attachment,
            self._stack.enter_context(Outputs(self._source, None, "text", (), "text")),
            planned.members[0].job.scope,
            self._progress,
            SummaryOptions(planned.engine),
            exit_status=False,
        )
        finished = run.follow(self._early)
        tables = attachment.tables()
        places = {place.offset: place for place in self._code.places}
        counts = _Counts(self._object.layout, CodePlaces(self._source.images, places, self._inode))
        for table in tables:
            counts.add_table(table)
        unseen = [UnseenCode(count, what) for what, count in self._code.unseen.items()]
        found = dict(counts.finished())
        profile = StorageProfile(self._object.layout, str(self._module), found, len(self._code.places), tuple(unseen))
        self._print(profile)
        self._tell_losses(tables, counts, finished)
        return 0 if finished is not None else 1

    def _print(self, profile: StorageProfile) -> None:
        layout = profile.layout
        if self._given.as_json:
            print_lines(json_lines(profile))
        elif self._given.as_map:
            print_lines(map_lines(profile))
        else:
            print_table(TEXT_HEADER, list(text_rows(profile)))
        was = "was" if profile.places == 1 else "were"
        console.note(
            f"{counted(profile.places, 'instruction')} of '{self._module.name}' {was} checked for accesses to the "
            f"{counted(layout.whole, 'byte')} of '{layout.name}'"
        )
        if profile.unseen:
            listed = "; ".join(each.text for each in profile.unseen)
            console.note(f"not checked in '{self._module.name}': {listed}")
        console.note(
            "not seen: accesses by the kernel, by other modules, by code that is made at run time, and by push, pop, "
            "call and return"
        )

    def _tell_losses(self, tables: Sequence[TableContents], counts: _Counts, finished: Finished | None) -> None:
        """Print how many accesses are missing in the profile, and why."""
        lost = sum(table.lost for table in tables)
        if lost:
            console.warning(f"{lost} access{'es' * (lost != 1)} had no room in the tables: the profile is incomplete")
        if counts.lost:
            are = "1 access is" if counts.lost == 1 else f"{counts.lost} accesses are"
            console.warning(f"{are} missing: the code of their process is no longer known")
        if counts.bounded:
            console.warning(
                f"up to {counts.bounded} of the reads did not happen: a repeated comparison (repe cmps, repne scas) "
                "may end early"
            )
        jump = fastest_engine()
        slow = sum(
            not all(each.startswith(jump) for each in count.executed)
            for count in (finished.counts if finished is not None else ())
        )
        if slow:
            have = "1 executed instruction has a breakpoint instead of a jump"
            if slow > 1:
                have = f"{slow} executed instructions have breakpoints instead of jumps"
            console.note(f"{have}: each execution takes microseconds, whether it accesses the variable or not")


@click.command("storage")
@click.argument("variable", metavar="MODULE:VARIABLE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@command_option("Start this command, without a shell.")
@process_option("Look at this running process, until Ctrl-C.")
@follow_option("Count accesses of child processes as well.")
@symbols_option
@engine_option("The engine; with auto, it is inline, because the others take microseconds for each instruction.")
@click.option("--map", "as_map", is_flag=True, help="Print the layout by cache lines, with bars for the accesses.")
@click.option("--json", "as_json", is_flag=True, help="Print fields and accesses as JSON lines.")
@verbose_option
def storage_command(
    variable: str,
    arguments: tuple[str, ...],
    command_line: str | None,
    pid: int | None,
    follow: bool,
    symbols: Path | None,
    engine_name: str,
    as_map: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """
    Print which functions read and write the fields of a structure.

    VARIABLE is a global or static variable of MODULE. MODULE needs debug information (-g). Each instruction of MODULE
    that accesses memory is checked for accesses to the variable.
    """
    scope = scope_of(command_line, arguments, pid, None, None, follow=follow)
    if scope.kind is ScopeKind.EVERYWHERE:
        raise click.UsageError("storage needs a command (-c COMMAND, or -- COMMAND) or a process (-p PID)")
    if not all(variable.rpartition(":")):
        raise click.BadParameter(f"'{variable}' is not MODULE:VARIABLE, such as redis-server:server")
    if as_map and as_json:
        raise click.UsageError("--map and --json exclude each other")
    able = [row.usage for row in rows() if Capability.ACCESS_CHECK in row.capabilities]
    if engine_name not in (AUTO, *able):
        raise click.UsageError(
            f"the engine {engine_name} lacks {Capability.ACCESS_CHECK.value}; use --engine {' or '.join(able)}"
        )
    given = _Options(variable, scope, engine_name, symbols, as_json, as_map, verbose)
    progress = Progress()
    try:
        with contextlib.ExitStack() as stack:
            face = _StorageFace(given, progress, stack)
            return run_steps.run_program(face.request(), face)
    finally:
        progress.end()
