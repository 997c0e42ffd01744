"""What a job leaves in its output folder: found, named, sent before its end is said, and never lost in silence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import JobRun, Progress, Role, SyncReply
from spotkeeper.contract.uploads import Output
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import check_key
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.cloud.storage import Bucket, StorageError
from spotkeeper_agent.core.events import Event, OutputThere
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job import outputs as output
from spotkeeper_agent.job.outputs import Outputs, OutputUpload, find, plain
from tests.agent.fakes import JOB, Fake, Machine, document, source, wait_until

Make = Callable[..., Machine]

LEAVES = '''
"""Leaves a model, as a script does that ends well."""
import os, pathlib, sys
out = pathlib.Path(os.environ["SPOTKEEPER_OUTPUT"])
assert out.is_dir() and "/mnt/sk-data/" in str(out)
(out / "runs").mkdir(exist_ok=True)
(out / "runs/epoch=3 best.pt").write_bytes(b"weights" * 1000)
(out / "model.pt").write_bytes(os.environ["SPOTKEEPER_GEN"].encode())
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
'''


def the_list(fake: Fake, node: int = 0) -> Output:
    return msgspec.json.decode(fake.objects[f"jobs/{JOB}/out/{node}.json"], type=Output)


def leaves(vm: Machine, *args: str) -> JobRun:
    sha256 = source(vm.fake, {"train.py": LEAVES})
    return JobRun(name="job", command=("train.py", *args), source_sha256=sha256, python=vm.light_python())


def begin(fake: Fake, vm: Machine, run: JobRun) -> None:
    """Boot, with the data disk, and become the only member of generation 1."""
    vm.attach_disk()
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(1, 1, (vm.member(disk=True),)), run, disk=0)


# ---------------------------------------------------------------- what is kept, and under which name


@pytest.mark.parametrize("path", ["model.pt", "a/b-c_d/e.0", "..a/..."])
def test_a_plain_path_keeps_its_name(path: str) -> None:
    assert plain(path) == path
    check_key(f"jobs/{JOB}/out/12/{path}")


@pytest.mark.parametrize("path", ["epoch=3.ckpt", "a b/c", "ü.pt", "x" * 700, "d/" * 300 + "y", "d/" + "y" * 600])
def test_any_other_path_gets_a_unique_valid_name(path: str) -> None:
    name = plain(path)
    check_key(f"jobs/{JOB}/out/12/{name}")
    assert name != path and name == plain(path)
    assert len({name, plain(path + "="), plain(path.replace("=", "+"))}) == (3 if "=" in path else 2)


def test_agent_and_readers_use_the_same_names() -> None:
    assert output.list_name(JOB, 3) == paths.output_list(JOB, 3)
    assert output.folder_name(JOB, 3) + "a/b" == paths.output_file(JOB, 3, "a/b")


def test_only_files_inside_the_folder_are_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, spare = tmp_path / "out", tmp_path / "spare"
    (out / "sub").mkdir(parents=True)
    spare.mkdir()
    (tmp_path / "secret").write_text("of the machine")
    (out / "sub/a.pt").write_bytes(b"a")
    (out / "best.pt").symlink_to("sub/a.pt")
    (out / "evil").symlink_to(tmp_path / "secret")
    (out / "all").symlink_to(tmp_path, target_is_directory=True)
    (out / "gone").symlink_to("nowhere")
    os.mkfifo(out / "pipe")
    (out / os.fsdecode(b"\xff.pt")).write_bytes(b"x")
    (out / "twice").write_bytes(b"old")
    (spare / "twice").write_bytes(b"newer")
    os.utime(out / "twice", ns=(1, 1))
    found, left_out = find((out, spare, tmp_path / "none"))
    assert {each.path: (each.folder / each.file).read_bytes() for each in found} == {
        "best.pt": b"a",
        "sub/a.pt": b"a",
        "twice": b"newer",
    }
    assert sorted(left_out) == [
        "\\udcff.pt: its name is not UTF-8",
        "all: a link out of the folder",
        "evil: a link out of the folder",
        "gone: a broken link",
        "pipe: not a regular file",
    ]
    monkeypatch.setattr(output, "MOST_FILES", 2)
    found, left_out = find((out,))
    assert len(found) == 2 and "1 files beyond the limit of 2: pack several into one" in left_out


# ---------------------------------------------------------------- one upload, against a bucket


@pytest.fixture
def bucket(fake: Fake) -> Bucket:
    fake.instance("7", "m")
    return Gce(Clock(), fake.listen("7")).storage(fake.url, "bucket")


def test_the_list_comes_last_and_a_repeat_sends_only_missing_files(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"\0" * output.ASKED_BYTES)
    (tmp_path / "empty").touch()
    (tmp_path / "a b").write_text("small")
    assert OutputUpload(bucket, JOB, 2, 5, (tmp_path,)).work() == OutputThere(5, 3)
    assert fake.sent[-1] == f"jobs/{JOB}/out/2.json", "a list that is there is whole"
    listed = the_list(fake, 2)
    assert (listed.gen, [file.path for file in listed.files]) == (5, ["a b", "big", "empty"])
    for file in listed.files:
        assert fake.objects[f"jobs/{JOB}/out/2/{file.name}"] == (tmp_path / file.path).read_bytes()
    fake.sent.clear()
    assert OutputUpload(bucket, JOB, 2, 6, (tmp_path,)).work().files == 3
    assert f"jobs/{JOB}/out/2/big" not in fake.sent
    fake.objects[f"jobs/{JOB}/out/2/big"] = b"\1" * output.ASKED_BYTES  # as long, but another
    OutputUpload(bucket, JOB, 2, 6, (tmp_path,)).work()
    assert fake.objects[f"jobs/{JOB}/out/2/big"] == (tmp_path / "big").read_bytes()


def test_a_retry_sends_only_refused_files(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    upload = OutputUpload(bucket, JOB, 0, 1, (tmp_path,))
    fake.storage_status = lambda name: 503 if name.endswith("/b") else 200
    with pytest.raises(StorageError, match="out/0/b: HTTP 503"):
        upload.work()
    assert f"jobs/{JOB}/out/0.json" not in fake.objects
    fake.storage_status = lambda name: 200
    fake.sent.clear()
    upload.work()
    assert [name.rpartition("/")[2] for name in fake.sent] == ["b", "c", "0.json"]


def test_a_damaged_upload_is_an_error(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("weights")
    lies = Gce(Clock(), fake.listen("7")).storage(fake.url, "bucket")
    send = lies.send
    lies.send = lambda name, content: replace(send(name, content), md5="0" * 32)  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="differs from what was sent"):
        OutputUpload(lies, JOB, 0, 1, (tmp_path,)).work()


# ---------------------------------------------------------------- how long it is tried, and what is said meanwhile


class Still:
    """A helper that does nothing by itself."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Event]] = []

    def do(self, what: str, work: Callable[[], Event]) -> None:
        self.work.append(work)

    def busy(self, what: str) -> bool:
        return False


