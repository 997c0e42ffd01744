"""The job's own identity, judged by the clouds' own libraries: they find it with the environment that the agent gives.

Each runs in a process of its own with nothing else in its environment: no file, no key, no metadata server.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import requests

from spotkeeper.clock import Clock
from spotkeeper_agent import cloud
from spotkeeper_agent.cloud.ec2 import Ec2
from spotkeeper_agent.cloud.identity import Endpoints, IdentityError, IdentityServer, JobIdentity
from spotkeeper_agent.cloud.identity_aws import AwsIdentity
from spotkeeper_agent.cloud.identity_gcp import GcpIdentity
from spotkeeper_agent.cloud.notice import Instance
from spotkeeper_agent.cloud.sigv4 import Credentials
from spotkeeper_agent.core.log import Log
from tests import web

ACCOUNT = "trainer@acme-train.iam.gserviceaccount.com"
ROLE = "arn:aws:iam::123456789012:role/trainer"
SECRET = "projects/acme-train/secrets/hf/versions/latest"  # noqa: S105 - its name
ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:hf-AbCdEf"
MACHINE, JOBS = "ya29.machine", "ya29.jobs"
QUIET = Log()


@dataclass
class Clouds:
    """IAM Credentials, Secret Manager, STS and Secrets Manager, as far as they are asked. ``asked``: path and body."""

    status: int = 200
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: str, headers: dict[str, str]) -> bytes:
        self.asked.append((path, body, headers))
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        token = headers.get("Authorization")
        if path == f"/v1/projects/-/serviceAccounts/{ACCOUNT}:generateAccessToken":
            assert token == f"Bearer {MACHINE}"
            return json.dumps({"accessToken": JOBS, "expireTime": ends}).encode()
        if path.endswith(":generateIdToken"):
            assert json.loads(body) == {"audience": "https://a.example", "includeEmail": True}
            return json.dumps({"token": a_jwt()}).encode()
        if path == f"/v1/{SECRET}:access":
            assert token == f"Bearer {JOBS}", "secrets are read as the job, not as the machine"
            return json.dumps({"payload": {"data": base64.b64encode(b"hunter2").decode()}}).encode()
        if headers.get("X-Amz-Target") == "secretsmanager.GetSecretValue":
            assert "Credential=ASIAJOB/" in (token or "") and "/eu-west-1/secretsmanager/" in (token or "")
            assert json.loads(body) == {"SecretId": ARN}
            return json.dumps({"SecretString": "hunter2", "Name": "hf"}).encode()
        words = urllib.parse.parse_qs(body)
        assert words["Action"] == ["AssumeRole"] and words["RoleArn"] == [ROLE]
        assert words["RoleSessionName"] == ["i-0abc"]
        assert "Credential=ASIAMACHINE/" in (token or "") and "/us-east-1/sts/" in (token or "")
        keys = "<AccessKeyId>ASIAJOB</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
        return (
            '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>'
            f"{keys}<Expiration>{ends}</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"
        ).encode()


def a_jwt() -> str:
    parts = [{"alg": "RS256"}, {"aud": "https://a.example", "exp": time.time() + 3600, "email": ACCOUNT}]
    return ".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts) + ".sig"


class Machine:
    """What is used of a machine on EC2."""

    def credentials(self) -> Credentials:
        return Credentials("ASIAMACHINE", "secret", "token")

    def region(self) -> str:
        return "us-east-1"

    def instance(self) -> Instance:
        return Instance("i-0abc", "a-node", "us-east-1a")


@pytest.fixture
def clouds() -> Iterator[Clouds]:
    clouds = Clouds()

    class Handler(web.Handler):
        def do_GET(self) -> None:
            body = self.body().decode()
            data = clouds.answer(self.path, body, dict(self.headers)) if clouds.status == 200 else b""
            self.answer(clouds.status, data)

        do_POST = do_GET

    with web.serving(Handler) as server:
        clouds.url = server.url
        yield clouds


def gcp(clouds: Clouds) -> JobIdentity:
    return GcpIdentity(ACCOUNT, lambda: MACHINE, Clock(), Endpoints(iam=clouds.url, secrets=clouds.url))


def aws(clouds: Clouds) -> JobIdentity:
    return AwsIdentity(ROLE, cast(Ec2, Machine()), Clock(), Endpoints(sts=clouds.url, secrets_aws=clouds.url))


@pytest.fixture
def identity_servers(tmp_path: Path) -> Iterator[list[IdentityServer]]:
    opened: list[IdentityServer] = []
    yield opened
    for identity_server in opened:
        identity_server.close()


def open_server(identity_servers: list[IdentityServer], of: JobIdentity, folder: Path) -> IdentityServer:
    identity_server = IdentityServer(of, folder, QUIET)
    identity_server.start()
    identity_servers.append(identity_server)
    return identity_server


def in_a_job(script: str, identity_server: IdentityServer) -> dict[str, object]:
    """What a script of the job's prints, as JSON. Nothing is in its environment but what the agent gives."""
    done = subprocess.run(
        [sys.executable, "-c", script], env={"HOME": "/nonexistent", **identity_server.environment()},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


GOOGLE = """
import google.auth, google.auth.transport.requests, google.oauth2.id_token, json
credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
request = google.auth.transport.requests.Request()
credentials.refresh(request)
audience = google.oauth2.id_token.fetch_id_token(request, "https://a.example")
print(json.dumps({"token": credentials.token, "project": project, "email": credentials.service_account_email,
                  "kind": type(credentials).__module__, "id": audience.count("."),
                  "universe": credentials.universe_domain}))
"""


def test_googles_library_finds_only_the_jobs_account(
    clouds: Clouds, identity_servers: list[IdentityServer], tmp_path: Path
) -> None:
    assert in_a_job(GOOGLE, open_server(identity_servers, gcp(clouds), tmp_path)) == {
        "token": JOBS, "project": "acme-train", "email": ACCOUNT, "kind": "google.auth.compute_engine.credentials",
        "id": 2, "universe": "googleapis.com",
    }  # fmt: skip


AMAZON = """
import botocore.session, json
session = botocore.session.get_session()
keys = session.get_credentials()
frozen = keys.get_frozen_credentials()
print(json.dumps({"key": frozen.access_key, "secret": frozen.secret_key, "token": frozen.token,
                  "method": keys.method, "region": session.get_config_variable("region")}))
"""


def test_awss_library_finds_only_the_jobs_role(
    clouds: Clouds, identity_servers: list[IdentityServer], tmp_path: Path
) -> None:
    assert in_a_job(AMAZON, open_server(identity_servers, aws(clouds), tmp_path)) == {
        "key": "ASIAJOB", "secret": "s", "token": "t", "method": "container-role", "region": "us-east-1",
    }  # fmt: skip


def ask(identity_server: IdentityServer, path: str, **headers: str) -> int:
    return requests.get(f"http://{identity_server.at.host}{path}", headers=headers, timeout=10).status_code


def test_requests_without_the_librarys_header_are_refused(
    clouds: Clouds, identity_servers: list[IdentityServer], tmp_path: Path
) -> None:
    """A page that a browser was led to, or a redirect, cannot send these headers."""
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    google = open_server(identity_servers, gcp(clouds), tmp_path)
    flavor = {"Metadata-Flavor": "Google"}
    assert ask(google, path) == 403
    assert ask(google, path, **flavor, **{"X-Forwarded-For": "1.2.3.4"}) == 403
    assert ask(google, path, **flavor) == 200
    for other in ("attributes/sk-function", "attributes/?recursive=true", "id", "service-accounts/vm@x/token", "?a=b"):
        assert ask(google, f"/computeMetadata/v1/instance/{other}", **flavor) == 404, other
    (tmp_path / "aws").mkdir()
    amazon = open_server(identity_servers, aws(clouds), tmp_path / "aws")
    assert ask(amazon, "/credentials") == 403
    assert ask(amazon, "/credentials", Authorization="x" * 43) == 403
    assert ask(amazon, "/credentials", Authorization=amazon.at.token) == 200
    assert ask(amazon, "/latest/meta-data/", Authorization=amazon.at.token) == 404
    assert amazon.at.token_file.stat().st_mode & 0o007 == 0


def test_tokens_are_cached_until_shortly_before_they_expire(clouds: Clouds) -> None:
    for one in (gcp(clouds), aws(clouds)):
        for _ in range(3):
            one.secret(f"gcp-secret://{SECRET}" if isinstance(one, GcpIdentity) else f"aws-secret://{ARN}")
    paths = [path for path, body, _ in clouds.asked if "AssumeRole" in body or "generateAccessToken" in path]
    assert len(paths) == 2


def test_port_and_token_outlive_the_agent(clouds: Clouds, tmp_path: Path) -> None:
    first = IdentityServer(aws(clouds), tmp_path, QUIET)
    first.start()
    first.close()
    second = IdentityServer(aws(clouds), tmp_path, QUIET)
    assert second.at == first.at
    third = IdentityServer(aws(clouds), tmp_path, QUIET)  # somebody has the port
    assert third.at.host != second.at.host
    for identity_server in (second, third):
        identity_server._server.server_close()


@pytest.mark.parametrize(("status", "told"), [(403, 403), (404, 403), (500, 503), (429, 503)])
def test_a_refusal_is_final_and_an_outage_is_retried(
    clouds: Clouds, identity_servers: list[IdentityServer], tmp_path: Path, status: int, told: int
) -> None:
    clouds.status = status
    identity_server = open_server(identity_servers, gcp(clouds), tmp_path)
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    assert ask(identity_server, path, **{"Metadata-Flavor": "Google"}) == told


def test_secrets_are_read_with_the_jobs_identity(clouds: Clouds) -> None:
    assert gcp(clouds).secret(f"gcp-secret://{SECRET}") == "hunter2"
    assert aws(clouds).secret(f"aws-secret://{ARN}") == "hunter2"
    for one, other in ((gcp(clouds), f"aws-secret://{ARN}"), (aws(clouds), f"gcp-secret://{SECRET}")):
        with pytest.raises(IdentityError, match="want a reference"):
            one.secret(other)


def test_an_identity_of_another_cloud_is_refused() -> None:
    for name in ("trainer", ROLE, "arn:aws:iam::1:role/x"):
        with pytest.raises(IdentityError, match="is not a service account or role of this machine's cloud"):
            cloud.job_identity(name, cast(Ec2, Machine()), Clock(), Endpoints())
