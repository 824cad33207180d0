"""Whether a program may take the place of another one: not if nothing of it would be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.resolve.probepoints import Probepoint

__all__ = ["nothing_to_insert"]


def nothing_to_insert(probes: Iterable[Probepoint], reasons: Iterable[str] = ()) -> EngineError:
    """
    Return the error for a program that was to replace another one, and of which no probepoint can be inserted.

    ``reasons`` say why that is, besides what the probepoints themselves say.
    """
    told = [f"{probe.state.value} at {probe.where}" for probe in probes if probe.state.is_obstacle]
    first = [*told, *reasons][:1]
    return EngineError(
        f"no probepoint of the new program can be inserted; the old program continues{': ' if first else ''}"
        + "".join(first),
        hint="remove the program that is there if it is not wanted any more",
    )
