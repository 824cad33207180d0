"""
Fail if modules of the package import each other in a cycle, or if a short module has only one importer.

Every kind of import counts: at the start of a module, inside a function, and for types only. ``KNOWN`` lists the cycles
that are accepted. A module of at most ``SHORT`` lines with one importer belongs into that importer; ``EXCUSED`` lists
the exceptions, each with its reason. Entries of the lists that no longer apply must be removed, so the lists only
shrink.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"

KNOWN: tuple[frozenset[str], ...] = ()
"""The accepted cycles, as the names of their modules."""

SHORT = 150
"""Maximum number of lines of a module that needs more than one importer."""

EXCUSED: dict[str, str] = {
    "dprobes.api.mnemonics": "Its stub, mnemonics.pyi, declares what it makes of the instruction table.",
    "dprobes.cli.compilation": "The verb imports it late: shell completion and --help do without its sixty modules.",
    "dprobes.cli.external_cpp": "Only --cpp imports it.",
    "dprobes.dwarf.inlined_names": "A table for outputs; the rest of the debug information is imported late.",
    "dprobes.engines.ebpf.inkernel.kprobe_guard": "A process of its own.",
    "dprobes.engines.ebpf.read.stopped_processes": "A concept with tests of its own; the session has 500 lines.",
    "dprobes.platform.x86.written_memory": "A concept with tests of its own: operands of instructions.",
    "dprobes.engines.packed_entries": "Imported when there are records, with the codec of packed ones.",
    "dprobes.formatters.template_library": "A class of the Python API, which the package names.",
    "dprobes.manager.systemd_units": "A concept with tests of its own: the units that packaging/ has.",
    "dprobes.resolve.carried_ebpf": "It imports the compiler to eBPF, and is imported late.",
}
"""Short modules with one importer, with the reason why each is a module of its own."""


class Edge(NamedTuple):
    """One module's import of another one."""

    importer: str
    imported: str
    place: str
    kind: str


def modules(sources: Path) -> dict[str, Path]:
    """Return the files of all modules below a directory, by dotted name."""
    found = {}
    for path in sorted(sources.rglob("*.py")):
        parts = path.relative_to(sources).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def edges(sources: Path) -> list[Edge]:
    """Return all imports among the modules below a directory."""
    files = modules(sources)
    found = (edge for name, path in files.items() for edge in _edges_of(name, path, files, sources))
    return list(dict.fromkeys(found))  # a statement may name several things of one module


def _edges_of(module: str, path: Path, files: Mapping[str, Path], sources: Path) -> Iterator[Edge]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node, kind in _imports(ast.parse(path.read_bytes()), "at the start"):
        for name in _imported(node, package, files):
            if name != module:
                yield Edge(module, name, f"{path.relative_to(sources.parent)}:{node.lineno}", kind)


def _imports(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Iterate over the import statements below a node, each with its kind: when it is executed."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import() | ast.ImportFrom():
                yield child, kind
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, "late")
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for each in child.body:
                    yield from _imports(ast.Module([each], []), "for types")
                for each in child.orelse:
                    yield from _imports(ast.Module([each], []), kind)
            case _:
                yield from _imports(child, kind)


def _imported(node: ast.Import | ast.ImportFrom, package: str, files: Mapping[str, Path]) -> Iterator[str]:
    """Iterate over the modules that a statement imports; ``from package import name`` may import a module ``name``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in files)
        return
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *([base] if base else [])])
    for alias in node.names:
        if (name := f"{base}.{alias.name}") in files:
            yield name
        elif base in files:
            yield base


def cycles(graph: Mapping[str, Sequence[str]]) -> list[frozenset[str]]:
    """Return the strongly connected components of more than one node (Tarjan's algorithm), the largest first."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == index[node]:
            position = stack.index(node)
            component = frozenset(stack[position:])
            del stack[position:]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found, key=lambda each: (-len(each), sorted(each)))


def parts_of_others(sources: Path, excused: Mapping[str, str]) -> list[str]:
    """Return a line for each short module with one importer that is not excused, and for each excuse without need."""
    importers: dict[str, set[str]] = {}
    for edge in edges(sources):
        importers.setdefault(edge.imported, set()).add(edge.importer)
    short = {
        name: len(text.splitlines())
        for name, path in modules(sources).items()
        if path.name != "__init__.py" and len(importers.get(name, ())) == 1
        for text in [path.read_text(encoding="utf-8")]
        if len(text.splitlines()) <= SHORT
    }
    strings = [
        f"{name} has {count} lines and one importer, {min(importers[name])}: it belongs there"
        for name, count in short.items()
        if name not in excused
    ]
    return strings + [
        f"{name} needs no excuse any more: bring EXCUSED up to date" for name in excused if name not in short
    ]


def problems(sources: Path, known: Sequence[frozenset[str]]) -> list[str]:
    """Return messages about cycles that are not in ``known``, and about entries of ``known`` that are no cycles."""
    all_edges = edges(sources)
    graph: dict[str, list[str]] = {}
    for edge in all_edges:
        graph.setdefault(edge.importer, []).append(edge.imported)
    found = cycles(graph)
    strings = []
    for cycle in found:
        if cycle not in known:
            lines = [f"{len(cycle)} modules import each other in a circle:"]
            inner = [edge for edge in all_edges if {edge.importer, edge.imported} <= cycle]
            lines += [f"  {edge.place}: {edge.importer} imports {edge.imported} ({edge.kind})" for edge in inner]
            strings.append("\n".join(lines))
    strings += [
        f"a known circle is gone, or has changed: bring KNOWN up to date: {', '.join(sorted(each))}"
        for each in known
        if each not in found
    ]
    return strings


def main() -> int:
    """Print the problems; return 1 if there are any."""
    found = [*problems(SOURCES, KNOWN), *parts_of_others(SOURCES, EXCUSED)]
    print("\n".join(found) or "no circles of imports, and no module that is a part of another one")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
