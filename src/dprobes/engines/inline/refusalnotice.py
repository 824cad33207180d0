"""What a user hears at the end of probepoints that have had breakpoints all the time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dprobes.engines.interface import Notice

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["refusal_notice"]

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
