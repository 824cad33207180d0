"""
Each row of "I want to add …" in ARCHITECTURE.md, carried out on a copy of the sources: in the files of the row only.

A recipe makes the smallest change that works, and runs what it has made. So a row that forgets a file, or names one
that is not needed, fails here.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    """The files that a row names: those that are always needed, and those after "also", which some cases need."""

    needed: tuple[str, ...]
    further: tuple[str, ...]


def rows() -> dict[str, Row]:
    """Return the rows by their first cells."""
    section = (
        (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## I want to add")[2].partition("\n## ")[0]
    )
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 2 and cells[0] != "…":
            parts = cells[1].partition("; then")[0].partition("; also")[::2]
            found[cells[0]] = Row(*(tuple(re.findall(r"`([\w/.*]+(?:\.py|/))`", part)) for part in parts))
    return found


HEADER = 'name = "libc.so.6"\noffset = malloc\n'
"""A program's header, and that of its probepoint."""

ROWS = rows()
RECIPES: dict[str, Callable[[Copy], None]] = {}


@dataclass
class Copy:
    """A copy of the package, and the files that a recipe has changed or added, relative to it."""

    directory: Path
    changed: set[str] = field(default_factory=set)

    @property
    def package(self) -> Path:
        return self.directory / "src" / "dprobes"

    def insert_after(self, file: str, anchor: str, text: str) -> None:
        """Insert lines after the only line that begins with ``anchor``, blanks apart."""
        path = self.package / file
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.lstrip().startswith(anchor)]
        assert len(places) == 1, f"{file} has {len(places)} lines that begin with {anchor!r}"
        lines.insert(places[0] + 1, text if text.endswith("\n") else text + "\n")
        path.write_text("".join(lines), encoding="utf-8")
        self.changed.add(file)

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace a text that the file has once."""
        path = self.package / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        path.write_text(text.replace(old, new), encoding="utf-8")
        self.changed.add(file)

    def add(self, file: str, text: str) -> None:
        """Add a file."""
        path = self.package / file
        assert not path.exists(), f"{file} is there"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.changed.add(file)

    def write(self, name: str, text: str) -> Path:
        """Write a file of the user's, beside the copy."""
        path = self.directory / name
        path.write_text(text, encoding="utf-8")
        return path

    def python(self, program: str) -> str:
        """Run a program of Python that imports the copy; return what it prints."""
        return self._output("-c", program)

    def dprobes(self, *arguments: str | Path, status: int = 0) -> str:
        """Run the copy's command; return all that it prints."""
        return self._output("-m", "dprobes", *map(str, arguments), status=status)

    def printed(self, source: str) -> str:
        """Return a program in RPN as the copy parses and prints it."""
        return self.python(
            f"""
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.program_text import print_program
from dprobes.source_text import SourceFile
print(print_program(parse_source(SourceFile("p.rpn", {source!r}), Diagnostics())))
"""
        )

    def replayed(self, source: str, *options: str) -> str:
        """Run a program in RPN on a recorded hit; return what is printed."""
        recording = self.write("hits.jsonl", '{"probe": 0, "registers": {"rdi": 4660}, "time": 5}\n')
        return self.dprobes("run", "--engine", f"replay={recording}", *options, self.write("p.rpn", source))

    def _output(self, *arguments: str, status: int = 0) -> str:
        environment = os.environ | {"PYTHONPATH": str(self.directory / "src"), "XDG_CACHE_HOME": str(self.directory)}
        run = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert run.returncode == status, run.stdout
        return run.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    return Copy(tmp_path)


def recipe(row: str) -> Callable[[Callable[[Copy], None]], Callable[[Copy], None]]:
    """Register what carries out a row."""

    def registered(function: Callable[[Copy], None]) -> Callable[[Copy], None]:
        RECIPES[row] = function
        return function

    return registered


