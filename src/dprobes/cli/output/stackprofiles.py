"""``--stacks``: the profile of call stacks that stands for records at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.errors import FormatError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.sinks.stacks.collector import StackCollector
    from dprobes.sinks.stacks.profile import StackProfile

__all__ = ["check_stacks_target", "write_profile"]

FOLDED = "folded"
"""The value of ``--stacks`` that prints folded stacks."""


def check_stacks_target(target: str) -> None:
    """Raise ``UsageError`` if ``--stacks`` names nothing that a profile can be written to."""
    if target != FOLDED:
        _writer_of(target)


def write_profile(collector: StackCollector, target: str, baseline: Path | None) -> None:
    """Write a profile where ``--stacks`` says; raise ``FormatError`` if that fails."""
    profile = collector.profile()
    if collector.without:
        what = "1 record has" if collector.without == 1 else f"{collector.without} records have"
        console.note(f"{what} no call stack to be weighed; 'log ustack' and 'log kstack' log them")
    if target == FOLDED:
        from dprobes.sinks.stacks.foldedtext import folded_lines

        for line in folded_lines(profile):
            click.echo(line)
        return
    data = _writer_of(target)(profile, None if baseline is None else _read(baseline))
    try:
        Path(target).write_bytes(data)
    except OSError as error:
        raise FormatError(f"'{target}': {reason_of(error)}") from error
    console.note(f"'{target}' has {profile.total} {profile.unit} in {len(profile.weights)} stacks")


def _read(path: Path) -> StackProfile:
    from dprobes.sinks.stacks.foldedtext import parse_folded

    try:
        return parse_folded(path.read_text(encoding="utf-8", errors="backslashreplace").splitlines(), str(path))
    except OSError as error:
        raise FormatError(f"'{path}': {reason_of(error)}") from error


def _writer_of(target: str) -> Callable[[StackProfile, StackProfile | None], bytes]:
    """Return what makes the bytes of a file by its name."""
    name = target.lower()
    if name.endswith((".html", ".htm")):
        return _page
    if name.endswith((".folded", ".txt")):
        return _folded
    if name.endswith((".pb.gz", ".pprof")):
        return _pprof
    raise click.UsageError(
        f"--stacks: '{target}' is neither 'folded' nor a file that ends in .html, .folded or .pb.gz (for pprof)"
    )


def _page(profile: StackProfile, baseline: StackProfile | None) -> bytes:
    from dprobes.sinks.stacks.flamegraph import flame_graph

    return flame_graph(profile, baseline).encode()


def _folded(profile: StackProfile, _: StackProfile | None) -> bytes:
    from dprobes.sinks.stacks.foldedtext import folded_lines

    return "".join(f"{line}\n" for line in folded_lines(profile)).encode("utf-8", "backslashreplace")


def _pprof(profile: StackProfile, _: StackProfile | None) -> bytes:
    from dprobes.sinks.stacks.pprof import pprof_of

    return pprof_of(profile)
