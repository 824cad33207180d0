"""
The program of an instrumentation set, in DProbes C, and the comparison of its records with what the set promises.

The program consists of the files of the set, after a line with its major code. Macros give the modules and the places:
of several alternatives the first that fits is used. The user's own macros (``-D``) take precedence.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Diagnostics, Severity
from dprobes.errors import DprobesError, SourceError, TargetError
from dprobes.formatters.templates.data_extraction import FieldKind, fields_of
from dprobes.sets import SET_FILE, view_in
from dprobes.sets.set_library import load_set
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.formatters.templates.template_collection import TemplateFinder
    from dprobes.rpn.compilation_passes import CompileOptions
    from dprobes.rpn.rpn_program import Program
    from dprobes.sets.set_description import InstrumentationSet

__all__ = [
    "PlaceFit",
    "SetSource",
    "broken_promises",
    "fits_of_modules",
    "fits_of_places",
    "set_source",
    "with_probe_names",
]

_KERNEL = "kernel"
_WORD_SIZE = 8


class PlaceFit(NamedTuple):
    """An alternative of a macro; ``problem`` is the reason why it does not fit this machine, None if it fits."""

    macro: str
    place: str
    problem: str | None


class SetSource(NamedTuple):
    """The program of a set or a view, the options for its compilation, and the names of probes by minor codes."""

    source: SourceFile
    options: CompileOptions
    names: Mapping[int, str]


def set_source(path: Path, options: CompileOptions, files: ModuleFiles | None = None) -> SetSource:
    """
    Return the program of a set by its ``set.toml``, or of a view by the path ``set.toml/VIEW``.

    ``files`` finds the modules; None means those of this machine. Raise ``DprobesError`` if the set cannot be used.
    """
    name = view_in(path)
    found = load_set(path if name is None else path.parent)
    view = None if name is None else next((each for each in found.views if each.name == name), None)
    if name is not None and view is None:
        raise TargetError(f"the set '{found.name}' has no view '{name}'")
    if view is not None and not view.file:
        hint = f"record with 'dprobes run {found.name} -o FILE.dpt', then 'dprobes sql FILE.dpt {found.name}/{name}'"
        raise TargetError(f"'{found.name}/{name}' is a query in SQL, which needs a trace file", hint=hint)
    given = {name for name, _ in options.defines}
    modules = _module_macros(found, files)
    defines = [*options.defines, *((name, text) for name, text in modules if name not in given)]
    options = replace(options, defines=tuple(defines))
    for macro, places in found.places.items():
        if macro not in given:
            place = places[0] if len(places) == 1 else _first_fitting(found, macro, options, files)
            options = replace(options, defines=(*options.defines, (macro, place)))
    major, included = (found.major, found.files) if view is None else (view.major, (view.file,))
    text = "".join(f'#include "{found.directory / each}"\n' for each in included)
    names = {probe.minor: probe.name for probe in found.probes} if view is None else {}
    source = SourceFile(str(found.directory / SET_FILE), _header(found, options, major) + text)
    return SetSource(source, options, names)


def with_probe_names(templates: str, names: Mapping[int, str]) -> str:
    """Return the text of a template file with the names of probes by the minor codes of their templates."""

    def named(match: re.Match[str]) -> str:
        name = names.get(int(match[1]))
        return match[0] if name is None else f'{match[0]}\nprobe = "{name}"'

    return re.sub(r"^minor = (\d+)$", named, templates, flags=re.MULTILINE)


def _header(found: InstrumentationSet, options: CompileOptions, major: int) -> str:
    """Return the statement with the major code, and with the first module of the set as that of its program."""
    first = next(iter(found.modules), None)
    module = _KERNEL if first is None else dict(options.defines)[first]
    return f"module {module}, major {major};\n"


def _module_macros(found: InstrumentationSet, files: ModuleFiles | None) -> list[tuple[str, str]]:
    from dprobes.dpc.modules.probed_modules import ModuleFiles

    files = files or ModuleFiles()
    return [(macro, f'"{files.first_of(names)}"') for macro, names in found.modules.items()]


def _first_fitting(found: InstrumentationSet, macro: str, options: CompileOptions, files: ModuleFiles | None) -> str:
    """Return the first alternative of a macro that fits, or the first one if none does: its errors are reported."""
    fits = _fits(found, macro, options, files)
    return next((each.place for each in fits if each.problem is None), found.places[macro][0])


def fits_of_modules(found: InstrumentationSet, files: ModuleFiles | None = None) -> list[PlaceFit]:
    """Return all alternatives of the modules of a set, each with the reason for which it does not fit here."""
    from dprobes.dpc.modules.probed_modules import ModuleFiles

    files = files or ModuleFiles()
    return [
        PlaceFit(macro, name, None if files.has(name) else "it is not on this machine")
        for macro, names in found.modules.items()
        for name in names
    ]


def fits_of_places(
    found: InstrumentationSet, options: CompileOptions, files: ModuleFiles | None = None
) -> list[PlaceFit]:
    """Return all alternatives of the places of a set, each with the reason for which it does not fit here."""
    own = replace(options, defines=(*options.defines, *_module_macros(found, files)))
    return [each for macro in found.places for each in _fits(found, macro, own, files)]


def _fits(found: InstrumentationSet, macro: str, options: CompileOptions, files: ModuleFiles | None) -> list[PlaceFit]:
    return [PlaceFit(macro, place, _problem(found, place, options, files)) for place in found.places[macro]]


def _problem(found: InstrumentationSet, place: str, options: CompileOptions, files: ModuleFiles | None) -> str | None:
    """Return the reason for which a probe cannot be inserted at a place; None if it can."""
    from dprobes.dpc.compiler import compile_source
    from dprobes.resolve.local_module import resolve_here

    diagnostics = Diagnostics()
    source = SourceFile(f"{found.name}", f"{_header(found, options, found.major)}{place} {{ }}\n")
    try:
        for program in compile_source(source, diagnostics, options, files=files).programs:
            pid, command = (None, None) if files is None else (files.pid, files.command)
            resolved = resolve_here(program, diagnostics, pid=pid, command=command)
            if resolved.resolved is None and resolved.kernel is None:
                return f"there is no module '{program.name}'"
    except SourceError as error:
        return next((each.message for each in error.diagnostics if each.severity is Severity.ERROR), error.message)
    except DprobesError as error:
        return error.message
    return None


# What a set promises, and what its program does.

_KINDS = {
    FieldKind.SIGNED: ("int", "time"),
    FieldKind.UNSIGNED: ("int", "time"),
    FieldKind.CHARACTER: ("int",),
    FieldKind.STRING: ("string",),
    FieldKind.ADDRESS: ("address",),
    FieldKind.BYTES: ("bytes",),
}
"""The words of ``set.toml`` for the types of a template's fields."""


