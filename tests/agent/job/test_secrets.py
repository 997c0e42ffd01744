"""What a job is given besides its file: its identity's variables, and its secrets, which no log shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from spotkeeper.contract import redact
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import JobRun
from spotkeeper_agent.cloud.identity import IdentityError, IdentityServer
from spotkeeper_agent.core.events import Event, Failed, HelperThread, SecretsRead
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job.chunks import LAUNCHER_LOG
from spotkeeper_agent.job.logs import collect
from spotkeeper_agent.job.prepare import TRIES, JobSecrets
from tests.agent.fakes import JOB, Fake, Machine, document, source, wait_until

Make = Callable[..., Machine]
REFERENCES = {"HF_TOKEN": "gcp-secret://projects/p/secrets/hf/versions/latest"}
VALUE = "correct horse battery"


class Vault:
    """An identity that reads one secret, once it may."""

    def __init__(self) -> None:
        self.allowed = True

    def secret(self, reference: str) -> str:
        if not self.allowed:
            raise IdentityError("projects/p/secrets/hf/versions/latest: HTTP 403", final=True)
        assert reference == REFERENCES["HF_TOKEN"]
        return VALUE


class AtOnce:
    """A helper that does its work in the caller's thread, and keeps what came of it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def do(self, what: str, work: Callable[[], Event]) -> None:
        try:
            self.events.append(work())
        except IdentityError as error:
            self.events.append(Failed(what, str(error)))


class FakeIdentityServer:
    def __init__(self) -> None:
        self.identity = Vault()

    def environment(self) -> dict[str, str]:
        return {"GCE_METADATA_HOST": "127.0.0.1:9"}


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    yield
    redact._known.clear()


def given_of() -> tuple[JobSecrets, FakeIdentityServer, AtOnce]:
    identity_server, helper = FakeIdentityServer(), AtOnce()
    return JobSecrets(cast(IdentityServer, identity_server), cast(HelperThread, helper), Log()), identity_server, helper


def test_secrets_reach_the_environment_and_no_log(tmp_path: Path) -> None:
    given, _, helper = given_of()
    assert given.environment({}) == {"GCE_METADATA_HOST": "127.0.0.1:9"}, "a job without secrets waits for none"
    assert given.environment(REFERENCES) is None
    given.prepare(REFERENCES)
    (event,) = helper.events
    assert isinstance(event, SecretsRead) and VALUE not in repr(event)
    given.read(event)
    assert given.environment(REFERENCES) == {"GCE_METADATA_HOST": "127.0.0.1:9", "HF_TOKEN": VALUE}
    assert VALUE not in redact.redact(f"cannot log in with {VALUE}")
    (tmp_path / LAUNCHER_LOG).write_text(f"the token is {VALUE}, said the script\n")
    shown = collect(tmp_path).decode()
    assert "the token is *********************, said the script" in shown
    given.forget_job()
    assert given.environment(REFERENCES) is None, "the next job's are its own"


def test_refused_secrets_are_reported_after_a_few_tries_and_retried_by_the_next_generation() -> None:
    given, identity_server, helper = given_of()
    identity_server.identity.allowed = False
    for _ in range(TRIES):
        assert not given.refused
        given.prepare(REFERENCES)
        event = helper.events[-1]
        assert isinstance(event, Failed)
        given.failed(event.error)
    assert given.refused == "secret HF_TOKEN: projects/p/secrets/hf/versions/latest: HTTP 403"
    identity_server.identity.allowed = True
    given.retry()
    given.prepare(REFERENCES)
    assert isinstance(helper.events[-1], SecretsRead)


ASKS = """
import os, urllib.request
url = f"http://{os.environ['GCE_METADATA_HOST']}/computeMetadata/v1/instance/service-accounts/default/email"
request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
print("I am", urllib.request.urlopen(request).read().decode())
"""


def a_job(vm: Machine, script: str, **fields: Any) -> JobRun:
    sha256 = source(vm.fake, {"train.py": script})
    return JobRun(name="job", command=("train.py",), source_sha256=sha256, python=vm.light_python(), **fields)


def run_it(fake: Fake, vm: Machine, run: JobRun) -> tuple[str, Callable[[], str]]:
    """How it ended, and its log."""
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(1, 1, (vm.member(),)), run)
    code = fake.wait_fact(vm.uid, Kind.EXIT, 1, 40).value
    return code, lambda: fake.objects.get(f"jobs/{JOB}/logs/0/1.log", b"").decode()


def with_identity(fake: Fake, vm: Machine, account: str) -> None:
    attributes = fake.instances[vm.uid]["attributes"] | {"sk-job-identity": account}
    fake.instance(vm.uid, vm.name, attributes=attributes)


def test_a_job_has_the_stacks_job_identity(fake: Fake, machine: Make) -> None:
    vm = machine()
    with_identity(fake, vm, "trainer@acme-train.iam.gserviceaccount.com")
    code, log = run_it(fake, vm, a_job(vm, ASKS))
    assert code == "0"
    wait_until(lambda: "I am trainer@acme-train.iam.gserviceaccount.com" in log())


def test_a_job_with_unreadable_secrets_is_told_the_reason(fake: Fake, machine: Make) -> None:
    vm = machine()
    code, log = run_it(fake, vm, a_job(vm, ASKS, secrets=REFERENCES))
    assert code == "1"
    wait_until(lambda: "the stack gives jobs no identity to read them (`job_identity`)" in log())
