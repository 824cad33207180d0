"""
The probe program that keeps a shadow stack of each thread, and the profile of calls in its tables.

::

    entry of a function   push a frame: stack pointer, function, time at the end of the handler
    exit of a function    read the time; pop the frames at or below the stack pointer, and add up their times

A frame is identified by the stack pointer at the entry, where the return address is. A frame at or below the stack
pointer of a later entry or exit has ended, even if its exit was not seen: by ``longjmp``, an exception, or a jump to
another function (a tail call), whose caller is then the caller of the jumping function. So no unwinder needs a probe.

The program is in DProbes C. It has one handler for all entries and one for all exits; an engine needs nothing else.
With roots, only calls within a call of a root count: entries of other functions have a handler that pushes no frame on
an empty stack.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dprobes.cli.output.call_profile import OUTSIDE, CallEdge, CallProfile
from dprobes.diagnostics import Diagnostics
from dprobes.errors import TargetError
from dprobes.rpn.rpn_program import Code
from dprobes.target.code.function_exits import CallFrames, ExitKind, function_exits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.cli.runs.code_places import CodePlaces
    from dprobes.keyed.table_layout import TableContents
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.target.code.call_graph import Reached
    from dprobes.target.code.function_exits import Exits
    from dprobes.target.matching_functions import Function
    from dprobes.target.probed_module import Module

__all__ = [
    "FUNCTIONS_MAX",
    "ProfiledCode",
    "depth_of",
    "paths_in",
    "profile_in",
    "profiled_code",
    "program_for",
]

# The program.

_VARIABLES_MAX = 1024
"""Maximum number of variables of a thread."""

_HEADS_SHIFT = 58
_HEADS = 1 << 64 - _HEADS_SHIFT
"""Number of words in which a thread finds whether a function is active, by a hash of its address."""

FUNCTIONS_MAX = 4096
"""Maximum number of functions; each entry and exit has a copy of its handler, some kilobytes of code."""

_ROOM = 1 << 16
"""Number of call edges for which the tables have room."""

_FACTOR = 0x9E3779B97F4A7C15
"""The golden ratio, as a fraction of 2**64: the factor of hashes."""


def depth_of(*, keeps_paths: bool) -> int:
    """Return the maximum number of frames of a shadow stack; each takes four or five variables of the thread."""
    return (_VARIABLES_MAX - 1 - _HEADS) // (5 if keeps_paths else 4)


def _declarations(*, keeps_paths: bool) -> str:
    depth = depth_of(keeps_paths=keeps_paths)
    paths = f"thread unsigned long paths[{depth}];       // the number of the path of calls" if keeps_paths else ""
    return f"""