@recipe("an instruction")
def add_instruction(copy: Copy) -> None:
    copy.insert_after(
        "rpn/instruction_set.py",
        'Row(0x4B, "ltu"',
        '    Row(0x5B, "leu", "a b -- b<=a", Group.ARITHMETIC, "Push 1 if the top cell is at most the second one."),',
    )
    copy.insert_after(
        "rpn/word_arithmetic.py",
        '"ltu": Comparison(',
        '    "leu": Comparison("<=", is_signed=False, function=operator.le),',
    )
    program = """
from dprobes.testing import run_handler
for pair in ((3, 3), (3, 2), (2, 3)):
    print(run_handler("push %d\\npush %d\\nleu\\nlog b, 1" % pair).log.hex(), end=" ")
"""
    assert copy.python(program) == "01 01 00 "
    copy.replace(
        "bpf/lower/templates/arithmetic_templates.py",
        '_COMPARED = {"==": _equal, "<": _less}',
        """\
def _at_most(w, top, second, *, is_signed):
    result = _less(w, second, top, is_signed=is_signed)
    w.asm.alu(Alu.XOR, result, 1, wide=w.wide)
    return result


_COMPARED = {"==": _equal, "<": _less, "<=": _at_most}""",
    )
    # Handlers in the process are compiled; the cells are known at run time only.
    source = copy.write("p.rpn", HEADER + "push r, arg0\nlog 1\npush 100\npush r, arg0\nleu\nlog 1\nexit\n")
    printed = copy.dprobes("run", "--engine", "inline", "--format", "json", source, "--", "ls", "/")
    data = [bytes.fromhex(found) for found in re.findall('"data": "([0-9a-f]+)"', printed)]
    sizes = [struct.unpack("=QQ", each) for each in data]
    assert {is_small for _, is_small in sizes} == {0, 1}
    assert [(size, is_small) for size, is_small in sizes if is_small != (size <= 100)] == []


@recipe("a header keyword")
def add_keyword(copy: Copy) -> None:
    copy.insert_after(
        "rpn/program_text.py", 'Keyword("id", _F', '    Keyword("ticket", _F, ValueKind.NUMBER, "The ticket.", 0),'
    )
    copy.replace("rpn/rpn_program.py", "    id: int = 0\n", "    id: int = 0\n    ticket: int = 0\n")
    assert "ticket = 0x1267\n" in copy.printed('name = "libc.so.6"\nticket = 4711\noffset = malloc\nexit\n')


@recipe("an old spelling")
def add_alias(copy: Copy) -> None:
    copy.insert_after("rpn/program_text.py", '"max_hits": "maxhits"', '    "hitlimit": "maxhits",')
    assert "maxhits = 5\n" in copy.printed(HEADER + "hitlimit = 5\nexit\n")


@recipe("a static check")
def add_check(copy: Copy) -> None:
    copy.insert_after(
        "rpn/program_checker.py",
        "header.check_selection()",
        """\
        if definition.maxhits == 13:
            diagnostics.error(definition.span("maxhits"), "13 hits are one too many", hint="write 'maxhits = 12'")
""",
    )
    source = copy.write("p.rpn", HEADER + "maxhits = 13\nexit\n")
    assert (
        copy.dprobes("check", source, status=2)
        == f"""\
{source}:3:1: error: 13 hits are one too many
    maxhits = 13
    ^~~~~~~~~~~~
hint: write 'maxhits = 12'
"""
    )


@recipe("a register")
def add_register(copy: Copy) -> None:
    copy.replace("arch/x86_processors.py", '    "sp": "esp",\n}', '    "sp": "esp",\n    "frame": "ebp",\n}')
    program = """
from dprobes.testing import FakeContext, run_handler
print(run_handler("push r, frame\\nlog 1", FakeContext("x86_64", registers={"rbp": 0x1234})).log.hex())
"""
    assert copy.python(program) == "3412000000000000\n"
    copy.dprobes("check", copy.write("p.rpn", HEADER + "push r, frame\nlog 1\nexit\n"))


@recipe("a processor")
def add_processor(copy: Copy) -> None:
    copy.add(
        "arch/loongarch.py",
        '''\
"""LoongArch, 64 bit."""

from dprobes.arch.processor import Architecture, parse_register_table

LOONGARCH64 = Architecture(
    "loongarch64",
    8,
    "little",
    parse_register_table("""
    00 pc       64 yynn
    10 r<0-31>  64 yyyy
"""),
    {f"arg{n}": f"r{n + 4}" for n in range(6)} | {"retval": "r4", "sp": "r3"},
    unprobeable={},
)
''',
    )
    copy.replace("arch/__init__.py", '"riscv64")\n', '"riscv64", "loongarch64")\n')
    copy.insert_after(
        "arch/__init__.py",
        "return non_x86_processors.RISCV64",
        """\
        case "loongarch64":
            from dprobes.arch import loongarch

            return loongarch.LOONGARCH64
""",
    )
    program = """
from dprobes.testing import FakeContext, run_handler
print(run_handler("push r, arg1\\nlog 1", FakeContext("loongarch64", registers={"r5": 0x1234})).log.hex())
"""
    assert copy.python(program) == "3412000000000000\n"


