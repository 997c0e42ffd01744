"""EC2: the stand-in is what botocore takes for the real service, and our client of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from botocore.utils import IMDSFetcher, InstanceMetadataFetcher, InstanceMetadataRegionFetcher

from spotkeeper.clock import Clock
from spotkeeper_agent import cloud
from spotkeeper_agent.cloud import metadata
from spotkeeper_agent.cloud.ec2 import ACTION, MAINTENANCE, POLL_FLOOR_S, REBALANCE, TTL_S, Ec2
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.cloud.metadata import FIRST, MetadataError, Watcher
from spotkeeper_agent.cloud.notice import Cause, CloudWarning, Instance
from spotkeeper_agent.core import settings
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.host.disk import Disk
from tests.agent.cloud.imds import REGION, ROLE, TOKEN, TTL, UID, Imds, http_date, instance, iso
from tests.agent.fakes import wait_until

KEYS = f"meta-data/iam/security-credentials/{ROLE}"
TAGS = {"sk-stack": "test", "sk-function": "https://f.lambda-url.us-east-2.on.aws", "sk-bucket": "b"}


@pytest.fixture
def imds() -> Iterator[Imds]:
    with instance(**TAGS) as made:
        yield made


@pytest.fixture
def ec2(imds: Imds) -> Ec2:
    return Ec2(Clock(), imds.url)


class Shifted(Clock):
    """A clock that a test sets ahead."""

    ahead_s = 0.0

    def now(self) -> float:
        return time.time() + Shifted.ahead_s

    def steady(self) -> float:
        return time.monotonic() + Shifted.ahead_s


@pytest.fixture
def later(imds: Imds, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2]:
    """A client whose clock goes with the server's: ``pass_time``."""
    monkeypatch.setattr(Shifted, "ahead_s", 0.0)
    yield Ec2(Shifted(), imds.url)


def pass_time(imds: Imds, seconds: float) -> None:
    Shifted.ahead_s += seconds
    imds.ahead_s += seconds


# ---------------------------------------------------------------- the stand-in


def test_botocore_takes_the_stand_in_for_the_real_service(imds: Imds) -> None:
    found = InstanceMetadataFetcher(base_url=imds.url + "/", env={}).retrieve_iam_role_credentials()
    assert (found["role_name"], found["access_key"]) == (ROLE, "ASIAEXAMPLE00000001")
    config = {"ec2_metadata_v1_disabled": True}
    assert InstanceMetadataRegionFetcher(base_url=imds.url, env={}, config=config).retrieve_region() == REGION


@pytest.mark.parametrize("what", ["hop limit", "disabled"])
def test_botocore_gets_nothing_where_the_real_service_gives_nothing(imds: Imds, what: str) -> None:
    if what == "hop limit":
        imds.hops = 2
    else:
        imds.enabled = False
    fetcher = InstanceMetadataFetcher(base_url=imds.url, env={}, config={"ec2_metadata_v1_disabled": False})
    assert fetcher.retrieve_iam_role_credentials() == {}


@pytest.mark.parametrize(
    ("ttl", "status"), [("0", 400), ("21601", 400), ("99999", 400), ("-1", 400), ("1", 200), (None, 400)]
)
def test_token_bounds(imds: Imds, ttl: str | None, status: int) -> None:
    headers = {} if ttl is None else {TTL: ttl}
    assert requests.put(f"{imds.url}/latest/api/token", headers=headers, timeout=5).status_code == status


def test_metadata_version_1_is_refused(imds: Imds) -> None:
    path = f"{imds.url}/latest/meta-data/instance-id"
    assert requests.get(path, timeout=5).status_code == 401
    assert requests.get(path, headers={TOKEN: "AQAEguess=="}, timeout=5).status_code == 401
    assert requests.get(path, headers={TOKEN: IMDSFetcher(base_url=imds.url)._fetch_metadata_token()}, timeout=5).ok
    forwarded = {TTL: "60", "X-Forwarded-For": "10.0.0.1"}
    assert requests.put(f"{imds.url}/latest/api/token", headers=forwarded, timeout=5).status_code == 403


# ---------------------------------------------------------------- who it is


def test_the_instance_is_described(ec2: Ec2, tmp_path: Path) -> None:
    me = ec2.instance()
    name = "sk-test-abcdefgh-n0000-a1"
    assert me == Instance(UID, name, f"{REGION}a", {"Name": name} | TAGS)
    ours = settings.read(me, tmp_path)
    assert (ours.bucket, ours.storage, ours.static) == ("b", "", False)


def test_late_tags_are_awaited_and_missing_tags_reported(imds: Imds, later: Ec2) -> None:
    imds.tags({"Name": "n"})
    with pytest.raises(MetadataError, match="InstanceMetadataTags"):
        later.instance()
    pass_time(imds, 121)
    assert later.instance().attributes == {"Name": "n"}, "the settings say what is missing"


