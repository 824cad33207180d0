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
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from dprobes.cli import console
from dprobes.cli.console import Progress, print_lines, print_table
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
from dprobes.cli.runs.early_interrupt import EarlyInterrupt
from dprobes.cli.scope_and_engine import (
    check_scope,
    engine_option,
    note_engine,
    note_process,
    scope_of,
    verbose_option,
)
from dprobes.cli.shared_options import PROCESS_ID, symbols_option
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
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dprobes.engines.engine_interface import Attachment, Finished, Scope
    from dprobes.keyed.table_layout import TableContents
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.runs.run_steps import RunPlan, Vantage
    from dprobes.target.probed_module import Module
    from dprobes.target.process_images import ProcessImages

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

    ``unseen`` has the number of other instructions that access memory, by the reason.
    """

    places: tuple[_Place, ...]
    unseen: dict[OtherMemory, int]


def _accessing_code(module: Module, target: StoredObject) -> _AccessingCode:
    """Return the instructions in the functions of a module that may access an object."""
    from dprobes.target.readable_names import Demangler

    elf, demangler, frames = module.elf, Demangler(), CallFrames(module.elf)
    frame_pointers = _FramePointers(frames)
    places: dict[int, _Place] = {}
    unseen: dict[OtherMemory, int] = {}
    for start, end, symbol in _functions(module):
        name = demangler.name_of(symbol)
        for address, _, access in accesses_in(elf.read(start, end - start), start):
            if address in places:
                continue
            if isinstance(access, OtherMemory):
                unseen[access] = unseen.get(access, 0) + 1
                continue
            if isinstance(access, MemoryAccess) and not _may_touch(access, target):
                continue
            if isinstance(access, MemoryAccess) and frame_pointers.are_used_by(access, address):
                unseen[OtherMemory.STACK] = unseen.get(OtherMemory.STACK, 0) + 1
                continue
            offset = elf.file_offset(address)
            assert offset is not None
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
    """Iterate over the functions of a module: start, end and name, the address as a number if no symbol is known."""
    elf = module.elf
    ranges = {symbol.address: symbol.address + symbol.size for symbol in module.symbols.functions() if symbol.size}
    for start in elf.frames.starts:
        extent = elf.frames.extent(elf, start)
        if extent is not None and start not in ranges:
            ranges[start] = extent[1]
    reached = 0
    for start, end in sorted(ranges.items()):
        offset = elf.file_offset(start)
        if end <= reached or start < reached or offset is None or not elf.is_executable_offset(offset):
            continue
        reached = end
        named = module.symbol_at(offset)
        name = f"{start:#x}" if named is None else named[0] if not named[1] else f"{named[0]}+{named[1]:#x}"
        yield start, end, name


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


class _Places:
    """The instructions of a module by their addresses in processes."""

    def __init__(self, images: ProcessImages | None, places: Sequence[_Place]) -> None:
        self._images = images
        self._places = {place.offset: place for place in places}

    def at(self, address: int) -> _Place | None:
        """Return the instruction at an address of a process; None if no process is known to have had it there."""
        for pid, since in self._images.code_at(address) if self._images is not None else ():
            image = None if self._images is None else self._images.at(pid, since)
            mapping = None if image is None else image.covering(address)
            if mapping is not None and (place := self._places.get(address - mapping.start + mapping.offset)):
                return place
        return None


class _Counts:
    """Reads and writes by field and function, under construction; ``lost`` counts accesses of unknown instructions."""

    def __init__(self, layout: Layout, places: _Places) -> None:
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
                f"the kernel's '{variable}' cannot be a storage profile: its instructions are not checked",
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
        self._module = path
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
        counts = _Counts(self._object.layout, _Places(self._source.images, self._code.places))
        for table in tables:
            counts.add_table(table)
        unseen = [UnseenCode(count, reason.value) for reason, count in self._code.unseen.items()]
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
        console.note(
            f"{profile.places} instructions of '{self._module.name}' were checked for accesses to the {layout.whole} "
            f"bytes of '{layout.name}'"
        )
        if profile.unseen:
            listed = "; ".join(f"{each.instructions} {each.what}" for each in profile.unseen)
            console.note(f"not checked in '{self._module.name}': {listed}")
        console.note(
            "not seen: accesses by the kernel, by other modules, by code that is made at run time, and by push, pop, "
            "call and return"
        )

    def _tell_losses(self, tables: Sequence[TableContents], counts: _Counts, finished: Finished | None) -> None:
        """Print how many accesses are missing in the profile, and why."""
        lost = sum(table.lost for table in tables)
        if lost:
            console.warning(f"{lost} accesses had no room in the tables: the profile is incomplete")
        if counts.lost:
            console.warning(f"{counts.lost} accesses are missing: the code of their process is no longer known")
        if counts.bounded:
            console.warning(f"{counts.bounded} reads are of repeated comparisons, which may have stopped before them")
        jump = fastest_engine()
        slow = sum(
            not all(each.startswith(jump) for each in count.executed)
            for count in (finished.counts if finished is not None else ())
        )
        if slow:
            console.note(f"{slow} instructions had breakpoints: their executions took microseconds, hits or not")


@click.command("storage")
@click.argument("variable", metavar="MODULE:VARIABLE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@click.option("-c", "--command", "command_line", metavar="COMMAND", help="Start this command, without a shell.")
@click.option("-p", "--pid", type=PROCESS_ID, help="Look at this running process, until Ctrl-C.")
@click.option(
    "--follow/--no-follow", default=True, show_default=True, help="Count accesses of child processes as well."
)
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

    VARIABLE is a variable of MODULE, which has debug information. Each instruction of MODULE that accesses memory is
    checked for accesses to the variable.
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
