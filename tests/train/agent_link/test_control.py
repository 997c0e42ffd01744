"""The control file and the result: what the agent and the job rely on."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spotkeeper.train.agent_link.control import (
    SIZE,
    AgentRequest,
    Commit,
    Control,
    ControlError,
    Fault,
    RunPhase,
    RunResult,
    read_result,
    write_result,
)


def test_agent_and_job_see_each_others_words(tmp_path: Path) -> None:
    agent = Control.create(tmp_path / "ctl")
    job = Control.open(tmp_path / "ctl")
    assert (job.requested, job.request_number, job.commit, job.loss, job.restored) == (
        AgentRequest.NONE,
        0,
        None,
        None,
        None,
    )

    assert agent.request(AgentRequest.SAVE, 12.5) == 1
    assert (job.requested, job.deadline, job.request_number) == (AgentRequest.SAVE, 12.5, 1)
    assert agent.request(AgentRequest.SAVE_STOP) == 2

    job.state = RunPhase.TRAINING
    job.stepped(7, at=100.0)
    job.stepped(8, at=101.0)
    job.committed(Commit(0, 0), at=102.0)
    job.loss, job.fault, job.answered = 3.5, Fault.DISK_FULL, 2
    job.resumed(Commit(3, 8))
    assert (agent.state, agent.step, agent.step_at, agent.first_step_at) == (RunPhase.TRAINING, 8, 101.0, 100.0)
    assert (agent.commit, agent.commit_at) == (Commit(0, 0), 102.0)
    assert (agent.loss, agent.fault, agent.answered, agent.restored) == (3.5, Fault.DISK_FULL, 2, Commit(3, 8))


def test_every_word_has_its_own_offset(tmp_path: Path) -> None:
    control = Control.create(tmp_path / "ctl")
    floats = ("step_s", "save_s", "stall_s", "loss", "samples_per_s", "interval_s", "image_share")
    whole = ("total_steps", "answered", "pid", "image_steps")
    for number, name in enumerate((*floats, *whole), start=1):
        setattr(control, name, number)
    assert [getattr(control, name) for name in (*floats, *whole)] == list(range(1, len(floats) + len(whole) + 1))
    assert control.path.stat().st_size == SIZE


def test_create_wipes_what_an_older_generation_left(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as old:
        old.request(AgentRequest.SAVE_STOP, 5.0)
        old.stepped(9)
    with Control.create(tmp_path / "ctl") as new:
        assert (new.requested, new.request_number, new.step, new.first_step_at) == (AgentRequest.NONE, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no control file"), (b"", "0 bytes, not 320"), (b"x" * SIZE, "different versions")],
)
def test_open_refuses_other_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "ctl").write_bytes(content)
    with pytest.raises(ControlError, match=message):
        Control.open(tmp_path / "ctl")


def empties(path: Path) -> None:
    os.truncate(path, 0)


def deletes(path: Path) -> None:
    path.unlink()


def replaces(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"mine")


def tramples(path: Path) -> None:
    path.write_bytes(b"\xff" * SIZE)


SPOILT = {empties: "0 bytes, not 320", deletes: "is gone", replaces: "is gone", tramples: "starts with"}


@pytest.mark.parametrize("spoil", SPOILT)
def test_an_agent_survives_any_damage_to_the_control_file(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """An emptied one was SIGBUS; and no number that stands there may come to an error, or hold up a stop for ever."""
    agent = Control.create(tmp_path / "ctl")
    assert agent.trouble() == ""
    spoil(tmp_path / "ctl")
    assert SPOILT[spoil] in agent.trouble()
    with Control.hold(tmp_path / "ctl") as after:
        assert after.trouble()
        for control in (agent, after):
            assert (control.state, control.requested, control.deadline) == (RunPhase.STARTING, AgentRequest.NONE, 0.0)
            assert (control.save_s, control.step_s) == (0.0, 0.0)
            control.disk_ready = True
            control.request(AgentRequest.SAVE_STOP, 5.0)
    agent.close()


def test_a_new_agent_reads_the_previous_agents_request(tmp_path: Path) -> None:
    with Control.create(tmp_path / "ctl") as before:
        before.request(AgentRequest.SAVE_STOP, 5.0)
    with Control.hold(tmp_path / "ctl") as after, Control.open(tmp_path / "ctl") as job:
        assert (after.trouble(), after.requested, after.deadline, after.request_number) == (
            "",
            AgentRequest.SAVE_STOP,
            5.0,
            1,
        )
        assert after.request(AgentRequest.SAVE_STOP, 4.0) == job.request_number == 2


def test_the_agent_never_reads_half_a_number(tmp_path: Path) -> None:
    """The job writes in its mapping while the agent reads, and the kernel promises nobody a whole word."""
    with Control.create(tmp_path / "ctl") as agent, Control.open(tmp_path / "ctl") as job:
        low, high = Commit(1, 0x0F_FFFF_FFFF), Commit(0xFFFF, 0)

        def writes() -> None:
            while True:
                job.committed(low, 0.0)
                job.committed(high, 0.0)

        job.committed(low, 0.0)
        writer = multiprocessing.get_context("fork").Process(target=writes)
        writer.start()
        seen = {agent.commit for _ in range(20_000)}
        writer.kill()
        writer.join()
    assert seen == {low, high}


@pytest.mark.parametrize("commit", [Commit(0, 0), Commit(1, 2), Commit(2**23, 2**40 - 1)])
def test_commits_round_trip_as_word_and_text(tmp_path: Path, commit: Commit) -> None:
    with Control.create(tmp_path / "ctl") as control:
        control.committed(commit)
        assert control.commit == commit
    assert Commit.parse(str(commit)) == commit


def test_a_later_generation_is_newer_whatever_the_step() -> None:
    assert Commit(2, 10) > Commit(1, 500) > Commit(1, 499)
    assert Commit.parse("tmp") is Commit.parse("1-") is Commit.parse("1--2") is Commit.parse("a-1") is None


@pytest.mark.parametrize("commit", [None, Commit(1, 40)])
def test_result_round_trip(tmp_path: Path, commit: Commit | None) -> None:
    assert read_result(tmp_path) is None
    write_result(tmp_path, RunResult("stopped", 1, 40, commit))
    assert read_result(tmp_path) == RunResult("stopped", 1, 40, commit)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "[" * 100_000, '{"outcome": "lost", "gen": 1, "step": 1, "commit": null}'),
        *('{"outcome": "done", "gen": 1e999, "step": 1, "commit": null}',),  # infinity has no whole number
        *('{"outcome": "done", "gen": 1, "step": -1, "commit": null}', f'{{"outcome": "done", "gen": {"9" * 50}}}'),
        *('{"outcome": "done", "gen": 1, "step": 1, "commit": "12"}',),
    ],
)
def test_an_invalid_result_counts_as_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("module", ["spotkeeper", "spotkeeper.train", "spotkeeper.train.agent_link.control"])
def test_the_control_file_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'numpy', 'msgspec'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


FULL = """
import sys
from pathlib import Path
from spotkeeper.train.agent_link.control import Control
folder = Path(sys.argv[1]) / "7"
folder.mkdir()
try:
    with (folder / "log").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
except OSError:
    Control.create(folder / "ctl")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small /run of its own")
def test_a_full_run_folder_is_an_error_and_does_not_end_the_agent(tmp_path: Path) -> None:
    """It was SIGBUS, at every start of the agent anew, so that nobody was told."""
    mount = 'mount -t tmpfs -o size=64k none "$0" && exec "$1" -c "$2" "$0"'
    command = ["unshare", "-m", "sh", "-c", mount, str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 1 and "No space left on device" in done.stderr, done