thread unsigned long depth;
thread unsigned long heads[{_HEADS}];       // the outermost active function of each hash
thread unsigned long places[{depth}];       // the stack pointer at the entry times 4, and a kind of frame
thread unsigned long functions[{depth}];    // the address of the entry
thread unsigned long begins[{depth}];       // the time of the entry
thread unsigned long children[{depth}];     // the time of calls from the frame
{paths}
static unsigned long too_deep;
"""


_PLAIN, _RECURSIVE, _OWNER = range(3)
"""Kinds of frames: outermost one of its function; within a call of itself; outermost one that owns its head."""


def _hash(function: str) -> str:
    return f"({function} * {_FACTOR:#x}) >> {_HEADS_SHIFT}"


def _end_frames(*, returning: bool, keeps_paths: bool) -> str:
    """
    Return code that ends the frames at or below the stack pointer at the time ``now``; ``d`` is the depth.

    With ``returning`` the frame at the stack pointer is that of the function that is left.
    """
    left = "if ((places[d] >> 2) != sp) " if returning else ""
    path = ""
    if keeps_paths:
        path = """unsigned long parent = 0;
        if (d > 0) parent = paths[d - 1];
        @paths[paths[d], parent, (void *)caller, (void *)function] = sum(own);"""
    return f"""
    while (d > 0 && places[d - 1] <= here) {{
        d = d - 1;
        unsigned long took = now - begins[d], own = took - children[d], function = functions[d], caller = 0;
        if (d > 0) {{
            caller = functions[d - 1];
            children[d - 1] = children[d - 1] + took;
        }}
        unsigned long kind = places[d] & 3;
        @inclusive[(void *)caller, (void *)function] = avg(took);
        @exclusive[(void *)caller, (void *)function] = sum(own);
        if (kind == {_RECURSIVE}) @recursive[(void *)function] = sum(took);
        if (kind == {_OWNER}) heads[{_hash("function")}] = 0;
        {left}@left[(void *)function]++;
        {path}
    }}
    depth = d;"""


def _entry_handler(*, is_root: bool, keeps_paths: bool) -> str:
    """Return the handler of entries; without ``is_root`` it does nothing outside of a call of a root."""
    outside = "" if is_root else "if (d == 0) return;"
    path = ""
    if keeps_paths:
        path = f"""unsigned long path = 0;
    if (d > 0) path = paths[d - 1];
    paths[d] = (path ^ entered) * {_FACTOR:#x};"""
    return f"""{{
    unsigned long d = depth, here = sp << 2 | 3;
    {outside}
    if (d > 0 && places[d - 1] <= here) {{
        unsigned long now = nsecs;
        {_end_frames(returning=False, keeps_paths=keeps_paths)}
        {outside}
    }}
    if (d >= {depth_of(keeps_paths=keeps_paths)}) {{
        too_deep++;
        return;
    }}
    unsigned long entered = pc, kind = {_PLAIN}, head = {_hash("pc")}, at = d;
    if (heads[head] == 0) {{
        heads[head] = entered;
        kind = {_OWNER};
    }} else if (heads[head] == entered) {{
        kind = {_RECURSIVE};
    }} else {{
        while (at > 0 && kind == {_PLAIN}) {{
            at = at - 1;
            if (functions[at] == entered) kind = {_RECURSIVE};
        }}
    }}
    places[d] = sp << 2 | kind;
    functions[d] = entered;
    children[d] = 0;
    {path}
    depth = d + 1;
    begins[d] = nsecs;
}}"""


def _exit_handler(*, keeps_paths: bool) -> str:
    """Return the handler of exits, which runs before the return or jump."""
    return f"""{{
    unsigned long d = depth, here = sp << 2 | 3;
    if (d == 0) return;
    unsigned long now = nsecs;
    {_end_frames(returning=True, keeps_paths=keeps_paths)}
}}"""


def _graph_handlers() -> tuple[str, str, str]:
    """
    Return the handlers of a function graph: of entries of roots, of other entries, and of exits.

    Each record has one number: the depth of the call in its low byte, and above it the time that the call has taken.
    """

    def entry(outside: str) -> str:
        return f"""{{
    unsigned long d = depth;
    while (d > 0 && places[d - 1] <= sp) d = d - 1;
    depth = d;
    {outside}
    if (d >= {depth_of(keeps_paths=False)}) {{
        too_deep++;
        return;
    }}
    places[d] = sp;
    depth = d + 1;
    printf("%u", d);
    begins[d] = nsecs;
}}"""

    leave = """{
    unsigned long now = nsecs, d = depth;
    while (d > 0 && places[d - 1] < sp) d = d - 1;
    depth = d;
    if (d == 0 || places[d - 1] != sp) return;
    d = d - 1;
    depth = d;
    unsigned long took = now - begins[d], number = took << 8 | d;  // a variable is logged as one word
    printf("%u", number);
}"""
    return entry(""), entry("if (d == 0) return;"), leave


class ProfiledCode(NamedTuple):
    """
    Code of the functions to be profiled.

    ``entries`` maps the file offset of an entry to the function's name, ``exits`` that of an instruction that leaves a
    function. ``left_out`` maps the name of a function that cannot be profiled to the reason. ``roots`` are the offsets
    of entries within whose calls others count. ``reached`` is what calls from the roots reach; None: all are roots.
    """

    entries: dict[int, str]
    exits: dict[int, str]
    left_out: dict[str, str]
    roots: frozenset[int]
    reached: Reached | None = None


def profiled_code(module: Module, given: str, pattern: str, *, with_callees: bool = False) -> ProfiledCode:
    """
    Return the code of the functions that match a pattern, and with ``with_callees`` that of all that they may call.

    Raise ``TargetError`` if there is none that can be profiled, or if there are too many. Its hints contain ``given``,
    the module as the user wrote it.
    """
    from dprobes.target.matching_functions import matching_functions
    from dprobes.target.readable_names import Demangler

    functions: Sequence[Function] = matching_functions(module, pattern)[0]
    roots = frozenset(function.offset for function in functions)
    frames, demangler, reached = CallFrames(module.elf), Demangler(), None
    if with_callees and functions:
        from dprobes.target.code.call_graph import CallGraph

        reached = CallGraph(module, frames).reached_from(functions)
        functions = reached.functions
    entries: dict[int, str] = {}
    exits: dict[int, str] = {}
    left_out: dict[str, str] = {}
    for function in functions:
        name = demangler.name_of(function.name)
        try:
            found = function_exits(module, frames, function.address, function.size)
            _check_exits(module, found, function.offset)
        except TargetError as error:
            left_out[name] = error.message
            continue
        entries[function.offset] = name
        exits |= {each.offset: name for each in found.exits}
    file = module.path.name
    if roots.isdisjoint(entries):
        hint = f"dprobes list {given} prints the functions"
        names = {demangler.name_of(each.name) for each in functions if each.offset in roots}
        reason = next((left_out[name] for name in names if name in left_out), None)
        if reason is None:
            raise TargetError(f"'{file}' has no function that matches '{pattern}'", hint=hint)
        raise TargetError(f"no function '{pattern}' of '{file}' can be profiled: {reason}", hint=hint)
    if len(entries) > FUNCTIONS_MAX:
        what = f"'{pattern}' reaches" if reached is not None else f"'{pattern}' matches"
        raise TargetError(
            f"{what} {len(entries)} functions of '{file}'; profile takes at most {FUNCTIONS_MAX}",
            hint=f"name fewer functions: dprobes profile '{given}:PATTERN'",
        )
    return ProfiledCode(entries, exits, left_out, roots, reached)


def _check_exits(module: Module, found: Exits, entry: int) -> None:
    """Raise ``TargetError`` if the exits of a function, whose entry has a file offset, cannot all be recognized."""
    from iced_x86 import FlowControl

    from dprobes.target.code.machine_code import instructions_between

    if found.goes_back:
        raise TargetError("it jumps to its own entry, as in a loop")
    for leaving in found.exits:
        if leaving.offset == entry:
            raise TargetError("its first instruction leaves it")
        if leaving.kind is ExitKind.JUMP:
            instruction = next(iter(instructions_between(module, leaving.address, leaving.address + 1)))[0]
            if instruction.flow_control == FlowControl.CONDITIONAL_BRANCH:
                raise TargetError("it may leave by a conditional jump")
            if instruction.flow_control == FlowControl.INDIRECT_BRANCH and not instruction.is_ip_rel_memory_operand:
                raise TargetError("it may leave by a jump to a computed address")


def _without_catches(definition: ProbeDefinition) -> ProbeDefinition:
    """
    Return a definition that catches no exceptions.

    Its handlers raise none, except if the program has overwritten the shadow stack. Engines count those. Without
    catches the depth of the RPN stack is known everywhere, and the handler can run without claiming a state.
    """
    code = definition.handler
    kept = [number for number, each in enumerate(code.instructions) if each.row.syntax != "sx <label>"]
    instructions = tuple(code.instructions[number] for number in kept)
    return replace(definition, handler=Code(instructions, {n: bisect_left(kept, at) for n, at in code.labels.items()}))


def program_for(name: str, code: ProfiledCode, *, keeps_paths: bool = False, logs_calls: bool = False) -> Program:
    """
    Return the program that profiles code of the module with the given name, with ``keeps_paths`` by call paths.

    With ``logs_calls`` it has no tables: each entry and return logs the depth of the call, and the time that it took.
    The minor codes of these records are the numbers of the entries, and then those of the exits.
    """
    from dprobes.api.compiled_program import parse_c
    from dprobes.rpn.compilation_passes import CompileOptions
    from dprobes.rpn.rpn_program import Expression, Offset
    from dprobes.source_text import SourceFile

    first = next(iter(code.entries))
    handlers = (
        _entry_handler(is_root=True, keeps_paths=keeps_paths),
        _entry_handler(is_root=False, keeps_paths=keeps_paths),
        _exit_handler(keeps_paths=keeps_paths),
    )
    if logs_calls:
        handlers = _graph_handlers()
    text = "\n".join(f"{first + number:#x} {handler}" for number, handler in enumerate(handlers))
    # A path may contain characters that a string in a program may not, so it is no part of the text.
    declarations = _declarations(keeps_paths=keeps_paths)
    source = SourceFile("<profile>", f"module profiled;\n{declarations}\n{text}\n")
    program = parse_c(source, Diagnostics(), CompileOptions(), "").programs[0]
    enter_root, enter, leave = map(_without_catches, program.definitions)
    places = [
        *((offset, enter_root if offset in code.roots else enter) for offset in code.entries),
        *((offset, leave) for offset in code.exits),
    ]
    return replace(
        program,
        name=name,
        definitions=tuple(
            replace(definition, location=Offset(Expression(offset, None)), minor=number if logs_calls else 0)
            for number, (offset, definition) in enumerate(places)
        ),
        tables=tuple(replace(table, room=_ROOM) for table in program.tables),
    )


# The results.


def _name_at(address: int, names: CodePlaces[str]) -> str:
    """Return the name of the function whose entry is at an address, or the address as a number if it is unknown."""
    return names.at(address) or f"{address:#x}"


def profile_in(module: str, tables: Sequence[TableContents], names: CodePlaces[str]) -> CallProfile:
    """Return the profile in the tables of a program; functions with one name are added up."""
    from dprobes.keyed.table_layout import row_parts

    found = {each.table.name: each for each in tables}

    def rows(name: str) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
        for row in found[name].rows:
            keys = (part for part in row_parts(found[name].table, row.key, row.cells) if isinstance(part, int))
            yield tuple(_name_at(key, names) if key else OUTSIDE for key in keys), row.cells

    sums: dict[tuple[str, ...], list[int]] = {}
    for key, (count, inclusive) in rows("inclusive"):
        mine = sums.setdefault(key, [0, 0, 0])
        mine[0] += count
        mine[1] += _signed(inclusive)
    for key, (exclusive,) in rows("exclusive"):
        sums.setdefault(key, [0, 0, 0])[2] += _signed(exclusive)
    edges = tuple(CallEdge(caller, callee, *values) for (caller, callee), values in sums.items())
    recursive: dict[str, int] = {}
    for (name,), (inclusive,) in rows("recursive"):
        recursive[name] = recursive.get(name, 0) + _signed(inclusive)
    left: dict[str, int] = {}
    for (name,), (count,) in rows("left"):
        left[name] = left.get(name, 0) + count
    return CallProfile(module, edges, recursive, left)


def _signed(number: int) -> int:
    """Return a number of 64 bits as a signed one: clocks of two CPUs may differ by some nanoseconds."""
    return number - (1 << 64) if number >> 63 else number


def paths_in(tables: Sequence[TableContents], names: CodePlaces[str]) -> dict[tuple[str, ...], int]:
    """
    Return the exclusive time of each path of calls in nanoseconds, the outermost function first.

    A call that has not ended has no row, so the path of a call within it begins with this call.
    """
    from dprobes.keyed.table_layout import row_parts

    (contents,) = (each for each in tables if each.table.name == "paths")
    rows: dict[int, tuple[int, int, int, int]] = {}
    for row in contents.rows:
        path, parent, caller, function = (
            part for part in row_parts(contents.table, row.key, row.cells)[:4] if isinstance(part, int)
        )
        rows[path] = parent, caller, function, _signed(row.cells[0])
    found: dict[tuple[str, ...], int] = {}
    for path, (_, _, _, own) in rows.items():
        stack = tuple(_name_at(address, names) for address in _functions_on(path, rows))
        found[stack] = found.get(stack, 0) + own
    return {stack: own for stack, own in found.items() if own > 0}


def _functions_on(path: int, rows: Mapping[int, tuple[int, int, int, int]]) -> list[int]:
    """Return the addresses of the functions on a path, the outermost first, as far as their calls have ended."""
    chain: list[int] = []
    caller = 0
    while path in rows and len(chain) < depth_of(keeps_paths=True):
        path, caller, function, _ = rows[path]
        chain.append(function)
    if caller:
        chain.append(caller)
    chain.reverse()
    return chain
