"""What the agent reports of a running job: progress, stalls, full disks."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from spotkeeper.contract import codec
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, FactIn, Generation, Member, Progress
from spotkeeper.train.agent_link.control import Commit, Control, Fault, RunPhase
from spotkeeper_agent.job import progress


@pytest.mark.parametrize(("nodes", "every_s"), [(1, 30.0), (2, 60.0)])
def test_a_job_on_one_machine_reports_twice_as_often(tmp_path: Path, nodes: int, every_s: float) -> None:
    members = tuple(Member(node, 1, f"u{node}", "boot", "10.0.0.1", 1) for node in range(nodes))
    doc = Generation("abcd2345", "uid", 1, 1, DocState.RUN, members, "10.0.0.1", 29400, "run")
    with Control.create(tmp_path / "ctl") as control:
        control.state = RunPhase.TRAINING
        reporter = progress.Reporter.of(doc, 0)
        assert reporter.progress(control, 0.0) is not None
        assert reporter.progress(control, every_s - 1.0) is None
        assert reporter.progress(control, every_s) is not None


def test_only_the_lowest_member_reports_at_commits_and_once_a_minute(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as control:
        lowest, other = progress.Reporter(1, True), progress.Reporter(1, False)
        assert lowest.progress(control, 0.0) is None, "nothing to say before training"
        control.state = RunPhase.TRAINING
        control.stepped(5)
        control.loss = 1.5
        told = lowest.progress(control, 0.0)
        assert told is not None and (told.gen, told.step, told.loss, told.commit_step) == (1, 5, 1.5, None)
        assert other.progress(control, 0.0) is None
        assert lowest.progress(control, 59.0) is None
        assert lowest.progress(control, 60.0) is not None
        control.committed(Commit(1, 5))
        news = lowest.progress(control, 61.0)
        assert news is not None and (news.commit_gen, news.commit_step) == (1, 5)


def test_the_parts_of_a_start_are_reported_with_its_first_step(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as control:
        reporter = progress.Reporter(2, True)
        control.met_at, control.restored_at, control.state = 1000.0, 1004.0, RunPhase.TRAINING
        control.resumed(Commit(1, 7), 10**9)
        loaded = reporter.progress(control, 0.0)
        assert loaded is not None and (loaded.restore_s, loaded.restored_bytes, loaded.first_s) == (4.0, 10**9, None)
        control.stepped(8, at=1006.5)
        stepped = reporter.progress(control, 1.0)
        assert stepped is not None and (stepped.restore_s, stepped.first_s) == (4.0, 2.5)


def test_the_spacing_and_cost_of_images_are_reported(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as control:
        reporter = progress.Reporter(2, True)
        control.state = RunPhase.TRAINING
        none = reporter.progress(control, 0.0)
        assert none is not None and (none.image_steps, none.image_share) == (None, None)
        control.image_steps, control.image_share = 12, 0.006
        told = reporter.progress(control, 60.0)
        assert told is not None and (told.image_steps, told.image_share) == (12, 0.006)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xBF, 0xFF])
@pytest.mark.parametrize("word", range(8, 34))
def test_a_damaged_control_file_yields_no_wrong_reports(tmp_path: Path, word: int, byte: int) -> None:
    """The agent ended at every look; and a progress that the function refuses takes the facts beside it along."""
    with Control.create(tmp_path / "ctl") as control:
        control.state = RunPhase.TRAINING
        control.stepped(5)
        with (tmp_path / "ctl").open("r+b") as file:
            file.seek(8 * word)
            file.write(bytes([byte]) * 8)
        reporter = progress.Reporter(1, True)
        told = reporter.progress(control, 1.0, last=True)
        if told is not None:
            codec.decode(msgspec.json.encode(told), Progress)
        reporter.facts(control, 1.0)
        reporter.late(control, 2.0)


def test_stall_and_full_disk_are_facts(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as control:
        reporter = progress.Reporter(2, False)
        control.state = RunPhase.TRAINING
        control.step_s = 4.0
        control.stepped(9, 1e9)
        assert not reporter.late(control, 100.0)
        assert reporter.late(control, 113.0)
        assert reporter.facts(control, 113.0) == []
        assert reporter.facts(control, 141.0) == [FactIn(Kind.STALL, 2, "9")]
        control.state = RunPhase.STOPPING  # the save takes its time; nothing stalls
        assert reporter.facts(control, 141.0) == []
        control.fault = Fault.DISK_FULL
        assert reporter.facts(control, 141.0) == [FactIn(Kind.FULL, 2)]
        control.fault = Fault.WRITE_FAILED
        assert reporter.facts(control, 141.0) == [FactIn(Kind.UNSAVED, 2, "write-failed")]
        control.fault = Fault.SAVER_LOST
        assert reporter.facts(control, 141.0) == [FactIn(Kind.UNSAVED, 2, "saver-lost")]
        control.fault = Fault.NO_MEMORY
        assert reporter.facts(control, 141.0) == [FactIn(Kind.UNSAVED, 2, "no-memory")]
        control.fault = Fault.FENCED  # a newer generation has the folder: no news for anybody
        assert reporter.facts(control, 141.0) == []


@pytest.mark.parametrize("set_by", [-1e8, -3600.0, 3600.0, 1e8])
def test_setting_the_wall_clock_affects_no_stall_report(tmp_path: Path, set_by: float) -> None:
    with Control.create(tmp_path / "ctl") as control:
        reporter = progress.Reporter(2, False)
        control.state = RunPhase.TRAINING
        control.step_s = 1.0
        for second in range(3):
            control.stepped(second, time.time())
            assert not reporter.late(control, 100.0 + second) and not reporter.facts(control, 100.0 + second)
        control.stepped(3, time.time() + set_by)
        assert not reporter.late(control, 103.0) and not reporter.facts(control, 103.0)
        assert not reporter.late(control, 104.0)
        assert reporter.late(control, 107.0)
        assert reporter.facts(control, 134.0) == [FactIn(Kind.STALL, 2, "3")]
        control.stepped(4, time.time() + set_by)
        assert not reporter.late(control, 135.0)


def test_saves_that_work_again_are_reported_a_few_times(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as control:
        reporter = progress.Reporter(2, False)
        control.state = RunPhase.TRAINING
        said: list[FactIn] = []
        for _ in range(progress.TIMES + 2):
            for fault in (Fault.DISK_FULL, Fault.FENCED, Fault.NONE, Fault.NONE):
                control.fault = fault
                said += reporter.facts(control, 141.0)
        told = [(fact.kind, fact.value) for fact in dict.fromkeys(said)]
        want = [(kind, str(which)) for which in range(progress.TIMES) for kind in (Kind.FULL, Kind.SAVED)]
        assert told == [*want, (Kind.FULL, str(progress.TIMES))], "then it stays told: no two facts for every save"
        assert len(said) == 2 * progress.TIMES + 2
        control.fault = Fault.SAVER_LOST
        assert reporter.facts(control, 141.0) == [FactIn(Kind.UNSAVED, 2, f"saver-lost-{progress.TIMES}")]
