"""What a user hears at the end: of probepoints that have had breakpoints all the time, and of damaged memory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dprobes.engines.interface import Notice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.inline.hits.handlerhits import Damage

__all__ = ["damage_notice", "refusal_notice"]

_REASONS = 4
"""How many reasons a user is told."""


def refusal_notice(reasons: Sequence[str]) -> Notice:
    """Say why probepoints have had no jumps; each has a reason."""
    count, kinds = len(reasons), Counter(reasons)
    listed = [f"{reason}{f' ({number})' if count > 1 else ''}" for reason, number in kinds.most_common(_REASONS)]
    if len(kinds) > _REASONS:
        listed.append("...")
    what = "a probepoint has had a breakpoint instead of a jump"
    if count > 1:
        what = f"{count} probepoints have had breakpoints instead of jumps"
    return Notice(f"{what}: {'; '.join(listed)}", is_warning=False)


def damage_notice(damage: Damage) -> Notice:
    """Warn that probed processes have damaged the memory of their handlers, and list what was left out."""
    parts = (
        (damage.entries, "record that no handler makes was dropped", "records that no handler makes were dropped"),
        (damage.rings, "time all records of a CPU were given up", "times all records of a CPU were given up"),
        (damage.counts, "probepoint has no count of hits", "probepoints have no counts of hits"),
        (damage.keys, "key of a table without a count was left out", "keys of tables without counts were left out"),
    )
    found = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in parts if count)
    return Notice(
        f"a probed process has written over the memory of its handlers: {found}",
        hint="the other values may be wrong as well; '--engine ptrace' shares no memory with the process",
    )