@recipe("an extension")
def add_extension(copy: Copy) -> None:
    package = copy.directory / "src" / "twice-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 1.0\n", encoding="utf-8")
    (package / "entry_points.txt").write_text("[dprobes.extensions]\ntwice = twice:twice\n", encoding="utf-8")
    copy.write(
        "src/twice.py",
        """
from dprobes.extensions import Extension, View

def interpret(view: View) -> None:
    view.push(2 * view.pop())

twice = Extension(interpret=interpret)
""",
    )
    assert "  2a 00" in copy.replayed(HEADER + "push 21\ncallk twice\nlog 1\nexit\n")


@recipe("a formatter")
def add_formatter(copy: Copy) -> None:
    copy.replace("formatters/__init__.py", '"json", "csv")\n', '"json", "csv", "codes")\n')
    copy.insert_after(
        "formatters/__init__.py",
        "match name:",
        """\
        case "codes":
            from dprobes.formatters.code_formatter import CodeFormatter

            return CodeFormatter(wall_offset)
""",
    )
    copy.add(
        "formatters/code_formatter.py",
        '''\
"""The codes of records alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.record.log_record import decode_record

if TYPE_CHECKING:
    from dprobes.formatters import Place
    from dprobes.record.log_record import LogRecord


class CodeFormatter:
    """Text of records that has their codes alone."""

    heading = ""

    def __init__(self, wall_offset: int) -> None:
        self.wall_offset = wall_offset

    def __call__(self, record: LogRecord, place: Place) -> str:
        return f"{record.major}/{record.minor}"

    def encoded(self, record: bytes, place: Place) -> str:
        return self(decode_record(record), place)
''',
    )
    source = 'name = "libc.so.6"\nmajor = 7\noffset = malloc\nminor = 4\nexit\n'
    assert "7/4\n" in copy.replayed(source, "--format", "codes")


@recipe("a log target")
def add_log_target(copy: Copy) -> None:
    copy.insert_after(
        "sinks/target_kinds.py",
        "KINDS = (",
        '    SinkKind("tally", "tally:FILE", "counts", "dprobes.sinks.local.tally_target", takes_path=True),',
    )
    copy.add(
        "sinks/local/tally_target.py",
        '''\
"""A file with the number of records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks import Batch, SinkOptions


def open(argument: str, options: SinkOptions) -> Tally:
    """Open the file."""
    return Tally(Path(argument))


class Tally:
    """Number of the records that came."""

    def __init__(self, path: Path) -> None:
        self._path, self._count = path, 0

    def create_event(self, source: RecordSource) -> None:
        """Do nothing: programs are not told apart."""

    def log_events(self, batch: Batch) -> None:
        """Count records."""
        self._count += len(batch.records)

    def destroy_event(self, source: RecordSource) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Write the number."""
        self._path.write_text(str(self._count), encoding="utf-8")

    def close(self) -> None:
        """Write the number for the last time."""
        self.flush()
''',
    )
    assert "tally:FILE" in copy.dprobes("log-target", "kinds")
    copy.replayed(HEADER + "exit\n", "--log-target", "tally:count")
    assert (copy.directory / "count").read_text(encoding="utf-8") == "1"


@recipe("a verb")
def add_verb(copy: Copy) -> None:
    copy.insert_after("cli/command_group.py", "VERBS = {", '    "greet": "Greet somebody.",')
    copy.add(
        "cli/verbs/greet.py",
        '''\
"""The verb ``greet``."""

from __future__ import annotations

import click

from dprobes.cli.console import print_line


@click.command("greet")
@click.argument("name")
def greet_command(name: str) -> int:
    """Greet NAME."""
    print_line(f"good morning, {name}")
    return 0
''',
    )
    assert copy.dprobes("greet", "Ada") == "good morning, Ada\n"
    assert "Greet somebody." in copy.dprobes("--help")


