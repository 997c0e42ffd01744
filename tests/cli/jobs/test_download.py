"""``download``: what a job left, whole and in its folder, or why there is nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest

from spotkeeper.cli.jobs import download as fetching
from spotkeeper.client.errors import Exit
from spotkeeper.client.pack import pack
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.uploads import Output, OutputFile
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job

FILES = {"model.pt": b"weights" * 1000, "runs/epoch=3.ckpt": b"x" * 100, "empty": b""}


def leave(store: Store, node: int, files: dict[str, bytes], *, gen: int = 2, left_out: tuple[str, ...] = ()) -> None:
    """As an agent does at the end of its job."""
    listed = []
    for number, (path, data) in enumerate(files.items()):
        store.put(paths.output_file(JOB, node, f"f{number}"), data)
        listed.append(OutputFile(path, f"f{number}", len(data), hashlib.md5(data, usedforsecurity=False).hexdigest()))
    store.put(paths.output_list(JOB, node), msgspec.json.encode(Output(gen, tuple(listed), left_out)))


def ended(store: Store, outcome: Outcome = Outcome.SUCCEEDED, **over: object) -> None:
    a_job(store, phase=Phase.DONE, outcome=outcome, **over)
    store.clear_active(JOB)
    store.delete_name("first", JOB)
    store.put_tomb(JOB, 1.0)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "here"
    home.mkdir()
    monkeypatch.chdir(home)
    return home


def test_an_ended_job_is_found_by_name_and_fetched_whole(
    cli: Cli, store: Store, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "PART", 1000)  # bytes: a file takes several requests
    ended(store)
    leave(store, 0, FILES)
    leave(store, 1, {"model.pt": b"of node 1"}, left_out=("evil: a link out of the folder",))
    done = cli("download", "first")
    assert done.code == 0 and "first-output/0/model.pt  7.0 kB" in done.out
    assert done.err == "missing from the output: node 1: evil: a link out of the folder\n"
    for path, data in FILES.items():
        assert (here / "first-output/0" / path).read_bytes() == data
    assert (here / "first-output/1/model.pt").read_bytes() == b"of node 1"
    status = cli("status", JOB)
    assert "output: 4 files, 7.1 kB; fetch it: spotkeeper download first" in status.out
    assert json.loads(cli("status", JOB, "--json").out)["output"] == {"files": 4, "bytes": 7109}


def test_downloaded_output_is_not_uploaded_with_the_next_job(cli: Cli, store: Store, here: Path) -> None:
    (here / "train.py").write_text("print(1)\n")
    before = pack(here).sha256
    ended(store)
    leave(store, 0, FILES)
    assert cli("download", "first").code == 0
    assert pack(here).sha256 == before


def test_a_second_download_fetches_only_missing_or_changed_files(cli: Cli, store: Store, here: Path) -> None:
    ended(store)
    leave(store, 0, FILES)
    first = json.loads(cli("download", "first", "models", "--json").out)
    assert (first["job"], first["folder"], [file["was_there"] for file in first["files"]]) == (
        JOB,
        "models",
        [False] * 3,
    )
    assert not (here / "models/.gitignore").exists(), "a folder of the user's own is left as it is"
    (here / "models/0/empty").unlink()
    (here / "models/0/model.pt").write_bytes(b"WEIGHTS" * 1000)  # as long
    again = json.loads(cli("download", "first", "models", "--json").out)
    assert {file["path"]: file["was_there"] for file in again["files"]} == {
        "model.pt": False,
        "runs/epoch=3.ckpt": True,
        "empty": False,
    }
    assert (here / "models/0/model.pt").read_bytes() == FILES["model.pt"]


def test_a_file_arrives_whole_or_not_at_all(cli: Cli, store: Store, here: Path) -> None:
    ended(store)
    leave(store, 0, FILES)
    store.put(paths.output_file(JOB, 0, "f0"), b"torn")
    done = cli("download", "first")
    assert done.code == Exit.FAILED and "is not the file of 7000 bytes that" in done.err
    assert [path.name for path in (here / "first-output/0").iterdir()] == []


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "", ".", "link/evil", "a\0b"])
def test_no_path_leads_out(cli: Cli, store: Store, here: Path, path: str) -> None:
    ended(store)
    leave(store, 0, {"good": b"1", path: b"evil"})
    (here / "models/0").mkdir(parents=True)
    (here / "models/0/link").symlink_to(here, target_is_directory=True)
    done = cli("download", "first", "models")
    assert done.code == Exit.REFUSED and "would be outside models/0; nothing was fetched" in done.err
    assert not (here / "evil").exists() and not (here / "models/0/good").exists()


def test_a_single_nodes_output_can_be_downloaded(cli: Cli, store: Store, here: Path) -> None:
    ended(store)
    leave(store, 1, {"model.pt": b"1"})
    assert cli("download", "first", "--node", 1).code == 0
    assert (here / "first-output/1/model.pt").read_bytes() == b"1"
    done = cli("download", "first", "--node", 0)
    assert done.code == Exit.MISSING and "node 0 has no output" in done.err and "nodes with output: 1" in done.err
    assert cli("download", "first", "--node", 2).code == Exit.MISSING


def test_output_of_different_generations_is_not_mixed(cli: Cli, store: Store, here: Path) -> None:
    ended(store, gen=3)
    leave(store, 0, {"model.pt": b"older"}, gen=2)
    leave(store, 1, {"model.pt": b"newer"}, gen=3)
    assert cli("download", "first").code == 0
    assert not (here / "first-output/0").exists()


def test_missing_output_is_explained(cli: Cli, store: Store) -> None:
    a_job(store)
    done = cli("download", "first")
    assert (
        done.code == Exit.MISSING
        and "first (abcdefgh) is still running" in done.err
        and "spotkeeper watch first" in done.err
    )


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"outcome": Outcome.SUCCEEDED}, "its script wrote no file to SPOTKEEPER_OUTPUT (run.output)"),
        ({"outcome": Outcome.CANCELLED, "reason": "cancelled by ann"}, "it did not succeed (cancelled by ann)"),
    ],
)
def test_an_ended_job_without_output_is_reported(cli: Cli, store: Store, over: dict[str, object], words: str) -> None:
    ended(store, **over)
    done = cli("download", "first")
    assert done.code == Exit.MISSING and words in done.err
    assert "output:" not in cli("status", JOB).out


def test_a_job_on_hold_names_the_resume_command(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.HOLD, hold=Hold.FAILURE, reason="node 0 exited with 1")
    done = cli("download", "first")
    assert done.code == Exit.MISSING and "on hold (node 0 exited with 1)" in done.err
    assert "try: spotkeeper resume first" in done.err


def test_no_more_of_a_list_is_read_than_an_agent_writes(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(store)
    store.put(paths.output_list(JOB, 1), b'{"gen":1}' + b" " * 40)
    monkeypatch.setattr("spotkeeper.cli.jobs.download.LIST_BYTES", 8)
    done = cli("download", "first")
    assert done.code == Exit.FAILED and "is damaged" in done.err


def test_a_damaged_list_is_named(cli: Cli, store: Store) -> None:
    ended(store)
    store.put(paths.output_list(JOB, 1), b'{"gen": "x"}')
    done = cli("download", "first")
    assert done.code == Exit.FAILED and f"{paths.output_list(JOB, 1)} is damaged" in done.err
