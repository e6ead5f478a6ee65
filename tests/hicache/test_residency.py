"""The table of residencies: what is in it, and that nothing else happens."""

import itertools

import pytest

from hicache.residency import IN_TIER, TRANSITIONS, Event, IllegalTransition, Residency, after, diagram
from tests.repository import ROOT


@pytest.mark.parametrize(("state", "event"), list(itertools.product(Residency, Event)))
def test_every_pair_is_in_the_table_or_raises(state: Residency, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
        return
    with pytest.raises(IllegalTransition, match=f"{event.name} is not possible while {state.name}") as caught:
        after(state, event)
    assert (caught.value.state, caught.value.event) == (state, event)


def test_every_state_is_reached_and_left() -> None:
    reached = {Residency.ABSENT} | set(TRANSITIONS.values())
    left = {state for state, _ in TRANSITIONS}
    assert reached == left == set(Residency)


def test_every_event_has_an_effect() -> None:
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert all(state is not target for (state, _), target in TRANSITIONS.items())


def test_only_finished_copies_are_served() -> None:
    into_resident = {event for (_, event), target in TRANSITIONS.items() if target is Residency.RESIDENT}
    assert into_resident == {Event.STORED, Event.MOVE_DONE}


def test_removed_stays_removed() -> None:
    """From CONDEMNED the only way leads to ABSENT."""
    assert [target for (state, _), target in TRANSITIONS.items() if state is Residency.CONDEMNED] == [Residency.ABSENT]


def test_the_diagram_has_one_line_a_transition() -> None:
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(lines) == 2 + len(TRANSITIONS)
    assert "    ARRIVING --> RESIDENT: MOVE_DONE" in lines


def test_what_counts_as_in_a_tier() -> None:
    assert {Residency.ARRIVING, Residency.RESIDENT} == IN_TIER


def test_the_notes_show_the_table() -> None:
    assert diagram() in (ROOT / "hicache" / "README.md").read_text()
