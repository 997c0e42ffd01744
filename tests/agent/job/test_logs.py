"""The logs that an agent uploads: their ends, bounded, without secrets, whatever a job names its folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract import redact as redaction
from spotkeeper.contract import uploads
from spotkeeper.contract.redact import redact
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job import failures, logs
from spotkeeper_agent.job.chunks import LAUNCHER_LOG, NodeRun
from spotkeeper_agent.launcher import output

QUIET = Log(write=lambda _: None)
RUN = NodeRun("abcdefgh", 0, 1)


@pytest.mark.parametrize("name", [b"\xff\xfe", "\u00b2".encode()], ids=["bytes", "superscript"])
def test_an_odd_folder_name_does_not_stop_log_uploads(tmp_path: Path, name: bytes) -> None:
    odd = tmp_path / "logs" / os.fsdecode(name)
    odd.mkdir(parents=True)
    (odd / "stdout.log").write_bytes(b"said\n")
    told = logs.collect(tmp_path)
    assert b"said" in told
    told.decode("utf-8")


def test_secrets_do_not_reach_the_log() -> None:
    text = "Authorization: Bearer abc.def and eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJ4In0.sig and ya29.a0Af-x"
    assert redact(text) == "[removed] and [removed] and [removed]"
    lines: list[str] = []
    Log(write=lines.append)("x", detail=text)
    assert "ya29" not in lines[0] and json.loads(lines[0])["event"] == "x"


def test_uploaded_logs_are_bounded_ends(tmp_path: Path) -> None:
    for node in range(2):
        home = tmp_path / f"logs/run_x/attempt_0/{node}"
        home.mkdir(parents=True)
        (home / "stdout.log").write_bytes(b"o" * (1 << 20) + f"end {node}".encode())
        (home / "stderr.log").write_bytes(f"trouble {node}".encode())
    (tmp_path / LAUNCHER_LOG).write_bytes(b"torchrun says")
    text = logs.collect(tmp_path, "why").decode()
    assert len(text) < 3 * logs.TAIL_BYTES
    order = ["torchrun says", "local rank 0, stdout", "end 0", "end 1", "trouble 0", "trouble 1", "why"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)


@pytest.mark.parametrize("cut", range(10))
def test_a_secret_at_the_beginning_of_an_uploaded_end_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    monkeypatch.setattr(redaction, "_known", {"hush-hush"})
    text = b"before hush-hush" + b"." * (logs.TAIL_BYTES - cut)
    (tmp_path / LAUNCHER_LOG).write_bytes(text)
    (found,) = uploads.split_log(logs.collect(tmp_path))
    assert found.start == len(text) - logs.TAIL_BYTES
    assert found.text == b"*" * cut + b"." * (logs.TAIL_BYTES - cut)


def test_a_log_names_machine_file_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "logs/run_x/attempt_0/0/stdout.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(20_000)) + b"--- no heading: \xff")
    for extra in ("", "why"):
        (found, *rest) = uploads.split_log(logs.collect(tmp_path, extra, logs.whose(2, "sk-x-n0002-a1")))
        assert (found.title, found.path) == ("node 2 (sk-x-n0002-a1) stdout", str(path))
        assert found.text == path.read_bytes()[found.start :] and found.text.startswith(b"line "), "whole lines"
        assert [part.text.decode() for part in rest] == [extra] * bool(extra)


def test_many_ranks_share_an_upload(tmp_path: Path) -> None:
    for node in range(16):
        path = tmp_path / f"logs/run_x/attempt_0/{node}/stdout.log"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"line\n" * 20_000)
    data = logs.collect(tmp_path)
    assert len(uploads.split_log(data)) == 16, "none is cut off, nor its heading"
    assert len(data) < logs.TOTAL_BYTES * 1.05


TORCHRUN = """W1121 05:58 api.py:1028] Sending process 26 closing signal SIGTERM
E1121 05:58 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 27) of binary: python
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1142, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
"""


def test_a_job_that_prints_for_weeks_does_not_fill_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/run`` is memory; once it was full, the job's next line failed, and so did all that the agent writes."""
    monkeypatch.setattr(output, "KEPT_BYTES", 1 << 20)
    path = tmp_path / "logs/x/attempt_0/0/stdout.log"
    path.parent.mkdir(parents=True)
    (tmp_path / LAUNCHER_LOG).symlink_to(path)  # what is no log of ours is not touched
    uploads: list[bytes] = []
    bucket: Any = SimpleNamespace(write=lambda _, content: uploads.append(content))
    uploader = logs.Uploader(bucket, tmp_path / "chunks", Clock(), QUIET)
    with path.open("wb") as job:
        for number in range(8):
            job.write(b"%07d\n" % number * (1 << 17))
            job.flush()
            uploader._upload(logs.Task(RUN, tmp_path), b"")
    assert path.stat().st_size == 8 << 20, "its writer goes on where it was"
    assert path.stat().st_blocks * 512 <= 3 << 20
    assert path.read_bytes().endswith(b"0000006\n" + b"0000007\n" * (1 << 17))
    assert uploads[-1].endswith(b"0000007\n") and b"\0" not in uploads[-1]


def test_invalid_exit_files_and_missing_folders_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs/x/0").mkdir(parents=True)
    (tmp_path / "logs/x/0/stderr.log").write_text("its last words")
    (tmp_path / "exit.0").write_bytes(b"\xff\xfe")
    (tmp_path / "exit.1").write_text("9" * 4000)
    assert all(0 <= code < 256 for code in failures.exit_codes(tmp_path)), "a longer number makes no fact"
    assert b"its last words" in logs.collect(tmp_path)
    uploader = logs.Uploader(Any, tmp_path / "chunks", Clock(), QUIET)  # type: ignore[arg-type]

    def gone(*_: object) -> bytes:
        raise FileNotFoundError("logs/x")

    monkeypatch.setattr(logs, "collect", gone)
    assert uploader._upload(logs.Task(RUN, tmp_path), b"sent") == b"sent"


def test_a_failed_jobs_log_ends_with_the_first_failure(tmp_path: Path) -> None:
    said = {0: "ValueError: the data is wrong", 1: "Connection closed by peer", 2: "", 10: "Connection closed by peer"}
    for node, words in said.items():
        home = tmp_path / f"logs/run_x/attempt_0/{node}"
        home.mkdir(parents=True)
        (home / "stderr.log").write_text(words)
    for at, node in enumerate((1, 0, 10)):  # 2 goes on
        (tmp_path / f"error.{node}").write_text(json.dumps({"at": at, "follows": node != 0}))
    (tmp_path / LAUNCHER_LOG).write_text(TORCHRUN)
    text = logs.collect(tmp_path).decode()
    assert text.endswith("ValueError: the data is wrong")
    assert "failed (exitcode: 1) local_rank: 0" in text
    assert "ChildFailedError" not in text and "run.py" not in text


def test_torchruns_own_errors_are_kept_whole(tmp_path: Path) -> None:
    trouble = 'Traceback (most recent call last):\n  File "x"\ntorch.distributed.DistNetworkError: EADDRINUSE'
    (tmp_path / LAUNCHER_LOG).write_text(trouble)
    assert trouble in logs.collect(tmp_path).decode()
