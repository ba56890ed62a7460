# SPDX-License-Identifier: Apache-2.0
"""What steps are seen to take of memory: by which choice, and on which rank most."""

from __future__ import annotations

from ds_moe_ext.hosts.steps.costs import MemoryTaken

EP, FSSDP, PROPHET = "ep", "fssdp", "prophet"


def taken(steps: list[tuple[str, int, bool]], free: int = 100, others: int = 0) -> dict[str, int]:
    """After steps: by which choice, what was left at the fullest moment so far, and whether ranks
    report to each other; ``others`` is what another rank says."""
    spare = [free]
    memory = MemoryTaken(lambda: spare[0], lambda number: max(number, others))
    memory.begin(free)
    for name, left, is_due in steps:
        spare[0] = left
        memory.after_step(name, is_due=is_due)
    return dict(memory.taken)


def test_a_choice_under_which_memory_became_fuller_took_it() -> None:
    assert taken([(FSSDP, 70, False), (FSSDP, 60, True)]) == {FSSDP: 40}
    assert taken([(EP, 100, True)]) == {}
    # No peak above that of the one before: it is not known what it took, but that it fits.
    assert taken([(FSSDP, 60, True), (PROPHET, 60, True)]) == {FSSDP: 40}
    # What the one before still took in its last step, behind the look, is not the next one's.
    behind = [(FSSDP, 60, True), (FSSDP, 50, False), (PROPHET, 50, True)]
    assert taken(behind) == {FSSDP: 40}
    assert taken([*behind, (PROPHET, 30, True)]) == {FSSDP: 40, PROPHET: 70}


def test_the_rank_where_it_is_most_counts() -> None:
    assert taken([(FSSDP, 90, True)], others=30) == {FSSDP: 30}
    assert taken([(FSSDP, 100, True)], others=30) == {FSSDP: 30}


def test_where_nothing_tells_nothing_is_known() -> None:
    memory = MemoryTaken(lambda: None, max)
    memory.after_step(FSSDP, is_due=True)
    memory.begin(100)
    memory.after_step(FSSDP, is_due=True)
    assert memory.taken == {}


def test_it_begins_anew_where_costs_are_measured_again() -> None:
    spare = [100]
    memory = MemoryTaken(lambda: spare[0], lambda number: number)
    memory.begin(100)
    spare[0] = 60
    memory.after_step(FSSDP, is_due=True)
    memory.begin(100)  # 60, and replicas that take 40
    assert memory.taken == {}
    spare[0] = 50
    memory.after_step(FSSDP, is_due=True)
    assert memory.taken == {FSSDP: 50}
