"""The function on AWS: IAM's word for the caller, the instance id for a name, and events that are hints at the most."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace as changed
from typing import Any

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import Listing
from spotkeeper.contract.record import Record
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.service import auth_aws
from spotkeeper.reconcile.service.aws_lambda import TICK, LambdaApp, UrlEvent, request_of
from tests.security.cases_identity import ACCOUNT, GOOD_IAM, INSTANCE, ROLE
from tests.security.site import JOB, REFUSALS, Bucket, Site, sync

OPERATOR = f"arn:aws:iam::{ACCOUNT}:role/ops/operator"


class AwsSite(Site):
    """The first member is an EC2 instance; everything else as on the other site."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = replace(self.stack, cloud="aws", project=ACCOUNT, node_identity=ROLE)
        self.store.stack = self.stack
        record, version = self.store.records[JOB]
        self.store.records[JOB] = (as_instance(record), version)
        whole = self.cloud.listing
        vms = tuple(replace(vm, uid=INSTANCE) if vm.name == self.members[0].name else vm for vm in whole.vms)
        self.cloud.listing = replace(whole, vms=vms)
        self.looks = 0
        self.members[0] = changed(self.members[0], uid=INSTANCE)
        self.runtime.settings = changed(self.runtime.settings, invokers=frozenset({OPERATOR}))
        self.rest = Bucket.of(self.store)
        self.lambda_app = LambdaApp(self.runtime)
        listing = self.cloud.list

        def look(stack: str) -> Listing:
            self.looks += 1
            return listing(stack)

        self.cloud.list = look  # type: ignore[method-assign]

    def call(self, path: str, body: bytes, iam: auth_aws.Iam | None, **more: Any) -> tuple[int, dict[str, Any]]:
        answered = self.lambda_app.event(url_event(path, body, iam, **more))
        if answered["statusCode"] != 200:
            assert REFUSALS[answered["body"].encode()] == answered["statusCode"]
        return answered["statusCode"], json.loads(answered["body"])


def as_instance(record: Record) -> Record:
    first = record.nodes[0]
    assert first.cur is not None
    return replace(record, nodes=(replace(first, cur=replace(first.cur, uid=INSTANCE)), *record.nodes[1:]))


def url_event(path: str, body: bytes, iam: auth_aws.Iam | None, packed: bool = False, **headers: str) -> dict[str, Any]:
    told = None if iam is None else {"iam": {camel(name): getattr(iam, name) for name in iam.__struct_fields__}}
    return {
        "version": "2.0",
        "headers": {"content-type": "application/json", **headers},
        "requestContext": {"http": {"method": "POST", "path": path, "sourceIp": "1.2.3.4"}, "authorizer": told},
        "body": base64.b64encode(body).decode() if packed else body.decode("latin-1"),
        "isBase64Encoded": packed,
    }


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


@pytest.fixture
def aws() -> Iterator[AwsSite]:
    made = AwsSite()
    yield made
    made.close()


@pytest.mark.parametrize("packed", [False, True])
def test_an_instance_has_the_node_in_the_record(aws: AwsSite, packed: bool) -> None:
    me = aws.members[0]
    status, reply = aws.call("/v1/sync", sync(me.boot, job=JOB), GOOD_IAM, packed=packed)
    assert (status, reply["role"], reply["node"], reply["attempt"]) == (200, "member", 0, me.attempt)
    assert aws.looks == 0, "the record knew it"


def test_without_a_job_one_listing_gives_the_name(aws: AwsSite) -> None:
    for _ in range(3):
        status, reply = aws.call("/v1/sync", sync(aws.members[0].boot), GOOD_IAM)
        assert (status, reply["job"], reply["node"]) == (200, JOB, 0)
    assert aws.looks == 1


def test_one_listing_identifies_the_whole_gang(aws: AwsSite) -> None:
    """Nodes that start together ask together: a look for each of them, two seconds apart, took minutes."""
    whole = aws.cloud.listing
    ids = {vm.uid: f"i-{n:017x}" for n, vm in enumerate(whole.vms) if vm.job and vm.uid != INSTANCE}
    aws.cloud.listing = replace(whole, vms=tuple(replace(vm, uid=ids.get(vm.uid, vm.uid)) for vm in whole.vms))
    assert len(ids) >= 2
    for uid in ids.values():
        iam = replace(
            GOOD_IAM, user_arn=GOOD_IAM.user_arn.replace(INSTANCE, uid), user_id=f"AROA:{uid}", caller_id=f"AROA:{uid}"
        )
        assert aws.call("/v1/sync", sync("b"), iam)[1]["job"] is not None
    assert aws.looks == 1


def test_an_unknown_machine_does_not_cause_a_listing_per_request(aws: AwsSite) -> None:
    other = "i-0fedcba9876543210"
    iam = replace(
        GOOD_IAM,
        user_arn=GOOD_IAM.user_arn.replace(INSTANCE, other),
        user_id=f"AROA:{other}",
        caller_id=f"AROA:{other}",
    )
    for _ in range(5):
        assert aws.call("/v1/sync", sync("b", job=JOB, facts=[{"kind": "hello"}]), iam)[1]["role"] == "unknown"
    assert aws.looks == 1 and aws.store.facts == aws.rest.fields["facts"]


def test_no_other_caller_can_act_as_the_machine(aws: AwsSite) -> None:
    operator = replace(GOOD_IAM, user_arn=f"arn:aws:sts::{ACCOUNT}:assumed-role/operator/ann")
    for iam in (None, operator, replace(GOOD_IAM, account_id="999999999999")):
        assert aws.call("/v1/sync", sync(aws.members[0].boot, job=JOB), iam) == (401, {"error": "unauthorized"})
    headers = {"authorization": "Bearer x", "x-amzn-iam-userarn": GOOD_IAM.user_arn}
    assert aws.call("/v1/sync", sync(), None, **headers)[0] == 401, "no header says who speaks"