def broken_promises(
    found: InstrumentationSet, programs: Sequence[Program], templates: TemplateFinder, diagnostics: Diagnostics
) -> None:
    """
    Add an error for each difference between the probes that a set promises and those of its ``programs``.

    Probes with the same minor code are compared by group, type, and the names and kinds of fields.
    """
    definitions = {each.minor: each for program in programs for each in program.definitions}
    for probe in found.probes:
        definition = definitions.get(probe.minor)
        if definition is None:
            diagnostics.error(probe.span, f"no probe of the program has the minor code {probe.minor} of '{probe.name}'")
            continue
        if definition.group != probe.group:
            said = "no group" if definition.group is None else f"the group '{definition.group}'"
            diagnostics.error(probe.span, f"'{probe.name}' is promised in the group '{probe.group}', and has {said}")
        if definition.types != (probe.type,):
            said = f"the type '{' '.join(definition.types)}'" if definition.types else "no type"
            diagnostics.error(probe.span, f"'{probe.name}' is promised with the type '{probe.type}', and has {said}")
        template = templates.find(found.major, probe.minor)
        logged = [] if template is None else [(each.name, each.kind) for each in fields_of(template, _WORD_SIZE)]
        is_kept = len(logged) == len(probe.fields) and all(
            name == field.name and field.kind in _KINDS[kind]
            for (name, kind), field in zip(logged, probe.fields, strict=True)
        )
        if not is_kept:
            promised = " ".join(f"{field.name}:{field.kind}" for field in probe.fields) or "none"
            said = " ".join(f"{name}:{_KINDS[kind][0]}" for name, kind in logged) or "none"
            diagnostics.error(probe.span, f"'{probe.name}' is promised with the fields '{promised}', and has '{said}'")
    promised_codes: Mapping[int, str] = {probe.minor: probe.name for probe in found.probes}
    for minor in definitions:
        if minor not in promised_codes:
            diagnostics.error(None, f"the set '{found.name}' does not promise its probe with the minor code {minor}")
