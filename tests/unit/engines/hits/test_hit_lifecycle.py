"""The states of a hit: the table in the documentation is what the code follows, and all else is refused."""

from __future__ import annotations

import pytest

from dprobes.engines.hits import hit_lifecycle
from dprobes.engines.hits.hit_lifecycle import AFTER, HitEvent, HitState, IllegalTransitionError

PAIRS = [(state, event) for state in HitState for event in HitEvent]


def documented() -> dict[tuple[HitState, HitEvent], HitState]:
    """Return the table of the module's documentation."""
    assert hit_lifecycle.__doc__ is not None
    head, *rows = [line for line in hit_lifecycle.__doc__.splitlines() if line.startswith("    ")]
    columns = {HitState[name]: head.index(f" {name}") + 1 for name in head.split()}
    assert [line.split()[0] for line in rows] == [event.name for event in HitEvent]
    found = {}
    for line in rows:
        for state, column in columns.items():
            if word := line[column:].split(" ")[0]:
                found[state, HitEvent[line.split()[0]]] = HitState[word]
    return found


def test_the_documented_table_is_that_of_the_code() -> None:
    assert documented() == AFTER


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair not in AFTER], ids=repr)
def test_what_cannot_happen_is_refused(state: HitState, event: HitEvent) -> None:
    with pytest.raises(IllegalTransitionError, match=f"^a hit that is {state.name} cannot be {event.name}$"):
        AFTER[state, event]


def test_every_transition_can_be_reached_and_every_hit_can_end() -> None:
    reached = {HitState.NONE}
    for _ in HitState:
        reached |= {after for (state, _), after in AFTER.items() if state in reached}
    assert reached == set(HitState)
    assert {event for _, event in AFTER} == set(HitEvent)
    ending = {HitState.NONE}
    for _ in HitState:
        ending |= {state for (state, _), after in AFTER.items() if after in ending}
    assert ending == set(HitState)