@recipe("a conversion of templates")
def add_conversion(copy: Copy) -> None:
    copy.insert_after("formatters/templates/template_model.py", 'NETWORK = "I"', '    TRUTH = "B"')
    copy.replace("formatters/templates/template_lines.py", 'hevkTEUI"', 'hevkTEUIB"')
    copy.insert_after(
        "formatters/templates/template_renderer.py",
        "case Conversion.POINTER:",
        """\
            return f"{number:#x}"
        case Conversion.TRUTH:
            return "true" if number else "false"
        case Conversion.POINTER:
""",
    )
    copy.insert_after(
        "formatters/templates/data_extraction.py",
        "Conversion.NETWORK: (FieldKind",
        "    Conversion.TRUTH: (FieldKind.UNSIGNED, 10),",
    )
    copy.write("templates.lst", "0 codes.fmt\n")
    copy.write("codes.fmt", 'major = 0\nminor = 0\nfmt = "known %B, old %B"\n')
    printed = copy.replayed(HEADER + "push 1\npush 0\nlog 2\nexit\n", "--templates", str(copy.directory))
    assert "known true, old false" in printed or "known false, old true" in printed


@recipe("an item that conditions name")
def add_item(copy: Copy) -> None:
    copy.replace("trace/record_columns.py", '"symbol", "function")\n', '"symbol", "function", "place")\n')
    copy.insert_after(
        "trace/record_columns.py",
        'case "module":',
        """\
                return escaped(program.source.module)
            case "place":
                return escaped(f"{program.source.module} on {program.origin.host}")
            case "module":
""",
    )
    copy.replayed(HEADER + "exit\n", "-o", "one.dpt")
    assert copy.dprobes("log", "one.dpt", "--total", "--filter", 'place startswith "libc.so.6 on "') == "1\n"
    assert copy.dprobes("log", "one.dpt", "--total", "--filter", 'place startswith "libm.so.6 on "') == "0\n"


@recipe("a kind of frame in trace files")
def add_frame(copy: Copy) -> None:
    copy.insert_after("trace/trace_frames.py", "TABLES = 9", "    REMARK = 10")
    copy.insert_after(
        "trace/trace_writer.py",
        "def place_frames(self)",
        '        yield json_frame(FrameKind.REMARK, {"text": "as agreed"})',
    )
    copy.insert_after(
        "trace/trace_reader.py",
        "match frame.kind:",
        """\
                case FrameKind.REMARK:
                    print("remark:", split_json(frame, self.name)["text"])
""",
    )
    copy.replayed(HEADER + "exit\n", "-o", "one.dpt")
    assert "remark: as agreed\n" in copy.dprobes("log", "one.dpt")


@recipe("a function of DProbes C")
def add_function(copy: Copy) -> None:
    copy.insert_after("dpc/typers/provided_names.py", '"startswith": "takes', '    "twice": "takes a number",')
    copy.insert_after("dpc/typers/provided_names.py", '"startswith": \'startswith', '    "twice": "twice(x)",')
    copy.insert_after(
        "dpc/typers/call_typer.py",
        "match call.function, call.arguments:",
        """\
            case "twice", [number]:
                value = self._values.value(number)
                return self._values.operators.binary("+", value, value, call.span)
""",
    )
    recording = copy.write("hits.jsonl", '{"probe": 0, "registers": {"rdi": 4660}, "time": 5}\n')
    program = 'libc.so.6:malloc(size) { printf("%d", twice(size)) }'
    assert "9320" in copy.dprobes("run", "--engine", f"replay={recording}", "-e", program)
    assert "error: 'twice' takes a number" in copy.dprobes(
        "check", "-e", "libc.so.6:malloc { long x = twice(); }", status=2
    )


