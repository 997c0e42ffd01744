"""The shipped steps in every state of small worlds, and proof that the search sees what is broken.

This is the slice that runs with all tests, up to a number of states; ``make model`` searches far wider, and to the
end. Mutants run in processes of their own (``kill``), so nothing that is patched leaks into other tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spotkeeper.contract.record import Hold, Outcome
from tests.model.ground import Ground, Ref, same
from tests.model.machine import Machine
from tests.model.mutants import MUTANTS, SLICE, verdict
from tests.model.mutants.broke import BROKE
from tests.model.mutants.nine_rules import RULES
from tests.model.mutate import Finder, Mutant, Patch
from tests.model.search import Search, search, unpack
from tests.model.story import Story
from tests.model.worlds import HANG, NODE_NOTICE, RUNG, SEEK
from tests.model.worlds import SLICE as WORLDS
from tests.sizes import size

ROOT = Path(__file__).parents[2]
# States of one story, by the number of its rounds (the second round is cheap). Together these stories find 61 of the 77
# mutants, within these numbers; the others need the worlds of ``make model``.
STATES = {1: size(1_100, 0), 2: size(3_000, 0)}
# What a static machine brings along shows after 10,000, machines of a gang that are given back too soon after 1,300.
DEEP = {NODE_NOTICE: size(12_000, 0), SEEK: size(1_600, 0)}


@pytest.mark.parametrize("story", WORLDS, ids=lambda story: f"{story.cloud}: {story.name}")
def test_states_are_safe_and_reach_their_end(story: Story) -> None:
    bound = DEEP.get(story, STATES[story.rounds])
    found = search(story._replace(states=bound))
    assert found.why == "", "\n".join(found.way)
    assert found.whole or found.states >= bound > 0, found.stopped
    assert found.states > 200


@pytest.mark.parametrize("mutant", SLICE[:: size(2, 1)], ids=lambda mutant: mutant.name)
def test_every_removed_rule_is_detected(mutant: Mutant) -> None:
    number = MUTANTS.index(mutant)
    argv = [sys.executable, "-m", "tests.model.kill", str(number), "120"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert verdict(number, found), f"{found['why'] or 'alive'} after {found['states']} states"


def test_every_recorded_failure_has_a_mutant() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
    assert len(BROKE) >= 19
    assert [m.name[:6] for m in RULES] == [f"rule {n}" for n in range(1, 10)]


def test_every_patch_still_fits_the_shipped_code() -> None:
    """A mutant whose text is gone would be none; one that fits twice would not be the one that it says."""
    for mutant in MUTANTS:
        for patch in mutant.patches:
            source = _source(patch)
            assert source.count(patch.old) == 1, f"{mutant.name}: {source.count(patch.old)} times in {patch.module}"
            assert patch.new not in source or patch.new == "" or len(patch.new) < len(patch.old), mutant.name


def _source(patch: Patch) -> str:
    path = ROOT / Path(*patch.module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text()


def test_a_patch_that_fits_nowhere_is_refused() -> None:
    code = (
        "from tests.model.mutants import MUTANTS; from tests.model.mutate import Patch, infect;"
        "infect(MUTANTS[0]._replace(patches=(Patch('spotkeeper.contract.allocation', 'no such text', ''),)));"
        "import spotkeeper.contract.allocation"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "occurs 0 times" in done.stderr
    assert Finder(()).find_spec("spotkeeper.contract.allocation", None) is None


def test_the_fast_search_makes_the_same_steps() -> None:
    """The tables and columns must reach exactly what going step by step reaches."""
    story = Story("t", faults=1, requests=0, rounds=2, kinds=frozenset({"killed"}), zones=("a",), split=False, deaths=1)
    fast = Search(story)
    fast.run(states=3000)
    slow = Machine(story)
    seen, layer = {slow.start()}, [slow.start()]
    for depth, states in enumerate(fast.layers[:8]):
        fields = unpack(states)
        assert len(fields.world) == len(layer), f"layer {depth}"
        coming = []
        for state in layer:
            for _, after, _ in slow.moves(state):
                if after not in seen:
                    seen.add(after)
                    coming.append(after)
        layer = coming


def test_a_counterexample_is_printed_step_by_step() -> None:
    story = Story("t", faults=0, requests=0, rounds=1, split=False)
    search_ = Search(story)
    search_.run()
    last = int(search_.layers[-2][0])
    way = search_._way(len(search_.layers) - 2, last)
    assert len(way) == len(search_.layers) - 2
    assert "looks" in way[0]


def test_an_answered_hang_is_a_crash_and_a_busy_one_is_not() -> None:
    """Else the worlds in which a job hangs would hold nothing of it."""
    one = Search(HANG._replace(nodes=1))
    assert one.run().whole
    records = [record for record in one.machine.records.values if record is not None]
    assert any(record.roll is not None and record.roll.cause == "hang" for record in records)
    assert {(record.gen, record.budget.crashes) for record in records} == {(0, 0), (1, 0), (2, 1)}


@pytest.mark.parametrize("cloud", ["gce", "ec2"])
def test_decisions_do_not_depend_on_forgotten_state(cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision is made twice: from all that was read, and from what a round is known by."""
    shipped, doubted = Ground.future, set[Ref]()

    def future(self: Ground, ref: Ref) -> int:
        short = ref._replace(papers=self.listened(ref.record, ref.papers))
        if short != ref and ref not in doubted:
            doubted.add(ref)
            assert same(self.make(ref), self.make(short))
        return shipped(self, ref)

    monkeypatch.setattr(Ground, "future", future)
    kinds = frozenset({"noticed", "reboots", "SILENT", "ROLL", "crashes", "blind"})
    found = search(Story("any of these", cloud, faults=1, requests=0, rounds=1, kinds=kinds, states=STATES[1]))
    assert found.why == ""
    assert len(doubted) > 30


def test_a_trial_waits_without_a_machine_and_continues_or_ends() -> None:
    """Else the worlds of a trial would hold nothing of its rung."""
    one = Search(RUNG)
    assert one.run().whole
    records = [record for record in one.machine.records.values if record is not None]
    assert any(record.hold is Hold.RUNG and record.mirror for record in records), "with a copy"
    assert any(record.hold is Hold.RUNG and not record.mirror for record in records), "or after a long wait for it"
    assert {record.gen for record in records if record.trial is not None and record.trial.rung} >= {1, 2}
    assert any(record.outcome is Outcome.STOPPED for record in records)
