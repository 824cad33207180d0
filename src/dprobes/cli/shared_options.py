"""Options that several verbs share; ``option_values`` evaluates them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import click

from dprobes.cli.option_values import SUFFIXES, note_groups, note_word, seconds_of
from dprobes.engines.overload_guard import DEFAULT_OVERHEAD, overhead_of
from dprobes.errors import EngineError
from dprobes.record.log_record import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "DURATION",
    "PROCESS_ID",
    "PROGRAM",
    "PROGRAM_FILE",
    "WantedFields",
    "filter_option",
    "overhead_option",
    "processes_named",
    "program_options",
    "selection_options",
    "stacks_options",
    "sum_options",
    "symbols_option",
    "table_options",
    "text_option",
    "verification_options",
    "with_options",
]

_SUFFIXES = (*SUFFIXES, ".ppdf", ".toml")

# The ids of processes with a name, for users who write a name instead of a process id.


_SHOWN_MAX = 5


def processes_named(name: str) -> str:
    """Return a clause with the ids of the processes that have a name, or execute a file of that name."""
    found = [number for number in sorted(_all()) if name in _names(number)]
    if not found:
        return "and none has that name"
    shown = ", ".join(map(str, found[:_SHOWN_MAX]))
    more = f" and {len(found) - _SHOWN_MAX} more" if len(found) > _SHOWN_MAX else ""
    return f"the process of that name is {shown}" if len(found) == 1 else f"processes of that name are {shown}{more}"


def _all() -> Iterator[int]:
    own = os.getpid()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != own:
            yield int(path.name)


def _names(number: int) -> set[str]:
    process = Path(f"/proc/{number}")
    names = set()
    with contextlib.suppress(OSError):
        names.add((process / "comm").read_text(errors="surrogateescape").rstrip("\n"))
        names.add((process / "exe").readlink().name)
    return names


PROGRAM_FILE = click.Path(path_type=Path)


class _ProcessId(click.IntRange):
    """A process id; the error for a name contains the matching process ids."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and not value.strip().lstrip("+-").isdecimal():
            self.fail(f"'{value}' is not the number of a process; {processes_named(value)}", param, ctx)
        return super().convert(value, param, ctx)


PROCESS_ID = _ProcessId()


class _Program(click.Path):
    """File of a program. A name may denote an instrumentation set, with groups, or an example."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path of the file; ``word_of_program`` returns the original word."""
        if ctx is not None:
            note_word(ctx, str(value))
        word = str(value)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.suffix == ".bt" and path.is_file():
            made = f"dprobes convert {path} -o {path.stem}.dpc"
            self.fail(f"'{path}' is a bpftrace script; '{made}' makes a program of it", param, ctx)
        if ctx is not None and ctx.params.get("text") is not None:
            return path  # with -e, this is the first word of a command
        is_file = os.path.lexists(path) and not path.is_dir()
        if word == "-" or path.suffix in _SUFFIXES:
            return path if os.path.lexists(path) else _example(word) or path
        from dprobes.sets import view_in
        from dprobes.sets.set_library import choose_set, is_view

        if "/" in word and is_file and not is_view(word):
            return path

        chosen, example = choose_set(word), _example(word)
        if chosen is None:
            return path if os.path.lexists(path) else example or path
        if is_file and view_in(chosen.path) is not None:
            message = f"'{word}' is a file and a view of an instrumentation set"
            self.fail(f"{message}; write './{path}' for the file, '{word}:' for the view", param, ctx)
        if is_file or example is not None:
            other = f"the file '{path}'" if is_file else f"the example '{example}'"
            sure = f"'./{path}'" if is_file else f"'{example}'"
            self.fail(
                f"'{word}' is {other} and an instrumentation set; write {sure}, or '{word}:' for the set", param, ctx
            )
        if ctx is not None:
            note_groups(ctx, chosen.groups)
        return chosen.path


def _example(word: str) -> Path | None:
    from dprobes.cli.option_values import find_example

    return find_example(word)


PROGRAM = _Program()


