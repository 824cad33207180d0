"""
Change single places of the sources, one at a time, and list the changes that no test detects.

A *mutant* is a copy of the tree with one comparison, boolean, arithmetic operation or constant replaced, or one
statement removed. Tests run on it in a copy of the checkout, in two rounds. The first round has the tests of
``tests/unit`` that mirror the module or import it. The second round, for mutants that pass the first one, has the tests
of the mirrored package and those that ``ALSO`` names for effects that unit tests do not detect. A test that also fails
without the change is ignored.

Mutants that pass all tests are *survivors*. They are printed as a diff, unless ``mutants.toml`` explains why the change
makes no difference that a test should detect. The sample depends on ``--seed`` and on the changed lines and the changes
in them, so edits elsewhere do not change it. Results are stored in a file, so a run can be continued.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import heapq
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCES = Path("src/dprobes")
UNIT = Path("tests/unit")

EXPLAINED = Path(__file__).with_name("mutants.toml")

TEST_LIMIT = 60
"""Seconds after which a test counts as failed: some mutants never end."""

NO_TESTS = 5
"""Exit status of pytest if all tests were deselected."""

# The longest prefix of a module's path that stands here names tests that see it, besides its own unit tests.
ALSO: dict[str, list[str]] = {
    "rpn": ["tests/cases"],
    "vm": ["tests/cases"],
    "__main__": ["tests/integration/test_ends.py", "tests/integration/test_early_interrupts.py"],
    "bpf": ["tests/cases"],
    "bpf/lower/hits/hit_epilogue": ["tests/cases", "tests/integration/ebpf/test_runs.py"],
    "bpf/lower/hosts/hit_thread": ["tests/integration/ebpf/test_scopes.py", "tests/integration/ebpf/test_scope.py"],
    "bpf/lower/hits/hit_prologue": [
        "tests/cases",
        "tests/integration/ebpf/test_scopes.py",
        "tests/integration/ebpf/test_replacing.py",
        "tests/integration/ebpf/test_switchover_handlers.py",
    ],
    "bpf/lower/hosts/vma_lookup": ["tests/cases", "tests/integration/ebpf/test_samplers.py"],
    "arch": ["tests/cases", "tests/unit/target"],
    "api": ["tests/integration/test_api_sessions.py"],
    "cli": ["tests/integration/test_outputs.py", "tests/integration/test_refusals.py"],
    "cli/completions": ["tests/integration/test_completion.py"],
    "cli/verbs/insert": ["tests/integration/test_outputs.py", "tests/integration/manager/test_verbs.py"],
    "cli/output": ["tests/integration/test_outputs.py", "tests/integration/test_views.py"],
    "cli/output/record_printer": ["tests/integration/test_trace_files.py"],
    "cli/runs/run_follower": ["tests/integration/test_ends.py", "tests/integration/test_announcements.py"],
    "cli/runs/run_execution": [
        "tests/integration/test_ends.py",
        "tests/integration/test_refusals.py",
        "tests/integration/test_templates.py",
    ],
    "engines/engine_choice": ["tests/unit/cli/test_verbs.py"],
    "engines/command_launcher": ["tests/integration/test_refusals.py", "tests/integration/test_points.py"],
    "engines/refusals": ["tests/integration/test_refusals.py"],
    "platform/core": ["tests/integration/test_coredump.py"],
    "engines/gdb": ["tests/integration/gdb/test_cores_behind_stubs.py"],
    "engines/hits": ["tests/integration/test_counts.py", "tests/integration/test_points.py"],
    "engines/replay": ["tests/integration/test_replay.py"],
    "engines/ebpf": ["tests/integration/ebpf/test_runs.py", "tests/integration/ebpf/test_control.py"],
    "engines/ebpf/attach": ["tests/integration/ebpf/test_runs.py", "tests/integration/ebpf/test_scopes.py"],
    "engines/ebpf/attach/code_mappers": ["tests/integration/ebpf/test_conflicts.py"],
    "engines/ebpf/attach/handler_objects": [
        "tests/integration/ebpf/test_code_reads.py",
        "tests/integration/ebpf/test_doctor.py",
    ],
    "engines/ebpf/attach/module_watch": ["tests/integration/ebpf/test_module_watch.py"],
    "engines/ebpf/attach/file_search": ["tests/integration/ebpf/test_files.py"],
    "engines/ebpf/attach/perf_probes": ["tests/integration/ebpf/test_samplers.py"],
    "engines/ebpf/ebpf_doctor": ["tests/integration/ebpf/test_doctor.py"],
    "engines/ebpf/kernel": ["tests/integration/ebpf/test_bpf_calls.py", "tests/integration/ebpf/test_features.py"],
    "platform/linux": ["tests/integration/ebpf/test_bpf_calls.py", "tests/integration/test_points.py"],
    "engines/ptrace": ["tests/integration/test_points.py", "tests/integration/test_control.py"],
    "engines/ptrace/client/tracer_link": [
        "tests/integration/test_points.py",
        "tests/integration/test_death_of_the_tracer.py",
    ],
    "engines/ptrace/tracer/detachment": ["tests/integration/test_ways_out.py", "tests/integration/test_coredump.py"],
    "engines/ptrace/tracer/hit_handling": ["tests/integration/test_points.py", "tests/integration/test_signals.py"],
    "engines/ptrace/tracer/module_breakpoints": [
        "tests/integration/test_points.py",
        "tests/integration/test_odd_code.py",
    ],
    "engines/ptrace/tracer/probe_removal": ["tests/integration/test_slots.py", "tests/integration/test_control.py"],
    "engines/ptrace/tracer/single_steps": ["tests/integration/test_slots.py"],
    "engines/ptrace/tracer/hit_counter": ["tests/integration/test_signals.py", "tests/integration/test_control.py"],
    "engines/ptrace/tracer/program_insertion": ["tests/integration/test_replacing.py"],
    "engines/ptrace/tracer/interrupted_calls": ["tests/integration/test_waits.py"],
    "engines/ptrace/tracer/thread_watchpoints": ["tests/integration/test_watchpoints.py"],
    "platform/x86": ["tests/integration/test_points.py"],
    "formatters": ["tests/integration/test_templates.py"],
    "preprocessor": ["tests/cases/diagnostics"],
    "resolve": ["tests/integration/test_compiled_programs.py", "tests/integration/test_points.py"],
    "sinks": ["tests/integration/test_structured_targets.py", "tests/integration/sinks/test_live.py"],
    "fake_context": ["tests/unit/test_testing.py", "tests/cases/flow"],
    "tables": ["tests/integration/sinks/test_parquet.py"],
    "target": ["tests/integration/test_points.py", "tests/integration/test_returns.py"],
    "trace": ["tests/integration/test_trace_files.py"],
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
    """One changed place: ``text`` replaces the bytes from ``begin`` to ``end``, exclusive, of the module."""

    module: Path
    line: int
    what: str
    before: str
    begin: int
    end: int
    text: str

    @property
    def after(self) -> str:
        """The source of the module with the change."""
        before = self.before.encode()
        return (before[: self.begin] + self.text.encode() + before[self.end :]).decode()

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.module}\0{self.before}\0{self.after}".encode()).hexdigest()[:16]

    def rank(self, seed: int) -> bytes:
        """Return a random number that depends on the changed line, but not on the rest of the module."""
        before = self.before.encode()
        line = before[before.rfind(b"\n", 0, self.begin) + 1 : self.end]
        return hashlib.sha256(f"{seed}\0{self.module}\0{self.text}\0".encode() + line).digest()

    def lines(self) -> tuple[str, str]:
        """Return the changed lines, without and with the change, each without blanks around it."""
        changed = list(difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0))[2:]
        old, new = ("\n".join(line[1:].strip() for line in changed if line.startswith(sign)) for sign in ("-", "+"))
        return old, new


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Iterate over the replacements of a node, each with a description."""
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
    """Iterate over the nodes in functions; at the top of a module or class there are mostly names and tables."""
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
            yield Mutant(module, node.lineno, what, before, begin, end, text)


