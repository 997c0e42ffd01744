"""Of several that fail, the first: who failed of itself, and who only because a peer was gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spotkeeper.contract.facts import Failure
from spotkeeper_agent.core.settings import job_path
from spotkeeper_agent.job import failures
from spotkeeper_agent.launcher import torchrun


class DistNetworkError(RuntimeError):
    """By torch's name, without torch."""


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:27042"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError(GLOO), True),
        (DistNetworkError("The client socket has timed out"), True),
        (RuntimeError("NCCL communicator was aborted on rank 3."), True),
        (raised(ValueError("step 7 failed"), RuntimeError(GLOO)), True),
        (ValueError("Connection closed by peer"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a data set that is read over the network
        (RuntimeError("CUDA out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_about_a_lost_peer_are_recognised(error: BaseException, follows: bool) -> None:
    assert torchrun.follows(error) is follows


def test_an_error_while_a_lost_peer_is_handled_follows_it_too() -> None:
    error = ValueError("cannot log the failure")
    error.__context__ = RuntimeError(GLOO)
    assert torchrun.follows(error)


def test_a_cyclic_exception_chain_ends() -> None:
    one, other = ValueError("a"), ValueError("b")
    one.__cause__, other.__cause__ = other, one
    assert not torchrun.follows(one)


@pytest.mark.parametrize(
    ("code", "said", "follows"),
    [
        (-9, "", False),
        (-15, "", True),
        (7, "", False),
        (-6, "assert failed", False),
        (-6, "[ProcessGroupNCCL] x", True),
    ],
)
def test_torchrun_notes_killed_workers(tmp_path: Path, code: int, said: str, follows: bool) -> None:
    home = tmp_path / "logs/x/attempt_0/2"
    home.mkdir(parents=True)
    (home / "stderr.log").write_text(said)
    torchrun.note_exit(tmp_path, 2, code, 5.0)
    assert failures.first(tmp_path) == Failure(follows, 5000, 2)


def test_a_workers_own_note_is_kept(tmp_path: Path) -> None:
    torchrun.note(tmp_path, 0, ValueError("x" * 9000))
    torchrun.note_exit(tmp_path, 0, 1, 5.0)
    noted = json.loads((tmp_path / "error.0").read_text())
    assert noted["what"].startswith("ValueError: xxx") and len(noted["what"]) == 500
    (home := tmp_path / "logs/x/attempt_0/0").mkdir(parents=True)
    (home / "stderr.log").write_text("Fatal Python error: Segmentation fault\n")
    torchrun.note_fatal(tmp_path)
    assert json.loads((tmp_path / "error.0").read_text()) == noted
    torchrun.note(tmp_path / "gone", 0, ValueError())  # a folder that takes nothing hides no failure


def test_the_first_failure_is_the_earliest_without_a_peers_cause(tmp_path: Path) -> None:
    assert failures.first(tmp_path) is None
    for rank, (at, follows) in enumerate([(1.0, True), (3.0, False), (2.0, False)]):
        (tmp_path / f"error.{rank}").write_text(json.dumps({"at": at, "what": "", "follows": follows}))
    (tmp_path / "error.x").write_text("{}")
    (tmp_path / "error.9").write_text("no JSON")
    for name, at in (("5", 1e308), ("6", 1e300), ("7", -1.0), ("99999999999", 0.5), ("-1", 0.5)):  # as a job may write
        (tmp_path / f"error.{name}").write_text(json.dumps({"at": at, "what": "", "follows": False}))
    assert failures.first(tmp_path) == Failure(False, 2000, 2)


@pytest.mark.parametrize("text", ["", "own", "own-1", "own-1-2-3", "none-1-2", "own--1-2"])
def test_invalid_notes_are_ignored(text: str) -> None:
    assert Failure.parse(text) is None
    assert Failure.parse(str(Failure(True, 7, 3))) == Failure(True, 7, 3)


RAISES = "from spotkeeper.train.core.errors import CallError\nraise CallError('mine')\n"


@pytest.mark.parametrize(
    ("script", "code", "what"),
    [
        (f"import sys\nsys.excepthook = lambda *_: 1 / 0\n{RAISES}", 93, "CallError: mine"),
        (f"import sys\nsys.stderr = sys.stdout = None\n{RAISES}", 93, "CallError: mine"),
        (f"import os\nos.close(1)\nos.close(2)\n{RAISES}", 93, "CallError: mine"),
        ("import sys\nsys.excepthook = lambda *_: sys.exit(7)\nraise ValueError('mine')", 7, "ValueError: mine"),
    ],
    ids=["hook fails", "no stderr", "closed", "hook exits"],
)
def test_an_unprintable_failure_keeps_its_exit_code(tmp_path: Path, script: str, code: int, what: str) -> None:
    """The order that a restart cannot help got lost, and the job was tried again and again."""
    (tmp_path / "train.py").write_text(script)
    boot = Path(torchrun.__file__).with_name("boot.py")
    env = {"PYTHONPATH": str(job_path()), "SPOTKEEPER_RUN": str(tmp_path), "LOCAL_RANK": "0"}
    subprocess.run([sys.executable, "-S", boot, tmp_path / "train.py"], env=env, capture_output=True, check=False)
    assert (tmp_path / "exit.0").read_text() == f"{code}\n"
    assert json.loads((tmp_path / "error.0").read_text())["what"].endswith(what)


def test_exit_files_half_written_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "exit.0").write_text("0\n")
    (tmp_path / "exit.1.tmp").write_text("93\n")
    (tmp_path / "exit.2").write_text("")
    assert failures.exit_codes(tmp_path) == [0]
