"""
Parsing of simple command lines of ``run`` without click: ``-e`` with frequent options.

The import of click takes a tenth of the start. All other lines are left to it, including invalid ones and messages
about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.cli.option_values import seconds_of
from dprobes.engines.ebpf.ebpf_options import RING_SIZE
from dprobes.engines.engine_registry import named_engine
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["FLAGS", "VALUES", "RunOptions", "options_of"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The values of options and arguments; ``cli.verbs.run`` documents them, and has the same defaults."""

    file: Path | None = None
    arguments: tuple[str, ...] = ()
    text: str | None = None
    command_line: str | None = None
    pid: int | None = None
    cgroup: str | None = None
    user: str | None = None
    defines: tuple[str, ...] = ()
    includes: tuple[Path, ...] = ()
    cpp: str | None = None
    allow_write: bool = False
    symbols: Path | None = None
    kernel_types: Path | None = None
    templates: Path | None = None
    filters: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    dont_verify_build_id: bool = False
    dont_verify_opcodes: bool = False
    engine_name: str = "auto"
    format_name: str = "text"
    log_items: tuple[str, ...] = ()
    output: Path | None = None
    targets: tuple[str, ...] = ()
    log_format: str | None = None
    top: bool = False
    counted: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    stacks: str | None = None
    weight: str | None = None
    baseline: Path | None = None
    rows: int | None = None
    interval: float | None = None
    prometheus: Path | None = None
    duration: float | None = None
    debugger: str | None = None
    core_directory: str = "."
    follow: bool = True
    pid_namespace: bool = False
    exact: bool = False
    ring_size: int = RING_SIZE >> 20
    overhead: float | None = None
    stop_cpus: bool = False
    allow_self: bool = False
    verbose: bool = False
    explain: bool = False
    exit_status: bool = False

    @property
    def has_view(self) -> bool:
        """True if a view is shown instead of records."""
        return bool(self.counted or self.measured or self.summed or self.top or self.stacks)


def _process_id(word: str) -> int:
    number = int(word)
    if not word.isdecimal() or number < 1:
        raise ValueError
    return number


def _engine(word: str) -> str:
    named_engine(word)
    return word


VALUES: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "-e": ("text", str),
    "-p": ("pid", _process_id),
    "--pid": ("pid", _process_id),
    "-c": ("command_line", str),
    "--command": ("command_line", str),
    "--engine": ("engine_name", _engine),
    "--duration": ("duration", seconds_of),
}
"""Options with a value: its name, and its conversion; a ``ValueError`` leaves the line to click."""

FLAGS: Mapping[str, str] = {"-v": "verbose", "--verbose": "verbose", "--allow-write": "allow_write"}


def options_of(arguments: Sequence[str]) -> RunOptions | None:
    """Return the options of a line, if it consists only of these options and an optional command after ``--``."""
    if not arguments or arguments[0] != "run":
        return None
    values: dict[str, object] = {}
    words = iter(arguments[1:])
    try:
        for word in words:
            if word in VALUES:
                name, made = VALUES[word]
                value = made(next(words))
                if name == "text" and name in values:
                    value = f"{values[name]}\n{value}"  # as click joins them
                values[name] = value
            elif word in FLAGS:
                values[FLAGS[word]] = True
            elif word == "--":
                values["arguments"] = tuple(words)
            else:
                return None
    except (ValueError, EngineError, StopIteration):
        return None
    return RunOptions(**values) if "text" in values else None  # type: ignore[arg-type] # the tests compare with click
