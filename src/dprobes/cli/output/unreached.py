"""
What to say where probepoints were inserted and never reached: what did run, and what was probably meant.

That is another program, another library's function of the same name, or code that the compiler has put elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.engines.interface import Scope
    from dprobes.resolve.probepoints import Probepoint

__all__ = ["advice_on_unreached"]

_NAMED = 3
"""How many names an advice has at most."""

_LOOKED_UP_MAX, _FUNCTIONS_MAX = 256, 8
"""Functions that are looked for in other files, and in the debug information."""

_START = lazy_pattern(r"(?P<name>[A-Za-z_][\w.$]*)", re.ASCII)
"""The start of a function, as a probepoint's ``where`` names it."""


def advice_on_unreached(probes: Sequence[Probepoint], scope: Scope, mapped: Mapping[str, str]) -> str | None:
    """
    Return why nothing was reached, as far as that can be told; None if nothing is known that would help.

    ``mapped`` are the files that processes in scope mapped as code, if the engine was told: their names, and paths.
    """
    paths = list(dict.fromkeys(probe.path for probe in probes if probe.is_in_code))
    if not paths:
        return None
    return _on_command(paths, scope.command) or _on_functions(probes, scope, mapped)


def _on_command(paths: Sequence[str], command: Sequence[str]) -> str | None:
    """Return what a command executes, if that is not what was probed."""
    if not command:
        return None
    from dprobes.target.executables import executable_of

    try:
        program = executable_of(command[0])
    except TargetError:
        return None
    if any(_is_same(path, program) for path in paths):
        return None
    started = shutil.which(command[0]) or command[0]
    script = "" if _is_same(started, program) else f" for the script '{started}'"
    executes = f"the command executes '{program}'{script}"
    if not any(".so" in os.path.basename(path) for path in paths):  # noqa: PTH119 - text
        return f"{executes}, and the probepoints are in {_quoted(paths)}; what else it starts is probed as well"
    from dprobes.target.linkedfiles import linked_files

    linked = linked_files(program)
    if any(_is_same(path, other) for path in paths for other in linked.values() if other is not None):
        return None
    names = {Path(path).name for path in paths}
    others = [str(other) for name, other in linked.items() if name in names and other is not None]
    if others:
        return f"{executes}, which is linked with {_quoted(others)}"
    return f"{executes}, which is not linked with {_quoted(paths)}"


def _on_functions(probes: Sequence[Probepoint], scope: Scope, mapped: Mapping[str, str]) -> str | None:
    """Return where else the functions are that were probed."""
    starts = [(probe.path, _START.fullmatch(probe.where)) for probe in probes if probe.is_in_code]
    functions = list(dict.fromkeys((path, start["name"]) for path, start in starts if start is not None))
    if not functions:
        return None
    advice = list(_in_others(functions[:_LOOKED_UP_MAX], list(_loaded(scope, mapped))))
    for path, name in functions if len(functions) <= _FUNCTIONS_MAX else ():
        advice += _elsewhere(path, name)
    return "; ".join(dict.fromkeys(advice)) or None


def _in_others(functions: Sequence[tuple[str, str]], loaded: Sequence[Path]) -> Iterator[str]:
    """Say which functions other files have, too."""
    from dprobes.target.providers import providers_of

    names_in: dict[tuple[Path, ...], list[str]] = {}
    for path in dict.fromkeys(path for path, _ in functions):
        others = [each for each in loaded if not _is_same(path, each)]
        for name, files in providers_of([name for its, name in functions if its == path], others).items():
            names_in.setdefault(tuple(files), []).append(name)
    probed = {Path(path).name for path, _ in functions}
    for those, names in names_in.items():
        written = str(those[0]) if those[0].name in probed else those[0].name
        what = f"{_quoted(names)} {'is' if len(names) == 1 else 'are'} in {_quoted([str(each) for each in those])}"
        yield f"{what}, too, which may be called instead: probe '{written}:{names[0]}'"


def _elsewhere(path: str, name: str) -> Iterator[str]:
    """Say where the code of a function is that the compiler has put elsewhere."""
    from dprobes.resolve.inlinedfunctions import inlined_places
    from dprobes.target.location import Module
    from dprobes.target.names.clones import clones_in, is_cold_part

    try:
        module = Module.load(path)
        clones = [each for each in clones_in(module.symbols, name) if not is_cold_part(each)]
        places = inlined_places(module, name)
    except TargetError:
        return
    file = Path(path).name
    if clones:
        yield f"the compiler has made {_quoted(clones)} of '{name}' for some of its calls: probe '{file}:{clones[0]}'"
    if places:
        yield f"calls of '{name}' were inlined, at {_listed(places)}: 'inline {file}:{name}' probes them"


def _loaded(scope: Scope, mapped: Mapping[str, str]) -> Iterator[Path]:
    """Give the files that a process of the run has mapped as code, or is linked with."""
    from dprobes.target.linkedfiles import linked_files, preloaded_files
    from dprobes.target.modules import root_of
    from dprobes.target.processmaps import code_mappings

    yield from map(Path, mapped.values())
    if scope.pid is not None and scope.endpoint is None:
        with contextlib.suppress(TargetError):  # it has ended
            root = root_of(scope.pid)
            yield from (Path(root + each.path) for each in code_mappings(scope.pid)[0] if each.is_file)
    elif scope.command and not mapped:
        from dprobes.target.executables import executable_of

        with contextlib.suppress(TargetError):
            program = executable_of(scope.command[0])
            yield program
            yield from preloaded_files(os.environ)
            yield from (path for path in linked_files(program).values() if path is not None)


def _listed(places: Sequence[str]) -> str:
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return ", ".join(places[:_NAMED]) + more


def _quoted(paths: Sequence[str]) -> str:
    return _listed([f"'{path}'" for path in paths])


def _is_same(path: str | os.PathLike[str], other: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(path).samefile(other)
    return False
