"""The whole agent as a process on an EC2 instance: strict metadata service, a server that checks signatures, S3."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import JobRun
from spotkeeper.contract.uploads import Output
from spotkeeper_agent.cloud.ec2 import ACTION, REBALANCE, Ec2
from tests.agent.agent.test_agent import commit_of, step_of
from tests.agent.cloud import aws
from tests.agent.cloud.aws import S3Server, keys_of, refusal
from tests.agent.cloud.imds import UID, Imds, instance, iso
from tests.agent.fakes import JOB, Fake, Machine, document, source, wait_until
from tests.agent.jobs import OBEDIENT

WRITES = OBEDIENT + '\nopen(os.environ["SPOTKEEPER_OUTPUT"] + "/model.pt", "wb").write(b"weights" * 100_000)\n'


class AwsFake(Fake):
    """The function behind its URL: IAM lets through what the instance's role has signed, and says who signed."""

    def __init__(self, imds: Imds) -> None:
        super().__init__()
        self.imds = imds
        self.refused: list[str] = []

    def who(self, handler: BaseHTTPRequestHandler, body: bytes) -> str:
        url = f"{self.url}{handler.path}"
        code = refusal(keys_of(self.imds), "POST", url, dict(handler.headers), body, "lambda", 300)
        if code is not None:
            self.refused.append(code)
        return "" if code is not None else UID


class AwsMachine(Machine):
    """Its metadata is the instance's, whatever the base class made up for it."""

    imds: Imds

    def metadata_environ(self) -> dict[str, str]:
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.imds.url}


@pytest.fixture
def imds() -> Iterator[Imds]:
    with instance() as made:
        yield made


@pytest.fixture
def fake(imds: Imds) -> Iterator[AwsFake]:
    cloud = AwsFake(imds)
    yield cloud
    cloud.close()


@pytest.fixture
def s3_server(imds: Imds) -> Iterator[S3Server]:
    with aws.s3("sk-bucket", lambda: keys_of(imds)) as made:
        yield made


@pytest.fixture
def vm(fake: AwsFake, imds: Imds, s3_server: S3Server, tmp_path: Path) -> Iterator[AwsMachine]:
    tags = {
        "sk-stack": "test",
        "sk-function": f"{fake.url}/fn",
        "sk-bucket": s3_server.name,
        "sk-storage": s3_server.url,
    }
    imds.tags({"Name": f"sk-test-{JOB}-n0000-a1"} | tags)
    made = AwsMachine(fake, tmp_path / "vm")
    made.uid, made.imds = UID, imds
    yield made
    made.end()
    if made.agent is not None:
        print(made.log())


def begin(fake: AwsFake, vm: AwsMachine, s3_server: S3Server, *args: str) -> JobRun:
    sha256 = source(fake, {"train.py": WRITES})
    Ec2(Clock(), vm.imds.url).storage(s3_server.url, s3_server.name).write(
        f"jobs/{JOB}/source/{sha256}", fake.objects.pop(f"jobs/{JOB}/source/{sha256}")
    )
    run = JobRun(name="job", command=("train.py", *args), source_sha256=sha256, python=vm.light_python())
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(1, 1, (vm.member(),)), run)
    return run


def test_an_agent_trains_and_powers_off_on_ec2(fake: AwsFake, vm: AwsMachine, s3_server: S3Server, imds: Imds) -> None:
    begin(fake, vm, s3_server)
    wait_until(lambda: step_of(vm, 1) > 0)

    imds.put_at(REBALANCE, {"noticeTime": iso(time.time())})
    risk = fake.wait_fact(vm.uid, Kind.NOTICE, 1)
    assert int(risk.value) - time.time() > 3000, "a successor is asked for, and nobody stops"
    wait_until(lambda: commit_of(vm, 1))
    saved = step_of(vm, 1)
    wait_until(lambda: step_of(vm, 1) > saved)

    imds.new_keys()  # AWS takes the old ones no more: the refused request is signed anew
    wait_until(lambda: fake.refused)
    heard = len(fake.syncs)
    fake.wait(lambda: len(fake.syncs) > heard)

    end = int(time.time()) + 8
    imds.put_at(ACTION, {"action": "terminate", "time": iso(end)})
    released = fake.wait_fact(vm.uid, Kind.RELEASED, 1)
    assert int(released.value) > saved
    told = [(kind, value) for kind, _, value in fake.kinds(vm.uid) if kind in ("notice", "reprieve")]
    assert told == [("notice", risk.value), ("notice", str(end)), ("reprieve", risk.value)], "at no time without any"
    assert set(fake.refused) == {"InvalidAccessKeyId"}
    wait_until(lambda: b"hello from 0" in s3_server.content(f"jobs/{JOB}/logs/0/1.log"))


def test_output_is_in_s3_before_the_exit_is_reported(fake: AwsFake, vm: AwsMachine, s3_server: S3Server) -> None:
    vm.imds.ahead_s = 120.0  # or this machine's clock is behind
    begin(fake, vm, s3_server, "3")
    assert fake.wait_fact(vm.uid, Kind.EXIT, 1).value == "0"
    there = msgspec.json.decode(s3_server.content(f"jobs/{JOB}/out/0.json"), type=Output)
    assert [(file.path, file.size) for file in there.files] == [("model.pt", 700_000)]
    assert s3_server.content(f"jobs/{JOB}/out/0/model.pt") == b"weights" * 100_000
    assert s3_server.refused == [] and fake.refused == []
    assert fake.wait_fact(vm.uid, Kind.PREFLIGHT_FAILED, 1).value == "clock"
    assert "s against the metadata server" in vm.log() and "chrony" in vm.log(), "what it found, and what to do"


def test_a_missing_tag_is_a_permanent_setup_error(vm: AwsMachine, imds: Imds, tmp_path: Path) -> None:
    imds.tags({"Name": "x", "sk-stack": "test"})
    vm.start()
    assert vm.agent is not None and vm.agent.wait(30) == 78
    assert "sk-function, sk-bucket" in vm.log()
