"""What users are told of core files."""

from __future__ import annotations

from dprobes.engines.engine_interface import Notice

__all__ = ["no_core_notice", "written_notice"]


def written_notice(pid: int, name: str, path: str, size: int) -> Notice:
    """Tell where the core of a process is."""
    return Notice(f"the core of process {pid} ({name}) is in '{path}' ({size} bytes)", is_warning=False)


def no_core_notice(pid: int, name: str, path: str, problem: str) -> Notice:
    """Tell why there is none."""
    return Notice(f"no core of process {pid} ({name}) in '{path}': {problem.rstrip()}; the process continues")
