"""The queue in the first states of its small worlds, and proof that its search and its mutants work."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation
from tests.model import queue
from tests.model.queue import STORIES, Story, search
from tests.model.queue_mutants import MUTANTS
from tests.sizes import size

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_limits_hold_and_no_job_starves(story: Story) -> None:
    found = search(story, size(600, 0))
    assert found.why == ""
    assert found.states >= 600


def test_the_search_sees_writes_without_compare_and_swap() -> None:
    assert search(STORIES[0]._replace(cas=False), 5_000).why


@pytest.mark.parametrize("what", ["nothing", "half"])
def test_the_search_sees_a_scheduler_that_starves_jobs_or_halves_gangs(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(allocation: Allocation, *_: object) -> Allocation:
        if what == "nothing":
            return allocation
        return replace(allocation, claims=tuple(replace(one, reserved=1, waits=None) for one in allocation.claims))

    monkeypatch.setattr(queue, "schedule", broken)
    why = search(STORIES[0], 1_500).why
    assert why.startswith("after 24 steps" if what == "nothing" else "half a gang")


def test_every_mutant_of_the_queue_fits_the_shipped_code() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        for patch in mutant.patches:
            source = (ROOT / Path(*patch.module.split("."))).with_suffix(".py").read_text()
            assert source.count(patch.old) == 1, mutant.name
