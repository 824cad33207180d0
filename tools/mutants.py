"""
Change single places of the sources, one at a time, and list the changes that no test notices.

A *mutant* is a copy of the tree with one comparison, boolean, arithmetic operation or constant replaced, or one
statement left out. Tests run on it in a copy of the checkout: those of ``tests/unit`` that mirror the module, and those
that ``ALSO`` names for what unit tests cannot see. Mutants that they let pass are *survivors*, printed as a diff. The
sample follows from ``--seed`` and ``--count``; what has been judged is kept in a file, so a run can be continued.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCES = Path("src/dprobes")
UNIT = Path("tests/unit")

# The longest prefix of a module's path that stands here names tests that see it, besides its own unit tests.
ALSO: dict[str, list[str]] = {
    "rpn": ["tests/cases", "tests/unit/cli/verbs/test_check.py"],
    "vm": ["tests/cases"],
    "bpf": ["tests/cases"],
    "arch": ["tests/cases", "tests/unit/target"],
    "api": ["tests/integration/test_api_sessions.py"],
    "cli/runfollower": ["tests/integration/test_ends.py", "tests/integration/test_outputs.py"],
    "cli/verbs/run": ["tests/integration/test_ends.py", "tests/integration/test_refusals.py"],
    "engines/ebpf": ["tests/integration/ebpf/test_runs.py", "tests/integration/ebpf/test_control.py"],
    "engines/ebpf/attach": ["tests/integration/ebpf/test_runs.py", "tests/integration/ebpf/test_scopes.py"],
    "engines/ebpf/attach/arrivals": ["tests/integration/ebpf/test_module_watch.py"],
    "engines/ebpf/kernel": ["tests/integration/ebpf/test_bpf_calls.py", "tests/integration/ebpf/test_features.py"],
    "engines/linux": ["tests/integration/ebpf/test_bpf_calls.py", "tests/integration/test_points.py"],
    "engines/ptrace": ["tests/integration/test_points.py", "tests/integration/test_control.py"],
    "engines/ptrace/tracer/detachment": ["tests/integration/test_ways_out.py"],
    "engines/ptrace/tracer/slotmemory": ["tests/integration/test_slots.py"],
    "engines/ptrace/tracer/timedwaits": ["tests/integration/test_waits.py"],
    "engines/x86": ["tests/integration/test_points.py"],
    "manager": ["tests/integration/manager/test_verbs.py", "tests/integration/manager/test_states.py"],
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed place: the source of its module without and with the change."""

    module: Path
    line: int
    what: str
    before: str
    after: str

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.module}\0{self.before}\0{self.after}".encode()).hexdigest()[:16]

    def diff(self) -> str:
        """Return the lines that are changed."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Iterate over what a node may become."""
    match node:
        case ast.Compare(ops=[operation]) if type(operation) in COMPARISONS:
            yield "comparison", _with(node, ops=[COMPARISONS[type(operation)]()])
        case ast.BoolOp(op=operation):
            yield "boolean", _with(node, op=ast.Or() if isinstance(operation, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", operand
        case ast.BinOp(op=operation) if type(operation) in OPERATIONS:
            yield "arithmetic", _with(node, op=OPERATIONS[type(operation)]())
        case ast.Constant(value=bool() as value):
            yield "constant", _with(node, value=not value)
        case ast.Constant(value=int() as value):
            yield "constant", _with(node, value=value + 1)
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign():
            yield "statement", ast.Pass()


def _with(node: ast.AST, **changes: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def mutable_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Iterate over the nodes in functions: what stands at the top of a module or class are mostly names and tables."""
    # Python 3.11 does not know where the parts of an f-string are.
    seen = {id(node) for string in ast.walk(tree) if isinstance(string, ast.JoinedStr) for node in ast.walk(string)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    if id(node) not in seen:
                        seen.add(id(node))
                        yield node


def mutants_of(module: Path) -> Iterator[Mutant]:
    """Iterate over the mutants of a module."""
    before = (ROOT / module).read_text()
    lines = before.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    for node in mutable_nodes(ast.parse(before)):
        for what, new in variants(node):
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(new) if isinstance(new, ast.Pass) else f"({ast.unparse(new)})"
            after = (before.encode()[:begin] + text.encode() + before.encode()[end:]).decode()
            yield Mutant(module, node.lineno, what, before, after)


def sample(seed: int, count: int, only: str) -> list[Mutant]:
    """Choose mutants: the same for the same sources and seed."""
    modules = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*.py"))
    mutants = [
        mutant
        for module in modules
        if str(module.relative_to(SOURCES)).startswith(only)
        for mutant in mutants_of(module)
    ]
    return random.Random(seed).sample(mutants, min(count, len(mutants)))  # noqa: S311 - no secret


def tests_of(module: Path) -> list[str]:
    """Return the tests that are to notice a change in a module: its own first, then those of its package and ALSO."""
    relative = module.relative_to(SOURCES)
    directory = ROOT / UNIT / relative.parent
    own = sorted(str(path.relative_to(ROOT)) for path in directory.glob(f"test_{relative.stem}*.py"))
    near = [str(directory.relative_to(ROOT))] if directory != ROOT / UNIT and directory.is_dir() else []
    name = relative.with_suffix("").as_posix()
    prefixes = [prefix for prefix in ALSO if name == prefix or name.startswith(f"{prefix}/")]
    return [*own, *near, *(ALSO[max(prefixes, key=len)] if prefixes else [])]


class Copy:
    """A copy of the checkout in which mutants are tested, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "tree"
        ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, self.root, ignore=ignored)
        self._environment = os.environ | {
            "PYTHONPATH": str(self.root / "src"),  # before the checkout that is installed
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        }

    def passes(self, tests: list[str], limit: float) -> bool | None:
        """Return whether tests pass; None if they take too long, which also is a way to notice."""
        command = [sys.executable, "-m", "pytest", "-qx", "-m", "not torture", "-p", "no:cacheprovider", *tests]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(limit) == 0
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def judge(self, mutant: Mutant, tests: list[str], limit: float) -> str:
        """Return whether the tests notice a mutant, and how."""
        path = self.root / mutant.module
        original = path.read_bytes()
        path.write_text(mutant.after)
        try:
            for test in tests:
                match self.passes([test], limit):
                    case False:
                        return "killed"
                    case None:
                        return "timeout"
        finally:
            path.write_bytes(original)
        return "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description="Change single places of the sources; list changes no test notices.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each file or directory of tests")
    parser.add_argument("--only", default="", metavar="PATH", help="only modules whose path in the package begins so")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants.json", help="what has been judged already")
    options = parser.parse_args()
    results: dict[str, str] = json.loads(options.results.read_text()) if options.results.exists() else {}
    survivors = []
    with tempfile.TemporaryDirectory(prefix="dprobes-mutants-") as directory:
        tree = Copy(Path(directory))
        chosen = sample(options.seed, options.count, options.only)
        for mutant in chosen:
            if mutant.key not in results:
                results[mutant.key] = tree.judge(mutant, tests_of(mutant.module), options.limit)
                options.results.write_text(json.dumps(results, indent=0, sort_keys=True))
                print(f"{results[mutant.key]:8}  {mutant.module}:{mutant.line}  {mutant.what}", flush=True)
            if results[mutant.key] == "survived":
                survivors.append(mutant)
    for mutant in survivors:
        print(f"\n{mutant.module}:{mutant.line}: {mutant.what}\n{mutant.diff()}")
    print(f"\n{len(survivors)} of {len(chosen)} mutants survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