def sample(seed: int, count: int, only: str) -> list[Mutant]:
    """Choose mutants, those of a module one after the other."""
    modules = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*.py"))
    mutants = (
        mutant
        for module in modules
        if str(module.relative_to(SOURCES)).startswith(only)
        for mutant in mutants_of(module)
    )
    chosen = heapq.nsmallest(count, mutants, key=lambda mutant: mutant.rank(seed))
    return sorted(chosen, key=lambda mutant: (mutant.module, mutant.begin, mutant.text))


def explanations() -> dict[tuple[str, str, str], str]:
    """Return the explanations of survivors, by their module and changed lines."""
    entries = tomllib.loads(EXPLAINED.read_text())["mutant"]
    return {(each["module"], each["before"], each["after"]): each["because"] for each in entries}


def rounds_of(root: Path, module: Path) -> tuple[list[str], list[str]]:
    """Return the tests of the first round and those of the second round for a module."""
    relative = module.relative_to(SOURCES)
    directory = root / UNIT / relative.parent
    own = sorted(directory.glob(f"test_{relative.stem}*.py"))
    package, _, name = _dotted(module).rpartition(".")
    imported = re.compile(
        rf"from {re.escape(package)}\.{name}(\.\w+)* import |from {re.escape(package)} import (\w+, )*{name}\b"
    )
    importing = sorted(
        path for path in (root / UNIT).rglob("test_*.py") if path not in own and imported.search(path.read_text())
    )
    near = sorted(directory.glob("test_*.py")) if directory != root / UNIT else []
    tests = [str(path.relative_to(root)) for path in (*own, *importing, *near)]
    first = tests[: len(own) + len(importing)]
    where = relative.with_suffix("").as_posix()
    prefixes = [prefix for prefix in ALSO if where == prefix or where.startswith(f"{prefix}/")]
    also = ALSO[max(prefixes, key=len)] if prefixes else []
    return first, [test for test in dict.fromkeys((*tests, *also)) if test not in first]


