"""What a line of ``run`` says, whoever has read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ebpf.options import RING_SIZE
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RunOptions"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Hold the values of options and arguments; ``cli.verbs.run`` explains them, and has the same defaults."""

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
    exit_status: bool = False