@recipe("an aggregation")
def add_aggregation(copy: Copy) -> None:
    copy.insert_after("rpn/keyed_tables.py", 'LAST = "last"', '    RANGE = "range"')
    copy.replace(
        "rpn/keyed_tables.py",
        "            case TableKind.AVG:\n",
        "            case TableKind.AVG | TableKind.RANGE:\n",
    )
    layout = "keyed/table_layout.py"
    copy.replace(
        layout, "case TableKind.SUM | TableKind.MIN |", "case TableKind.RANGE | TableKind.SUM | TableKind.MIN |"
    )
    copy.replace(
        layout,
        "        case TableKind.SUM:\n            yield",
        """\
        case TableKind.RANGE:
            yield 0, Change.GREATEST, BIAS - 1 - value
            yield 1, Change.GREATEST, BIAS + value
        case TableKind.SUM:
            yield""",
    )
    merged = " case TableKind.MIN | TableKind.MAX:\n            return False"
    copy.replace(layout, merged, merged.replace("TableKind.MAX", "TableKind.MAX | TableKind.RANGE"))
    copy.replace(
        layout,
        "        case TableKind.MIN:\n            return",
        """\
        case TableKind.RANGE:
            return cells[0] + cells[1] + 1 & _MASK
        case TableKind.MIN:
            return""",
    )
    # What mypy finds then: each shows one number, and takes it in as others do.
    for file, old in (
        ("keyed/table_entries.py", "case TableKind.SUM |"),
        ("keyed/table_text.py", "case TableKind.SUM |"),
        ("keyed/table_text.py", "case TableKind.COUNT | TableKind.SUM |"),
        ("keyed/prometheus_text.py", "case TableKind.SUM |"),
        ("sinks/otlp/otlp_messages.py", "case TableKind.MIN |"),
    ):
        copy.replace(file, f" {old}", f" {old} TableKind.RANGE |")
    templates = "bpf/lower/templates/table_templates.py"
    copy.insert_after(templates, "_GREATEST = {", "    TableKind.RANGE: ((0, _LEAST), (1, _LARGEST)),")
    copy.replace(
        templates,
        "case TableKind.MIN | TableKind.MAX:\n            pass",
        "case TableKind.MIN | TableKind.MAX | TableKind.RANGE:\n            pass",
    )
    copy.replace(
        templates,
        "        case TableKind.AVG:\n",
        """\
        case TableKind.RANGE:
            asm.load(_R.R2, _R.R0, _offset(table, 1))
            asm.alu(Alu.ADD, _R.R1, _R.R2)
            asm.alu(Alu.ADD, _R.R1, 1)
        case TableKind.AVG:
""",
    )
    copy.replace("dpc/typers/provided_names.py", '"hist": 1, "lhist"', '"range": 1, "hist": 1, "lhist"')
    copy.replace("dpc/typers/provided_names.py", '"stats", "hist", "last")', '"stats", "range", "hist", "last")')
    recording = copy.write("hits.jsonl", "".join(f'{{"probe": 0, "registers": {{"rdi": {n}}}}}\n' for n in (50, 8, 20)))
    program = "libc.so.6:malloc(size) { @sizes = range(size) }"
    assert "42" in copy.dprobes("run", "--engine", f"replay={recording}", "-e", program)
    copy.dprobes("show", "--bpf", "-e", program)
    exposition = """
from dprobes.keyed.prometheus_text import exposition
from dprobes.keyed.table_layout import TableContents, TableRow, changed
from dprobes.rpn.keyed_tables import Table, TableKind
table, cells = Table("sizes", TableKind.RANGE, ()), (0, 0)
for number in (50, 8, 20):
    cells = changed(table, cells, number)
print(exposition([TableContents(table, (TableRow(b"", tuple(cells)),))]))
"""
    assert "dprobes_sizes 42\n" in copy.python(exposition)