def text_option(purpose: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds ``-e``, the text of a program, to a command; ``purpose`` begins its help text."""
    return click.option(
        "-e", "text", metavar="TEXT", multiple=True, callback=lambda _context, _option, parts: joined_text(parts),
        help=f"{purpose} this program in DProbes C instead of a file; several -e are parts of one program.",
    )  # fmt: skip


def joined_text(parts: Sequence[str]) -> str | None:
    """Return the values of all ``-e`` options joined by line ends, as one program, or None without ``-e``."""
    return "\n".join(parts) if parts else None


def with_options(*options: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a decorator that adds options to a command, in their order."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


program_options = with_options(
    click.option("-D", "--define", "defines", multiple=True, metavar="KEY=VALUE", help="Define a macro."),
    click.option(
        "-I", "--include", "includes", multiple=True, type=PROGRAM_FILE, metavar="DIR",
        help="Search a directory for #include files.",
    ),
    click.option("--cpp", metavar="COMMAND", help='Use another C preprocessor, such as "gcc -E".'),
    click.option("--allow-write", is_flag=True, help="Allow instructions that change or stop the target."),
)  # fmt: skip
"""Options of compilation. ``compile_options`` evaluates them."""


symbols_option = click.option(
    "--sym", "symbols", type=PROGRAM_FILE, metavar="FILE",
    help="Read the module's symbols from an unstripped ELF or debug file, System.map, nm output, or linker map.",
)  # fmt: skip
"""``--sym``."""


kernel_types_option = click.option(
    "--kernel-types", "kernel_types", type=PROGRAM_FILE, metavar="FILE",
    help="Read the kernel's types from this vmlinux, or from a copy of /sys/kernel/btf/vmlinux: for "
    "another kernel, or for one that does not provide them.",
)  # fmt: skip
"""``--kernel-types``."""


class _Duration(click.ParamType[float]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return a time in seconds; raise a usage error if it is invalid."""
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = _Duration()


class _Overhead(click.ParamType[float]):
    """An option value: a percentage of CPU time, or ``off`` (also ``none``) for no limit."""

    name = "percent"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the percentage; raise a usage error if it is invalid."""
        try:
            return overhead_of(value)
        except EngineError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


overhead_option = click.option(
    "--overhead", type=_Overhead(), metavar="PERCENT",
    help="Limit the time that hits take of each CPU, such as 10%, by skipping handlers and disabling probepoints; "
    f"'off' for no limit. Default: {DEFAULT_OVERHEAD:g}% in all processes and in the kernel, else off.",
)  # fmt: skip
"""``--overhead``."""


filter_option = click.option(
    "--filter", "filters", multiple=True, metavar="CONDITION",
    help="Record only the hits that match, such as 'comm == \"redis-server\" and arg0 > 1M'; the condition is "
    "evaluated at the hit. Several conditions must all be true.",
)  # fmt: skip
"""``--filter``."""


selection_options = with_options(
    click.option(
        "--group", "groups", multiple=True, metavar="NAMES", help="Insert only the definitions of these groups."
    ),
    click.option("--type", "types", multiple=True, metavar="NAMES", help="Insert only the definitions of these types."),
)
"""``--group`` and ``--type``. ``names_of`` evaluates them."""


verification_options = with_options(
    click.option(
        "--dont-verify-build-id",
        is_flag=True,
        help="Accept builds of the module that a compiled FILE was not built for.",
    ),
    click.option(
        "--dont-verify-opcodes",
        is_flag=True,
        help="Insert probepoints without comparing the instructions at their offsets with the expected ones.",
    ),
)
"""The options that disable checks of a module."""


def sum_options(when: str, instead: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return a decorator that adds ``--sum`` and ``--by``.

    ``when`` begins the help text of ``--sum``, ``instead`` ends it.
    """
    total = click.option(
        "--sum",
        "summed",
        multiple=True,
        metavar="FIELD",
        help=f"{when} the sum, average, minimum and maximum of the field{instead}.",
    )
    by = click.option(
        "--by",
        multiple=True,
        metavar="FIELD[,FIELD...]",
        help="Group histograms and sums by these fields, not by place.",
    )
    return lambda function: total(by(function))


stacks_options = with_options(
    click.option(
        "--stacks",
        metavar="folded|FILE",
        help="At the end, print call stacks folded, or write them to FILE: .html is a flame graph, .pb.gz is "
        "for pprof, .pftrace for Perfetto, .folded is text.",
    ),
    click.option(
        "--weight",
        metavar="FIELD|@TABLE",
        help="The field with the weight of each stack of --stacks, by default 1, or the table that has the stacks.",
    ),
    click.option(
        "--baseline",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Compare the flame graph of --stacks with FILE: folded stacks or a trace file.",
    ),
)
"""The options of profiles of call stacks."""


table_options = with_options(
    click.option(
        "--rows",
        type=click.IntRange(min=1),
        metavar="N",
        help="Print only the N greatest rows of each keyed table and of the summary.",
    ),
    click.option(
        "--interval",
        type=DURATION,
        metavar="TIME",
        help="Print the keyed tables at this interval, such as 1s; they are not reset.",
    ),
    click.option(
        "--prometheus",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Also write the keyed tables to FILE in the text format of Prometheus, at the end and at each --interval.",
    ),
    click.option(
        "--duration",
        type=DURATION,
        metavar="TIME",
        help="End the run after this time, such as 10s or 2m, and send SIGTERM to its command.",
    ),
)
"""The options of keyed tables, and of the duration of a run."""


# The fields in ``--count``, ``--hist``, ``--sum`` and ``--by``.


class WantedFields(NamedTuple):
    """Fields named by ``--count`` (one tuple for each table), ``--hist``, ``--sum`` and ``--by``."""

    counted: tuple[tuple[str, ...], ...] = ()
    measured: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    by: tuple[str, ...] = ()

    @classmethod
    def of_options(
        cls, counted: Sequence[str], measured: Sequence[str], summed: Sequence[str] = (), by: Sequence[str] = ()
    ) -> Self:
        """
        Return the fields in the values of ``--count``, ``--hist``, ``--sum`` and ``--by``.

        Raise ``UsageError`` for an invalid combination.
        """
        found = cls(
            tuple(_fields_of(text) for text in counted),
            tuple(text.strip() for text in measured),
            tuple(text.strip() for text in summed),
            tuple(dict.fromkeys(field for text in by for field in _fields_of(text))),
        )
        if found.by and not (found.measured or found.summed):
            raise click.UsageError("--by needs --hist or --sum; --count takes several fields: --count name,pid")
        return found

    def __bool__(self) -> bool:
        return bool(self.counted or self.measured or self.summed)

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all fields."""
        return (*(field for fields in self.counted for field in fields), *self.measured, *self.summed, *self.by)

    @property
    def items(self) -> Item:
        """The header items that the fields need."""
        from dprobes.formatters.field_values import HEADER_FIELDS

        items = Item(0)
        for field in self.all:
            items |= HEADER_FIELDS.get(field, Item(0))
        return items


def _fields_of(text: str) -> tuple[str, ...]:
    """Return the field names in the comma-separated value of one ``--count``."""
    return tuple(field.strip() for field in text.split(","))