class Hand:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 0.0

    def steady(self) -> float:
        return self.at

    now = steady

    def real_s(self, virtual_s: float) -> float:
        return virtual_s


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def outputs(bucket: Bucket, tmp_path: Path, hand: Hand) -> Outputs:
    log = Log(write=lambda _: None)
    return Outputs(bucket, Still(), tmp_path / "mnt", tmp_path / "spare", hand, log)  # type: ignore[arg-type]


def test_a_job_without_output_ends_at_once(outputs: Outputs) -> None:
    assert outputs.folder(JOB, disk=True).is_dir() and outputs.folder(JOB, disk=False).is_dir()
    assert not outputs.begin(JOB, 0, 1, Progress(1, 9, 0.0))
    assert outputs.upload is None


def test_it_gives_up_after_a_quarter_of_an_hour_without_a_file(outputs: Outputs, hand: Hand) -> None:
    (outputs.folder(JOB, disk=False) / "a").write_text("a")
    assert outputs.begin(JOB, 0, 1, Progress(1, 9, 0.0)) and outputs.upload is not None
    assert outputs.failed("HTTP 503") is None
    hand.at = 899.0
    assert outputs.failed("HTTP 503") is None
    outputs.upload.count += 1  # something came through
    hand.at = 1000.0
    assert outputs.failed("HTTP 503") is None
    hand.at = 1901.0
    why = outputs.failed("out/0/a: HTTP 403")
    assert why is not None and why.endswith("could not be uploaded to the bucket: out/0/a: HTTP 403")
    assert outputs.upload is None and not outputs.done(OutputThere(1, 1)), "what comes later is of no interest"


