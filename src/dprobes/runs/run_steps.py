"""
Steps of a run, from a user's request to a program in its targets.

``run_program`` executes them. A ``Face`` loads the program, follows the events, and reports between the other steps.
Each step may refuse with a ``DprobesError``. Before ``attach``, nothing is changed.

Steps up to ``plan`` read files and processes of this machine. If no file describes the kernel or the processor of a
stub's target, ``resolve`` also connects to the stub: ``Engine.visit_kernel`` stops the target for that time. ``reach``
connects to a stub before anything is announced or written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_choice import Selection, scope_problem
from dprobes.engines.engine_interface import Job
from dprobes.engines.engine_registry import AUTO, candidates, engine_row, faster_row
from dprobes.errors import DprobesError, EngineError
from dprobes.formatters.templates.derived_templates import derived_templates
from dprobes.record.record_origin import RecordSource
from dprobes.resolve.local_module import resolve_here
from dprobes.rpn.program_needs import patched_definitions
from dprobes.rpn.rpn_program import joined_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.engines.attachment_group import AttachmentGroup
    from dprobes.engines.engine_interface import Attachment, EngineOptions, Plan, Scope
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.record.log_record import Item
    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.probed_module import SymbolProvider

__all__ = [
    "Face",
    "Present",
    "ProgramInput",
    "Request",
    "Resolution",
    "RunPlan",
    "Vantage",
    "look_around",
    "record_source",
    "run_program",
    "tool_error",
]

ResultT = TypeVar("ResultT")


class Present(Protocol):
    """Inserted program, as the run that replaces it needs it: the attachment, and the name of the engine."""

    engine: str
    attachment: Attachment


class Request(NamedTuple):
    """
    Options of a run, except the program.

    ``engine`` is the name of an engine, or AUTO. ``allow_self`` allows probing a process of dprobes itself; a process
    that is about to execute a program is always allowed. ``replaces`` is the program that the new one replaces, by the
    same engine unless an engine is named. ``beside`` has the attachments of the same owner, whose programs share
    ``globals``.
    """

    engine: str
    scope: Scope
    options: EngineOptions
    allow_self: bool = False
    replaces: Present | None = None
    beside: tuple[Attachment, ...] = ()
    globals: GlobalVariables | None = None


class Vantage(NamedTuple):
    """
    Valid request, with the process whose file system and mappings determine the files of modules.

    This process is that of the thread ``tid``, or the future process of ``command``. If both are None, it is dprobes
    itself.
    """

    request: Request
    tid: int | None = None
    command: str | None = None


class ProgramInput(NamedTuple):
    """
    Program as it was read, or several that were compiled from one source (``is_group``), with their ``symbols``.

    ``source`` describes the program to readers of its records. ``items`` are the header items of these records.
    Handlers run only for hits that all ``filters`` accept. ``allow_write`` allows changes of the target even if the
    options of the request do not.
    """

    programs: tuple[Program, ...]
    symbols: tuple[SymbolProvider, ...]
    diagnostics: Diagnostics
    source: RecordSource
    items: Item
    filters: tuple[str, ...] = ()
    allow_write: bool = False
    is_group: bool = False


class _Member(NamedTuple):
    """A resolved program of a run, and the engine selected for it with its reason."""

    compiled: ResolvedProgram
    selection: Selection


class Resolution(NamedTuple):
    """Programs that are checked and resolved. ``diagnostics`` has those of all programs."""

    vantage: Vantage
    given: ProgramInput
    members: tuple[_Member, ...]
    diagnostics: Diagnostics

    @property
    def compiled(self) -> tuple[ResolvedProgram, ...]:
        """The resolved programs."""
        return tuple(each.compiled for each in self.members)


class RunPlan(NamedTuple):
    """
    Plan for the attachment of all programs, by the same engine.

    ``reason`` is the reason for the choice of ``auto``; None if the engine was named. ``compiled`` is the first program
    as resolved, with the definitions of all.
    """

    members: tuple[Plan, ...]
    reason: str | None
    compiled: ResolvedProgram
    source: RecordSource
    is_group: bool

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self.members[0].engine.name


class Face(Generic[ResultT]):
    """User interface of a run: the part of the steps that differs between command line, API and manager."""

    def load(self, vantage: Vantage) -> ProgramInput:
        """Return the compiled program, the header items of its records, and its description for readers of records."""
        raise NotImplementedError

    def check(self, resolution: Resolution) -> None:
        """Check the programs after their resolution; raise an error to refuse them."""

    def announce(self, planned: RunPlan) -> None:
        """Report the plan (engine, probepoints, warnings) to the user, or raise an error to refuse it."""

    def ready(self, group: AttachmentGroup) -> None:
        """Handle the insertion of all programs of a group, before a command starts."""

    def follow(self, planned: RunPlan, attachment: Attachment) -> ResultT:
        """Handle the events of the attachment until its end, close it, and return the result of the run."""
        raise NotImplementedError


def run_program(request: Request, face: Face[ResultT]) -> ResultT:
    """Execute the steps of a run for ``request``, and return the result of ``face.follow``."""
    vantage = look_around(request)
    given = face.load(vantage)
    resolution = resolve(given, vantage)
    face.check(resolution)
    planned = plan(resolution)
    with reach(planned):
        face.announce(planned)
        attachment = attach(planned, face)
    return face.follow(planned, attachment)


# Request to Vantage


def look_around(request: Request) -> Vantage:
    """
    Return the request with the process that determines the files of modules.

    If the scope has the id of a thread, the id of its process replaces it. Raise ``DprobesError`` if no engine can
    serve the request.
    """
    engine, scope, replaces = request.engine, request.scope, request.replaces
    if scope.pid is not None and scope.endpoint is None:
        from dprobes.platform.linux.procfs import process_of

        scope = replace(scope, pid=process_of(scope.pid))
    if engine == AUTO and replaces is not None:
        engine = replaces.engine
    if (problem := scope_problem(engine, scope, request.options)) is not None:
        raise EngineError(problem)
    present = tuple(member for each in request.beside for member in _members_of(each))
    if replaces is not None and len(_members_of(replaces.attachment)) > 1:
        raise EngineError(
            "a program for several modules cannot be replaced by another one", hint="remove the other one first"
        )
    options = replace(
        request.options,
        traces_already=replaces is not None and engine_row(replaces.engine).is_tracer,
        present=present,
        tracers=frozenset(each.tracer for each in present if each.tracer is not None),
    )
    tid, command = _point_of_view(scope, allow_self=request.allow_self)
    return Vantage(request._replace(engine=engine, scope=scope, options=options, beside=present), tid, command)


def _members_of(attachment: Attachment) -> Sequence[Attachment]:
    """Return the members of a group of attachments. For any other attachment, return the attachment alone."""
    from dprobes.engines.attachment_group import AttachmentGroup

    return attachment.members if isinstance(attachment, AttachmentGroup) else (attachment,)


def _point_of_view(scope: Scope, *, allow_self: bool) -> tuple[int | None, str | None]:
    """
    Return the thread or the command whose file system has the files of modules, and None for the other.

    Both are None for this process. ``allow_self`` permits probing dprobes itself. Raise ``DprobesError`` if no engine
    can probe the scope.
    """
    if scope.command:
        from dprobes.target.module_lookup import executable_of

        executable_of(scope.command[0])
        return None, scope.command[0]
    if scope.pid is None or scope.endpoint is not None:
        return None, None  # a process behind an endpoint does not run on this machine
    from dprobes.engines.refusals import check_process
    from dprobes.platform.linux.procfs import living_thread
    from dprobes.target.module_lookup import root_of

    check_process(scope.pid, allow_self=allow_self or scope.program is not None)
    if scope.program is not None and not root_of(scope.pid):
        return None, scope.program  # the process's current mappings are not those of that program
    return living_thread(scope.pid), None


# ProgramInput to Resolution


def record_source(
    program: Program,
    templates: Mapping[str, bytes],
    *,
    number: int = 0,
    name: str | None = None,
    names_addresses: bool = False,
) -> RecordSource:
    """
    Return the description of a program for readers of its records.

    ``name`` is the user's name of the program, by default that of its module. The source records the mappings of
    processes if templates show addresses, or with ``names_addresses``.
    """
    derived = derived_templates(program)
    source = RecordSource(
        number, name or program.name, program.name, program.major, templates=templates, derived=derived
    )
    if not (names_addresses or source.may_show_addresses):
        return source
    from dprobes.target.process_images import ProcessImages

    return replace(source, images=ProcessImages())


def tool_error(tool: ToolProgram) -> EngineError:
    """Return the error for a program with blocks of the tool, which only ``dprobes run`` executes."""
    written = tool.blocks[0].block.written
    return EngineError(
        f"the program has a block '{written}', which only 'dprobes run' executes",
        hint="run it with 'dprobes run', or leave out 'begin', 'every' and 'end'",
    )


def resolve(given: ProgramInput, vantage: Vantage) -> Resolution:
    """
    Find the modules of programs and their probepoints; return the checked programs, each with the choice of its engine.

    Raise ``SourceError`` with the errors of all programs.
    """
    diagnostics = given.diagnostics
    if given.is_group:
        if vantage.request.replaces is not None:
            raise EngineError(
                "a program for several modules cannot take the place of another one", hint="remove the other one first"
            )
        diagnostics = Diagnostics()
        diagnostics.extend(given.diagnostics)
    members = tuple(
        _resolved(program, symbols, given, vantage, diagnostics)
        for program, symbols in zip(given.programs, given.symbols, strict=True)
    )
    return Resolution(vantage, given, members, diagnostics)


def _resolved(
    program: Program, symbols: SymbolProvider, given: ProgramInput, vantage: Vantage, diagnostics: Diagnostics
) -> _Member:
    request = vantage.request
    if given.filters:
        from dprobes.filters.handler_filter import with_filters

        program = with_filters(program, given.filters, diagnostics)
    allow_write = given.allow_write or request.options.allow_write
    selection = Selection(
        request.engine, request.scope, replace(request.options, symbols=symbols, allow_write=allow_write)
    )
    compiled = resolve_here(
        program,
        diagnostics,
        allow_write=allow_write,
        symbols=symbols,
        pid=vantage.tid,
        command=vantage.command,
        choose_engine=selection.choose,
        kernel=selection.visit_kernel,
        processor=selection.visit_processor,
    )
    if given.filters:
        from dprobes.filters.handler_filter import check_words

        check_words(given.filters, compiled.architecture)
    return _Member(compiled, selection)


# Resolution to RunPlan


def plan(resolution: Resolution) -> RunPlan:
    """
    Return the plan of insertion of the engine that is finally chosen.

    Raise ``DprobesError`` if no engine can insert the programs.
    """
    if len({bool(patched_definitions(each.program)) for each in resolution.compiled}) > 1:
        raise EngineError(
            "a program has either patches or probes", hint="write the patches into a program of their own"
        )
    members = _plans(resolution)
    reasons = {
        each.engine.name: member.selection.reason for each, member in zip(members, resolution.members, strict=True)
    }
    own = [member.selection.reason for member in resolution.members]
    reason = next(filter(None, own), own[0])
    if len(reasons) > 1:
        resolution, members, reason = _planned_by_one(resolution, reasons)
    given, compiled = resolution.given, resolution.members[0].compiled
    name = members[0].engine.name
    if len(members) > 1 and not engine_row(name).shares_variables:
        raise EngineError(f"the {name} engine probes one module at a time", hint="write one program for each module")
    if given.is_group:
        program = joined_program([each.program for each in resolution.compiled])
        compiled = compiled._replace(program=program, diagnostics=resolution.diagnostics)
    source = replace(given.source, kernel=members[0].kernel)
    return RunPlan(members, reason, compiled, source, given.is_group)


def _plans(resolution: Resolution) -> tuple[Plan, ...]:
    request, given = resolution.vantage.request, resolution.given
    replaces = None if request.replaces is None else request.replaces.attachment
    return tuple(
        member.selection.settle(
            Job(
                member.compiled,
                request.scope,
                given.items,
                request.globals,
                replaces,
                request.beside,
                given.source.images,
            )
        )
        for member in resolution.members
    )


def _planned_by_one(
    resolution: Resolution, reasons: Mapping[str, str | None]
) -> tuple[Resolution, tuple[Plan, ...], str | None]:
    """
    Return the resolution, the plans and the reason of one engine for programs with different choices.

    Of the chosen engines, the one with the most expensive hits is tried first, because a single program may need it.
    """
    problem: DprobesError | None = None
    vantage = resolution.vantage
    able = [each for row in reversed(candidates()) for each in (faster_row(row.name), row) if each is not None]
    for name in [row.name for row in able if row.name in reasons]:
        try:
            found = resolve(resolution.given, vantage._replace(request=vantage.request._replace(engine=name)))
            return found, _plans(found), reasons[name]
        except DprobesError as error:
            problem = error
    assert problem is not None, "the engines are candidates"
    raise problem


# RunPlan to Attachment


def reach(planned: RunPlan) -> AbstractContextManager[object]:
    """
    Return a context manager that keeps the connection to a target's stub open, for all programs of the run.

    Without a stub it does nothing.
    """
    first = planned.members[0]
    return first.engine.reach(first)


def attach(planned: RunPlan, face: Face[ResultT]) -> Attachment:
    """Insert the programs, and return their attachment; call ``face.ready`` when a group is inserted."""
    if not planned.is_group:
        (member,) = planned.members
        return member.engine.attach(member)
    from dprobes.engines.attachment_group import AttachmentGroup

    group = AttachmentGroup(planned.members, face.ready)
    group.begin()
    return group