@recipe("an instruction that the ptrace engine emulates")
def add_emulation(copy: Copy) -> None:
    file = "platform/x86/instruction_emulation.py"
    copy.insert_after(file, "BRANCH_ZERO = 18", '    """As described."""\n    COMPLEMENT_CARRY = 19')
    copy.insert_after(
        file,
        "Action.BRANCH_ZERO: _branch_zero,",
        """\
    Action.COMPLEMENT_CARRY: lambda emulation, registers, memory: _complement_carry(emulation, registers, memory),
""",
    )
    copy.insert_after(
        file,
        'return (Action.PUSH_FLAGS, length, 2 if b"\\x66"',
        """\
    if raw == b"\\xf5":
        return (Action.COMPLEMENT_CARRY, length)
""",
    )
    copy.replace(
        file,
        "class MemoryMove(NamedTuple):",
        """\
def _complement_carry(emulation, registers, memory):
    registers[_EFLAGS] ^= _CARRY
    return _skip(emulation, registers, memory)


class MemoryMove(NamedTuple):""",
    )
    program = """
import ctypes
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.instruction_emulation import emulate, plan
registers = (ctypes.c_ulong * 27)()
for _ in range(3):
    assert emulate(plan(b"\\xf5", 8), registers, None)
print(registers[Register.RIP], registers[Register.EFLAGS])
"""
    assert copy.python(program) == "3 1\n"


@recipe("a section of compiled programs")
def add_section(copy: Copy) -> None:
    copy.replace("ppdf/ppdf_sections.py", "MAJOR, MINOR = 1, 3\n", "MAJOR, MINOR = 1, 4\n")
    copy.insert_after("ppdf/ppdf_model.py", "blocks: ToolProgram | None = None", '    remark: str = "as agreed"')
    file = "ppdf/ppdf_file.py"
    copy.replace(
        file, "    sections = {\n", "    remark = Writer(strings)\n    remark.string(ppdf.remark)\n    sections = {\n"
    )
    copy.insert_after(file, '"TOOL": blocks.data,', '        "RMRK": remark.data,')
    copy.insert_after(file, '"TOOL": "blocks of the tool",', '    "RMRK": "a remark",')
    copy.replace(file, '"COMP": 3, "TOOL": 3}', '"COMP": 3, "TOOL": 3, "RMRK": 4}')
    copy.replace(
        file,
        "        companions,\n        blocks,\n",
        """\
        companions,
        blocks,
        _reader(sections, "RMRK", strings).string("a remark") if "RMRK" in expected else "",
""",
    )
    source = copy.write("p.rpn", HEADER + "exit\n")
    copy.dprobes("build", source, "-o", "p.ppdf")
    program = """
from pathlib import Path
from dprobes.ppdf.ppdf_file import decode
print(decode(Path("p.ppdf").read_bytes()).remark)
"""
    assert copy.python(program) == "as agreed\n"


@recipe("a language of the target")
def add_language(copy: Copy) -> None:
    file = "target/readable_names.py"
    copy.replace(file, '_MANGLED = ("_Z", "_R")', '_MANGLED = ("_Z", "_R", "_D")')
    copy.replace(file, 'symbol.startswith(("_Z", "_R"))', "symbol.startswith(_MANGLED)")
    copy.insert_after(
        file,
        "if (rust := rust_name(symbol)) is not None:",
        """\
            return rust
        if symbol.startswith("_D"):
            return ".".join(re.findall(r"\\d([A-Za-z]+)", symbol))
        if rust is not None:
""",
    )
    program = """
from dprobes.target.readable_names import Demangler, find_readable
print(Demangler().name_of("_D3app3run"), [found.linker_name for found in find_readable(["_D3app3run"], "app.run")])
"""
    assert copy.python(program) == "app.run ['_D3app3run']\n"


@recipe("an option of run")
def add_option(copy: Copy) -> None:
    copy.insert_after(
        "cli/verbs/run.py",
        '@click.option("--allow-self"',
        '@click.option("--remark", metavar="TEXT", help="Print a text first.")',
    )
    copy.insert_after("cli/runs/run_execution.py", "allow_self: bool = False", "    remark: str | None = None")
    copy.insert_after(
        "cli/runs/run_execution.py",
        "given, scope = self._given, self._asked",
        """\
        if given.remark is not None:
            print(given.remark)
""",
    )
    assert copy.replayed(HEADER + "exit\n", "--remark", "here we go").startswith("here we go\n")