def test_only_operators_may_notify(aws: AwsSite) -> None:
    operator = replace(GOOD_IAM, user_arn=f"arn:aws:sts::{ACCOUNT}:assumed-role/operator/ann")
    record, version = aws.store.records[JOB]
    aws.store.records[JOB] = (replace(record, owner=""), version)
    for path in (f"/v1/notify/{JOB}", "/v1/tick"):
        assert aws.call(path, b"{}", operator)[0] == 200
        assert aws.call(path, b"{}", GOOD_IAM)[0] == 401
        stranger = replace(operator, user_arn=operator.user_arn.replace("operator", "operators"))
        assert aws.call(path, b"{}", stranger)[0] == 401
    assert aws.store.records[JOB][0].owner == OPERATOR, "the role, since a session chooses its own name"


def test_a_submitter_owns_its_jobs_though_all_call_as_one_role(aws: AwsSite) -> None:
    role, kim = f"arn:aws:iam::{ACCOUNT}:role/sk-{aws.stack.stack}-sb", f"arn:aws:iam::{ACCOUNT}:user/kim"
    known = {"invokers": frozenset({role}), "submitters": frozenset({kim})}
    aws.runtime.settings = changed(aws.runtime.settings, stack=aws.stack.stack, **known)
    record, version = aws.store.records[JOB]
    aws.store.records[JOB] = (replace(record, owner=""), version)
    signed = replace(GOOD_IAM, user_arn=f"arn:aws:sts::{ACCOUNT}:assumed-role/sk-{aws.stack.stack}-sb/kim")
    assert aws.call(f"/v1/notify/{JOB}", b"{}", signed)[0] == 200
    assert aws.store.records[JOB][0].owner == kim


@pytest.mark.parametrize(
    ("body", "status"), [(b" " * 16_385, 413), (b"x" * 1_000_000, 413), (b"{", 400), (b'{"boot":"b","boot":"b"}', 400)]
)
def test_http_and_lambda_answer_alike(aws: AwsSite, body: bytes, status: int) -> None:
    assert aws.call("/v1/sync", body, GOOD_IAM)[0] == status
    assert aws.store.facts == aws.rest.fields["facts"]


@pytest.mark.parametrize(
    "event",
    [
        {"requestContext": None},
        {"requestContext": {}},
        {"requestContext": {"http": {"method": 1, "path": "/v1/sync"}}},
        {"requestContext": {"http": {"method": "POST", "path": "/v1/sync"}}, "body": "!", "isBase64Encoded": True},
        {"requestContext": {"http": {"method": "POST", "path": "/v1/sync"}}, "headers": []},
    ],
)
def test_an_invalid_event_is_refused_alike(aws: AwsSite, event: dict[str, Any]) -> None:
    answered = aws.lambda_app.event(event)
    assert (answered["statusCode"], answered["body"]) == (400, '{"error":"invalid"}')


def warned(uid: str, **more: Any) -> dict[str, Any]:
    return {"source": "aws.ec2", "account": ACCOUNT, "detail-type": "x", "detail": {"instance-id": uid}, **more}


class TestHints:
    def test_an_interruption_starts_a_round_of_its_job(self, aws: AwsSite) -> None:
        assert aws.lambda_app.event(warned(INSTANCE)) == {"jobs": 1, "failed": 0, "busy": False}
        assert aws.store.records == aws.rest.fields["records"], "the listing says that nothing happened"

    def test_the_schedule_ticks(self, aws: AwsSite) -> None:
        assert aws.lambda_app.event({"source": TICK})["jobs"] == 2

    @pytest.mark.parametrize(
        "event",
        [
            warned(INSTANCE, account="999999999999"),
            warned(INSTANCE, source="aws.s3"),
            warned(INSTANCE, source="evil"),
            warned("i-0fedcba9876543210"),
            warned("../../x"),
            warned(""),
            {"source": "aws.ec2", "account": ACCOUNT, "detail": []},
            {"Records": [{"Sns": {"Message": "x"}}] * 100},
            {"Type": "SubscriptionConfirmation", "SubscribeURL": "http://169.254.169.254/", "Token": "t"},
            {},
            {"source": 1},
        ],
    )
    def test_other_events_are_ignored(self, aws: AwsSite, event: dict[str, Any]) -> None:
        assert aws.lambda_app.event(event) == {"jobs": 0, "failed": 0, "busy": False}
        aws.store.quarantined.clear()
        assert not aws.cloud.asked and aws.store.records == aws.rest.fields["records"]


class TestNames:
    def test_only_a_consistently_labelled_machine_is_identified(self, aws: AwsSite) -> None:
        whole = aws.cloud.listing
        mine = next(vm for vm in whole.vms if vm.uid == INSTANCE)
        assert auth_aws.nodes_of(whole, "t")[INSTANCE] == Speaker(INSTANCE, mine.name, mine.zone)
        for wrong in (replace(mine, attempt=9), replace(mine, job="zzzz9999"), replace(mine, node=1)):
            assert auth_aws.nodes_of(Listing((wrong,), ()), "t") == {}
        assert auth_aws.nodes_of(Listing((mine, mine), ()), "t") == {}
        assert INSTANCE not in auth_aws.nodes_of(whole, "other")

    def test_the_body_limit_is_the_functions(self) -> None:
        event = UrlEvent(_context(), {}, "x" * 100_000)
        made = request_of(event)
        assert made.content_length == 100_000 and len(made.stream.read()) == 16_385


def _context() -> Any:
    from spotkeeper.reconcile.service.aws_lambda import _Context, _Http

    return _Context(_Http("POST", "/v1/sync"))
