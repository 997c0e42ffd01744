"""From an instance to the function on AWS and back: our signature, IAM's check of it, and the Lambda handler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.generation import Role, Sync
from spotkeeper_agent.cloud.ec2 import Ec2
from spotkeeper_agent.core.sync import FunctionClient, SyncError
from tests import web
from tests.agent.cloud.aws import keys_of, refusal
from tests.agent.cloud.imds import Imds, instance
from tests.security.cases_identity import GOOD_IAM, INSTANCE
from tests.security.site import JOB
from tests.security.test_lambda import AwsSite, url_event


class FunctionUrl:
    """A function's URL with ``AuthType`` AWS_IAM: who is let through is whose session the keys are of."""

    def __init__(self, site: AwsSite, imds: Imds) -> None:
        self.refused: list[str] = []
        self.garble = False
        front = self

        class Handler(web.Handler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.body()
                body = body.replace(b'"job"', b'"jox"') if front.garble else body
                code = refusal(
                    keys_of(imds), "POST", f"{front.url}{self.path}", dict(self.headers), body, "lambda", 300
                )
                if code is not None:
                    front.refused.append(code)
                    self.answer(403, b'{"Message":"Forbidden"}')
                    return
                answered = site.lambda_app.event(url_event(self.path, body, GOOD_IAM))
                self.answer(answered["statusCode"], answered["body"].encode())

        self._server = web.Server(Handler)
        self.url = self._server.url
        self.close = self._server.close


@pytest.fixture
def stage() -> Iterator[tuple[AwsSite, FunctionUrl, FunctionClient, Imds]]:
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(contextlib.closing(AwsSite()))
        imds = stack.enter_context(instance(uid=INSTANCE, **{"sk-stack": "test"}))
        front = stack.enter_context(contextlib.closing(FunctionUrl(site, imds)))
        yield site, front, FunctionClient(front.url, Ec2(Clock(), imds.url)), imds


def test_the_function_identifies_an_instance_by_the_record(
    stage: tuple[AwsSite, FunctionUrl, FunctionClient, Imds],
) -> None:
    site, front, client, imds = stage
    me = site.members[0]
    reply = client.sync(Sync(me.boot, 0, JOB))
    assert (reply.role, reply.job, reply.node, reply.attempt) == (Role.MEMBER, JOB, 0, me.attempt)
    assert reply.doc is not None and front.refused == []

    imds.new_keys()  # those we have are taken no more: the next try has new ones
    with pytest.raises(SyncError, match="HTTP 403"):
        client.sync(Sync(me.boot, 0, JOB))
    assert client.sync(Sync(me.boot, 0, JOB)).role is Role.MEMBER

    front.garble = True
    with pytest.raises(SyncError, match="HTTP 403"):
        client.sync(Sync(me.boot, 0, JOB))
    assert front.refused == ["InvalidAccessKeyId", "SignatureDoesNotMatch"]