def test_the_cloud_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vendor = tmp_path / "sys_vendor"
    monkeypatch.setattr(cloud, "DMI", vendor)
    for name in (metadata.GCE_HOST, metadata.EC2_ENDPOINT):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(cloud.here(Clock()), Gce), "unknown: as it always was"
    vendor.write_text("Amazon EC2\n")
    assert isinstance(cloud.here(Clock()), Ec2)
    monkeypatch.setenv(metadata.GCE_HOST, "127.0.0.1:1")
    assert isinstance(cloud.here(Clock()), Gce), "a local cloud on an EC2 instance"
    monkeypatch.delenv(metadata.GCE_HOST)
    vendor.write_text("Google\n")
    assert isinstance(cloud.here(Clock()), Gce)
    monkeypatch.setenv(metadata.EC2_ENDPOINT, "http://127.0.0.1:1")
    assert isinstance(cloud.here(Clock()), Ec2)


# ---------------------------------------------------------------- tokens and keys


def test_a_token_is_reused_until_shortly_before_it_expires(imds: Imds, later: Ec2) -> None:
    for _ in range(5):
        later.instance()
    assert imds.asked["PUT"] == 1
    pass_time(imds, TTL_S - 30)
    later.instance()
    assert imds.asked["PUT"] == 2


def test_a_refused_token_is_renewed_once(imds: Imds, ec2: Ec2) -> None:
    ec2.instance()
    imds.forget_tokens()
    ec2.instance()
    assert imds.asked["PUT"] == 2
    imds.statuses[ACTION] = 401  # a service that refuses every token is in trouble, and is not flooded
    with pytest.raises(MetadataError, match="HTTP 401"):
        ec2.instance()
    assert imds.asked["PUT"] == 3


@pytest.mark.parametrize(("what", "words"), [("hop limit", "hop limit to 2"), ("disabled", "HttpEndpoint")])
def test_an_unreachable_service_names_the_remedy(imds: Imds, ec2: Ec2, what: str, words: str) -> None:
    if what == "hop limit":
        imds.hops = 2
    else:
        imds.enabled = False
    with pytest.raises(MetadataError, match=words):
        ec2.instance()


def test_keys_are_renewed_early_and_old_keys_used_meanwhile(imds: Imds, later: Ec2) -> None:
    first = later.credentials()
    assert first == later.credentials() and imds.asked[KEYS] == 1
    pass_time(imds, 6 * 3600 - 200)  # less than the margin is left, and AWS has none newer yet
    imds.statuses[KEYS] = 503
    assert later.credentials() == first
    del imds.statuses[KEYS]
    imds.new_keys()
    second = later.credentials()
    assert second.access_key == "ASIAEXAMPLE00000002" and second.token != first.token
    later.forget_identity()
    assert later.credentials() == second and imds.asked[KEYS] == 4
    pass_time(imds, 7 * 3600)
    imds.statuses[KEYS] = 503
    with pytest.raises(MetadataError, match="HTTP 503"):
        later.credentials()


def test_an_instance_without_a_role_is_an_error(imds: Imds, ec2: Ec2) -> None:
    imds.new_keys(Code="AssumeRoleUnauthorizedAccess", AccessKeyId="", SecretAccessKey="")
    with pytest.raises(MetadataError, match="AssumeRoleUnauthorizedAccess"):
        ec2.credentials()
    imds.take_away("meta-data/iam/security-credentials/")
    with pytest.raises(MetadataError, match="instance profile"):
        ec2.credentials()


# ---------------------------------------------------------------- what is ahead


def test_an_interruption_has_awss_deadline(imds: Imds, ec2: Ec2) -> None:
    assert ec2.instance().warning is None
    at = float(int(time.time())) + 118
    for action in ("terminate", "stop"):
        imds.put_at(ACTION, {"action": action, "time": iso(at)})
        assert ec2.instance().warning == CloudWarning(Cause.PREEMPTED, at)
    imds.put_at(ACTION, {"action": "hibernate", "time": iso(at)})
    warning = ec2.instance().warning
    assert warning is not None and warning.deadline is not None and warning.deadline - time.time() <= 10
    imds.take_away(ACTION)
    assert ec2.instance().warning is None


def test_the_surest_warning_counts(imds: Imds, later: Ec2) -> None:
    imds.put_at(REBALANCE, {"noticeTime": iso(time.time())})
    assert later.instance().warning == CloudWarning(Cause.REBALANCE)
    pass_time(imds, 61)
    soon = float(int(imds.now())) + 600
    event = {"Code": "instance-retirement", "EventId": "e-1", "State": "active", "NotAfter": ""}
    imds.put_at(MAINTENANCE, [event | {"NotBefore": http_date(soon)}, event | {"NotBefore": http_date(soon + 60)}])
    assert later.instance().warning == CloudWarning(Cause.MAINTENANCE, soon)
    imds.put_at(ACTION, {"action": "terminate", "time": iso(soon)})
    assert later.instance().warning == CloudWarning(Cause.PREEMPTED, soon)