def test_a_long_upload_reports_progress_each_minute(outputs: Outputs, hand: Hand) -> None:
    (outputs.folder(JOB, disk=True) / "a").write_text("a")
    outputs.begin(JOB, 0, 1, Progress(1, 9, 0.0))
    assert outputs.beat() is None
    hand.at = 61.0
    told = outputs.beat()
    assert told is not None and (told.gen, told.step, told.at) == (1, 9, 61.0) and told.uploading_s is not None
    assert outputs.beat() is None


# ---------------------------------------------------------------- the agent


def test_the_exit_is_reported_once_after_the_upload(fake: Fake, machine: Make) -> None:
    """A bucket that refuses, a notice, and an agent that is killed meanwhile."""
    vm = machine()
    fake.storage_status = lambda name: 503 if name.endswith("/out/0/model.pt") else 200
    begin(fake, vm, leaves(vm))
    fake.wait(lambda: f"jobs/{JOB}/out/0/model.pt" in fake.sent)
    fake.instance(vm.uid, vm.name, preempted="TRUE")
    fake.wait_fact(vm.uid, Kind.NOTICE)
    vm.kill()
    fake.sent.clear()
    vm.start()
    fake.wait(lambda: f"jobs/{JOB}/out/0/model.pt" in fake.sent)
    assert Kind.EXIT not in {fact.kind for _, fact in fake.facts}
    fake.storage_status = lambda name: 200
    assert fake.wait_fact(vm.uid, Kind.EXIT, 1).value == "0"
    assert [file.path for file in the_list(fake).files] == ["model.pt", "runs/epoch=3 best.pt"]
    assert fake.objects[f"jobs/{JOB}/out/0/model.pt"] == b"1"


def test_a_newer_generation_replaces_an_upload(fake: Fake, machine: Make) -> None:
    vm = machine()
    fake.storage_status = lambda name: 503 if "/out/" in name else 200
    run = leaves(vm)
    begin(fake, vm, run)
    fake.wait(lambda: any("/out/" in name for name in fake.sent))
    vm.serve(document(2, 2, (vm.member(disk=True),)), run, disk=0)
    wait_until(lambda: vm.log().count('"job.start"') == 2, 40)
    fake.storage_status = lambda name: 200
    assert fake.wait_fact(vm.uid, Kind.EXIT).gen == 2, "the end of the first one is of no interest"
    assert (the_list(fake).gen, fake.objects[f"jobs/{JOB}/out/0/model.pt"]) == (2, b"2")


def test_a_refusing_bucket_is_an_error_with_its_reason(fake: Fake, machine: Make) -> None:
    """So the job holds in the end, and its disks stay; an exit that was one already uploads nothing."""
    vm = machine(clock=f"{time.time()}:{time.time()}:900")
    fake.storage_status = lambda name: 403 if "/out/" in name else 200
    begin(fake, vm, leaves(vm, "3"))
    assert fake.wait_fact(vm.uid, Kind.EXIT, 1).value == "3"
    assert not [name for name in fake.sent if "/out/" in name]
    vm.serve(document(2, 2, (vm.member(disk=True),)), leaves(vm), disk=0)
    assert fake.wait_fact(vm.uid, Kind.EXIT, 2).value == str(output.FAILED)
    log = f"jobs/{JOB}/logs/0/2.log"
    fake.wait(lambda: b"could not be uploaded to the bucket" in fake.objects.get(log, b""))
    assert fake.objects[log].rstrip().endswith(b"HTTP 403")


def test_a_superseded_machine_closes_the_files(fake: Fake, machine: Make) -> None:
    vm = machine()
    fake.storage_status = lambda name: 503 if "/out/" in name else 200
    begin(fake, vm, leaves(vm))
    fake.wait(lambda: any("/out/" in name for name in fake.sent))
    fake.reply(vm.uid, SyncReply(Role.SUPERSEDED, JOB, 0, 1))
    fake.wait_fact(vm.uid, Kind.FREED)
    assert Kind.EXIT not in {fact.kind for _, fact in fake.facts}
    assert vm.agent is not None and vm.agent.wait(10) == 0