@recipe("an engine")
def add_engine(copy: Copy) -> None:
    copy.add("engines/tally/__init__.py", '''"""An engine that only counts."""\n''')
    copy.add(
        "engines/tally/tally_engine.py",
        '''\
"""The engine: the hits of a program are lines of a file, with the places that were hit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Attachment, Begun, Counts, Engine, Finished, StateEvent
from dprobes.resolve.probepoints import ProbeState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.engine_interface import Change, Event, Job, Plan, Scope
    from dprobes.engines.engine_interface import EngineOptions


class TallyEngine(Engine):
    """Counts of lines in the file that the endpoint names."""

    name = "tally"

    def __init__(self, options: EngineOptions, scope: Scope) -> None:
        self._path = Path(scope.endpoint or "")

    def attach(self, plan: Plan) -> Tally:
        """Read the file."""
        return Tally(plan.job, self._path.read_text(encoding="utf-8").split())


class Tally(Attachment):
    """Hits that were counted already."""

    probes = left_out = ()

    def __init__(self, job: Job, hits: Sequence[str]) -> None:
        assert job.resolved is not None
        self.probes = job.resolved.probepoints
        self._counts = tuple(Counts(hits=hits.count(probe.where)) for probe in self.probes)

    def poll(self) -> Iterator[Event]:
        """Report the counts."""
        yield StateEvent(tuple(range(len(self.probes))), 0, ProbeState.ACTIVE)
        yield Begun()
        yield Finished(self.counts())

    def close(self) -> None:
        """Do nothing."""

    def change(self, changes: Sequence[Change]) -> None:
        """Do nothing: no hit is to come."""

    def counts(self) -> tuple[Counts, ...]:
        """Return what the file has."""
        return tuple(map(replace, self._counts))

    def local_variables(self) -> list[int]:
        """Return nothing: no handler runs."""
        return []

    def cpu_variables(self) -> list[list[int]]:
        """Return nothing: no handler runs."""
        return []
''',
    )
    copy.insert_after(
        "engines/engine_registry.py",
        "_ROWS = (_PTRACE",
        """\
_TALLY = EngineRow(
    name="tally",
    factory="dprobes.engines.tally.tally_engine:TallyEngine",
    scopes=frozenset({ScopeKind.ENDPOINT}),
    capabilities=_INTERPRETED,
    argument="FILE",
    is_managed=False,
    summary="counts the places that FILE lists",
)
_ROWS = (*_ROWS, _TALLY)
""",
    )
    hits = copy.write("hits", "malloc free malloc malloc\n")
    source = copy.write("p.rpn", HEADER + "exit\n")
    lines = copy.dprobes("run", "--engine", f"tally={hits}", source).splitlines()
    assert any(line.split()[:4] == ["0,0", "malloc", "3", "0"] for line in lines)


@recipe("a verb of the manager")
def add_manager_verb(copy: Copy) -> None:
    file = "manager/manager_messages.py"
    copy.insert_after(file, "VERBS: ", '    "greet": GreetArguments,')
    copy.replace(
        file,
        "@dataclass(frozen=True, slots=True)\nclass NoArguments:",
        """\
@dataclass(frozen=True, slots=True)
class GreetArguments:
    name: str


@dataclass(frozen=True, slots=True)
class NoArguments:""",
    )
    file = "manager/probe_manager.py"
    copy.replace(file, "    StopArguments,\n", "    StopArguments,\n    GreetArguments,\n")
    copy.insert_after(
        file,
        "case StopArguments() as given:",
        """\
                return encode(self._stop(given))
            case GreetArguments() as given:
                return {"text": f"good morning, {given.name}"}
            case StopArguments() as given:
""",
    )
    program = """
from pathlib import Path
from dprobes.manager.probe_manager import Manager
with Manager(Path("trace.dpt")) as manager:
    print(manager.answer("greet", {"name": "Ada"}, print))
"""
    assert copy.python(program) == "{'text': 'good morning, Ada'}\n"


def test_every_row_has_a_recipe() -> None:
    assert set(RECIPES) == set(ROWS)


def _is_of(file: str, named: str) -> bool:
    """Return whether a file is what a row names: a file, files by a pattern, or a new one in a directory."""
    if named.endswith("/"):
        return file.startswith(named) and not (ROOT / "src" / "dprobes" / file).exists()
    return fnmatch.fnmatch(file, named)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_in_the_files_of_its_row(name: str, copy: Copy) -> None:
    RECIPES[name](copy)
    row = ROWS[name]
    assert [file for file in copy.changed if not any(_is_of(file, each) for each in row.needed + row.further)] == []
    assert [each for each in row.needed if not any(_is_of(file, each) for file in copy.changed)] == []
