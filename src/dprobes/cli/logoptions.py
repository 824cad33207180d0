"""The options of the verbs that take log targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["has_structure", "log_format_option"]


def log_format_option(default: str | None, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return ``--log-format``, with other names where these mean nothing else."""
    import click

    from dprobes.sinks.interface import LOG_FORMATS

    return click.option(
        "--log-format",
        *names,
        "log_format",
        type=click.Choice(LOG_FORMATS),
        default=default,
        show_default=default is not None,
        help="The format for log targets that have no format of their own; binary: unchanged header and data.",
    )


def has_structure(targets: Sequence[str]) -> bool:
    """Return whether one of some log targets takes records as they are, and wants all items of their headers."""
    if not targets:
        return False
    from dprobes.sinks.kinds import parse_target
    from dprobes.trace.filenames import is_trace_name

    names = [parse_target(target) for target in targets]
    return any(name.kind.has_structure or is_trace_name(name.argument) for name in names)