def _dotted(module: Path) -> str:
    return ".".join(module.relative_to(SOURCES.parent).with_suffix("").parts).removesuffix(".__init__")


class Copy:
    """A copy of the checkout in which mutants are tested, one after the other."""

    def __init__(self, directory: Path, limit: float) -> None:
        self.root = directory / "tree"
        ignored = shutil.ignore_patterns(".venv", ".git", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, self.root, ignore=ignored)
        self._limit = limit
        self._output = directory / "output"
        self._times = int(time.time())
        self._sound: dict[str, bool] = {}
        """Cached results of tests without any change: True if they pass."""
        self._environment = os.environ | {
            "PYTHONPATH": str(self.root / "src"),  # before the checkout that is installed
            "PYTHONHASHSEED": "0",
        }
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)  # commands that tests start would compile all modules

    def _failing(self, tests: list[str], *, without_slow: bool) -> list[str] | None:
        """Return the first test that fails; all tests if none could run, [] if they take too long, None if all pass."""
        chosen = ["-m", "not torture and not slow" if without_slow else "not torture", f"--timeout={TEST_LIMIT}"]
        chosen += [f"--deselect={test}" for test, is_sound in self._sound.items() if not is_sound]
        command = [sys.executable, "-m", "pytest", "-qx", "-rfE", "-p", "no:cacheprovider", *chosen, *tests]
        with (
            self._output.open("w") as output,
            subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):
            try:
                if process.wait(self._limit) in (0, NO_TESTS):
                    return None
            except subprocess.TimeoutExpired:
                return []
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        said = self._output.read_text(errors="replace")
        found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.MULTILINE)
        return found[:1] or tests

    def judge(self, mutant: Mutant, tests: list[str], *, without_slow: bool = False) -> str:
        """Return the outcome of tests on a mutant: whether and how they detect it."""
        path = self.root / mutant.module
        while tests:
            status, original = path.stat(), path.read_bytes()
            path.write_text(mutant.after)
            self._times += 1
            os.utime(path, (self._times, self._times))  # byte code is taken for that of a source of the same second
            try:
                failing = self._failing(tests, without_slow=without_slow)
            finally:
                path.write_bytes(original)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            if failing is None:
                break
            if not failing:
                return "unfinished"
            name = " ".join(failing)
            if name not in self._sound:
                self._sound[name] = self._failing(failing, without_slow=False) is None
            if self._sound[name]:
                return "killed"
            print(f"fails without any change: {name}", flush=True)
            tests = [test for test in tests if test not in failing]
        return "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description="Change single places of the sources; list changes no test notices.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of a mutant in a round")
    parser.add_argument("--only", default="", metavar="PATH", help="only modules whose path in the package begins so")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants.json", help="what has been judged already")
    options = parser.parse_args()
    results: dict[str, str] = json.loads(options.results.read_text()) if options.results.exists() else {}
    explained = explanations()
    chosen = [
        mutant
        for mutant in sample(options.seed, options.count, options.only)
        if (str(mutant.module), *mutant.lines()) not in explained
    ]
    with tempfile.TemporaryDirectory(prefix="dprobes-mutants-") as directory:
        tree = Copy(Path(directory), options.limit)
        for number, passed in enumerate(("passed round 1", "survived")):
            for mutant in chosen:
                if results.get(mutant.key, "") != ("passed round 1" if number else ""):
                    continue
                verdict = tree.judge(mutant, rounds_of(tree.root, mutant.module)[number], without_slow=number > 0)
                results[mutant.key] = passed if verdict == "survived" else verdict
                options.results.write_text(json.dumps(results, indent=0, sort_keys=True))
                print(f"{results[mutant.key]:14}  {mutant.module}:{mutant.line}  {mutant.what}", flush=True)
    left = [mutant for mutant in chosen if results[mutant.key] != "killed"]
    for mutant in left:
        old, new = mutant.lines()
        print(f"\n{mutant.module}:{mutant.line}: {mutant.what}: {results[mutant.key]}\n-{old}\n+{new}")
    print(f"\n{len(left)} of {options.count} mutants were not noticed, {len(explained)} more are explained")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