@pytest.mark.parametrize(
    ("state", "in_s"), [("completed", 600), ("canceled", 600), ("active", 7200)], ids=["over", "called off", "far"]
)
def test_finished_events_cause_no_notice(imds: Imds, ec2: Ec2, state: str, in_s: float) -> None:
    event = {"Code": "system-reboot", "State": state, "NotBefore": http_date(time.time() + in_s)}
    imds.put_at(MAINTENANCE, [event])
    assert ec2.instance().warning is None


@pytest.mark.parametrize(
    ("path", "text"),
    [(ACTION, "{}"), (ACTION, '{"action":"stop","time":"soon"}'), (MAINTENANCE, '[{"NotBefore":"soon"}]')],
)
def test_an_invalid_answer_is_an_error_and_no_notice(imds: Imds, ec2: Ec2, path: str, text: str) -> None:
    imds.put_at(path, text)
    with pytest.raises(MetadataError, match=path):
        ec2.instance()


def test_a_failing_path_hides_no_interruption(imds: Imds, ec2: Ec2) -> None:
    ec2.instance()
    imds.statuses |= {MAINTENANCE: 500, REBALANCE: 500}
    imds.put_at(ACTION, {"action": "terminate", "time": iso(time.time() + 120)})
    warning = ec2.instance().warning
    assert warning is not None and warning.cause is Cause.PREEMPTED


def test_rare_events_are_polled_rarely(imds: Imds, later: Ec2) -> None:
    for _ in range(120):
        later.instance()
        pass_time(imds, 1)
    assert (imds.asked[ACTION], imds.asked[REBALANCE], imds.asked[MAINTENANCE]) == (120, 24, 2)
    assert imds.asked["dynamic/instance-identity/document"] == 1


def test_a_watcher_posts_an_interruption_and_ignores_failures(imds: Imds) -> None:
    seen: list[CloudWarning | None] = []
    said: list[str] = []
    clock = Clock(scale=1 / POLL_FLOOR_S)
    imds.statuses[ACTION] = 503
    watcher = Watcher(
        Ec2(clock, imds.url), lambda instance: seen.append(instance.warning), clock, Log(write=said.append)
    )
    watcher.start()
    wait_until(lambda: said)
    asked = imds.asked[ACTION]
    wait_until(lambda: imds.asked[ACTION] > asked + 1)
    assert len(said) == 1 and seen == [], "each kind of error is said once"
    del imds.statuses[ACTION]
    wait_until(lambda: seen == [None])
    imds.put_at(ACTION, {"action": "terminate", "time": iso(2_000_000_000)})
    wait_until(lambda: seen == [None, CloudWarning(Cause.PREEMPTED, 2_000_000_000.0)])
    imds.take_away(ACTION)
    wait_until(lambda: len(seen) == 3)


def test_a_preemption_before_the_agents_start_is_reported_at_once(imds: Imds, ec2: Ec2) -> None:
    imds.put_at(ACTION, {"action": "terminate", "time": iso(2_000_000_000)})
    warning = ec2.wait(FIRST)[0].warning
    assert warning is not None and warning.cause is Cause.PREEMPTED


# ---------------------------------------------------------------- the data disk

BOOT = ("vol0000000000000000a", "vol0000000000000000a-part1", "vol0000000000000000a-part15")


@pytest.mark.parametrize(
    ("volumes", "found"),
    [
        ((*BOOT, "vol0000000000000000b"), "vol0000000000000000b"),
        (BOOT, None),
        ((*BOOT, "vol0000000000000000b", "vol0000000000000000c"), None),  # a choice is not ours to make
        ((*BOOT, "vol0000000000000000b", "vol0000000000000000b_1"), "vol0000000000000000b"),  # its namespace's link
    ],
)
def test_the_data_disk_is_the_volume_without_partitions(
    tmp_path: Path, volumes: tuple[str, ...], found: str | None
) -> None:
    by_id = tmp_path / "dev/disk/by-id"
    by_id.mkdir(parents=True)
    disk = Disk(by_id / "google-sk-data", tmp_path / "mnt", Log(write=lambda _: None))
    assert not disk.present(), "none is attached yet"
    for volume in volumes:
        (by_id / f"nvme-Amazon_Elastic_Block_Store_{volume}").touch()
    (by_id / "nvme-Amazon_EC2_NVMe_Instance_Storage_AWS1234").touch()
    assert disk.present() is (found is not None)
    assert disk.device.name == (f"nvme-Amazon_Elastic_Block_Store_{found}" if found else "google-sk-data")
