"""How an EC2 machine starts: user data, the startup script, the agent; each fetched by its hash, by signed requests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from msgspec.structs import replace

from infra import boot
from infra.settings.model import Settings
from infra.settings.read import from_config
from spotkeeper.local.deploy.config import read_config
from spotkeeper.reconcile.clouds.ec2.actions import DEVICE
from spotkeeper_agent.core import settings as agent_settings
from spotkeeper_agent.host import roothelper
from tests import web
from tests.infra.conftest import STACKS
from tests.infra.test_boot import bundle_of

KEYS = Credentials("ASIAEXAMPLE", "a-secret-that-must-not-leak", "a-session-token-that-must-not-leak")
REGION, ROLE = "us-east-1", "sk-example-aws-vm"


@pytest.fixture(scope="module")
def settings() -> Settings:
    return from_config(read_config(STACKS / "Pulumi.example-aws.yaml"), "example-aws")


@pytest.fixture(scope="module")
def scripts(settings: Settings) -> boot.Scripts:
    return boot.render(settings)


def signature(url: str, headers: Mapping[str, str]) -> str:
    """The one that botocore puts to a GET with these headers."""
    auth = S3SigV4Auth(KEYS, "s3", REGION)
    names = re.search(r"SignedHeaders=([^,]+),", headers["authorization"])
    assert names is not None and "host" in names[1].split(";")
    request = AWSRequest("GET", url, headers={name: headers[name] for name in names[1].split(";")})
    request.context["timestamp"] = headers["x-amz-date"]
    found: str = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    return found


class Site:
    """Metadata service (version 2 only) and bucket of one machine. ``objects``: what the bucket holds, by key."""

    def __init__(self, objects: dict[str, bytes], tags: dict[str, str]) -> None:
        self.objects = objects
        self.tags = tags
        self.asked: list[str] = []
        self.address = ""

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if (method, path) == ("PUT", "/latest/api/token"):
            assert headers["x-aws-ec2-metadata-token-ttl-seconds"].isdigit()
            return 200, b"a-metadata-token"
        if path.startswith("/latest/meta-data/"):
            if headers.get("x-aws-ec2-metadata-token") != "a-metadata-token":
                return 401, b""
            return self._metadata(path.removeprefix("/latest/meta-data/"))
        self.asked.append(path)
        url = f"http://{self.address}{path}"
        if headers["authorization"].rpartition("Signature=")[2] != signature(url, headers):
            return 403, b"<Code>SignatureDoesNotMatch</Code>"
        assert headers["x-amz-security-token"] == KEYS.token
        return 200, self.objects[path.removeprefix("/sk-test/")]

    def _metadata(self, path: str) -> tuple[int, bytes]:
        tags = {"sk-bucket": "sk-test", "sk-storage": f"http://{self.address}", **self.tags}
        known = {
            "iam/security-credentials/": ROLE,
            f"iam/security-credentials/{ROLE}": json.dumps(
                {"AccessKeyId": KEYS.access_key, "SecretAccessKey": KEYS.secret_key, "Token": KEYS.token}
            ),
            "placement/region": REGION,
            "tags/instance": "\n".join(tags),
            **{f"tags/instance/{name}": value for name, value in tags.items()},
        }
        return (200, known[path].encode()) if path in known else (404, b"")


Serve = Callable[[dict[str, bytes], dict[str, str]], Site]


@pytest.fixture
def serve() -> Iterator[Serve]:
    def start(objects: dict[str, bytes], tags: dict[str, str]) -> Site:
        site = Site(objects, tags)

        class Handler(web.Handler):
            def _any(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                self.answer(*site.answer(self.command, self.path, headers))

            do_GET = do_PUT = _any

        site.address = running.enter_context(web.serving(Handler)).address
        return site

    with contextlib.ExitStack() as running:
        yield start


def run(script: str, site: Site, root: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SPOTKEEPER_ROOT": str(root),
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{site.address}",
        "http_proxy": "http://127.0.0.1:1",
    }
    return subprocess.run(
        ["bash", "-s"], input=script, env=environment, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def released(scripts: boot.Scripts, agent: bytes) -> tuple[dict[str, bytes], dict[str, str]]:
    """A bucket with a startup script and a bundle, and a machine's tags that name them."""
    objects = {f"boot/{scripts.sha256}.sh": scripts.startup.encode(), f"bundles/{sha(agent)}.tar": agent}
    return objects, {"sk-boot": scripts.sha256, "sk-bundle": sha(agent)}


@pytest.mark.parametrize("kind", ["spot", "static"])
def test_a_machine_fetches_its_script_and_its_bundle_and_starts_the_agent(
    scripts: boot.Scripts, serve: Serve, tmp_path: Path, kind: str
) -> None:
    agent = bundle_of("import spotkeeper, sys; print('agent', spotkeeper.__file__)")
    site = serve(*released(scripts, agent))
    first = run(scripts.user_data[kind], site, tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"agent {tmp_path}/var/lib/spotkeeper/bundle/{sha(agent)}/site/spotkeeper/__init__.py\n"
    assert site.asked == [f"/sk-test/boot/{scripts.sha256}.sh", f"/sk-test/bundles/{sha(agent)}.tar"]
    second = run(scripts.user_data[kind], site, tmp_path)
    assert second.returncode == 0 and len(site.asked) == 3, "a bundle that is there is not fetched again"
    assert "must-not-leak" not in first.stdout + first.stderr + second.stdout + second.stderr


@pytest.mark.parametrize("spoilt", ["boot", "bundles"])
def test_a_script_with_a_wrong_hash_is_not_run(
    scripts: boot.Scripts, serve: Serve, tmp_path: Path, spoilt: str
) -> None:
    objects, tags = released(scripts, bundle_of("print('must not run')"))
    key = next(key for key in objects if key.startswith(spoilt))
    site = serve({**objects, key: b"echo must not run"}, tags)
    done = run(scripts.user_data["spot"], site, tmp_path)
    assert done.returncode != 0
    assert f"{key} does not have the hash of its name: not used" in done.stderr
    assert "must not run" not in done.stdout
    assert not list(tmp_path.glob("var/lib/spotkeeper/bundle/*/site"))


def test_a_release_changes_tags_and_no_user_data(settings: Settings, scripts: boot.Scripts) -> None:
    """EC2 would stop a static machine for it."""
    slower = boot.render(replace(settings, limits=replace(settings.limits, lease_minutes=60)))
    assert slower.user_data == scripts.user_data
    for text in scripts.user_data.values():
        assert scripts.sha256 not in text and "roothelper" not in text
    assert "roothelper" in scripts.startup


def test_without_another_endpoint_aws_is_called(scripts: boot.Scripts) -> None:
    code = scripts.user_data["spot"].split("<<'PY'\n")[1].split("\nPY\n")[0]
    data = b"echo hello"
    told = {
        "iam/security-credentials/": f"{ROLE}\n",
        f"iam/security-credentials/{ROLE}": json.dumps(
            {"AccessKeyId": KEYS.access_key, "SecretAccessKey": KEYS.secret_key, "Token": KEYS.token}
        ),
        "placement/region": REGION,
        "tags/instance": "Name\nsk-bucket",
        "tags/instance/sk-bucket": "sk-test",
    }
    asked: list[tuple[str, dict[str, str]]] = []

    def get(url: str, headers: dict[str, str], method: str = "GET") -> bytes:
        if "169.254.169.254" in url:
            return told.get(url.partition("/meta-data/")[2], "token").encode()
        asked.append((url, {name.lower(): value for name, value in headers.items()}))
        return data

    fetch: dict[str, Any] = {"__name__": "fetch"}
    exec(compile(code, "fetch", "exec"), fetch)  # noqa: S102 - what the machine runs
    fetch["get"] = get
    assert fetch["fetched"](f"boot/{sha(data)}.sh") == data
    (url, headers) = asked[0]
    assert url == f"https://s3.{REGION}.amazonaws.com/sk-test/boot/{sha(data)}.sh"
    assert headers["authorization"].endswith(f"Signature={signature(url, headers)}")


def test_the_scripts_are_correct_shell_and_fit(scripts: boot.Scripts) -> None:
    for text in (scripts.startup, *scripts.user_data.values()):
        found = subprocess.run(
            [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "-"],
            input=text, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout
    for text in scripts.user_data.values():
        assert len(text.splitlines()) <= 75 and len(text.encode()) < boot.USER_DATA_BYTES / 2
    assert scripts.shutdown == "", "the unit's own stop serves"


def test_a_dynamic_machine_arms_its_watchdog_first(settings: Settings, scripts: boot.Scripts) -> None:
    armed = f"systemd-run --quiet --collect --on-active={2 * settings.boot_deadline_s()} "
    assert scripts.user_data["spot"].index(armed) < scripts.user_data["spot"].index("<<'PY'")
    assert "systemctl poweroff" not in scripts.user_data["static"], "a static machine is Pulumi's"
    assert "systemctl poweroff" not in scripts.startup, "once is enough"


def test_every_boot_runs_the_script_again(scripts: boot.Scripts) -> None:
    """cloud-init runs user data once in a machine's life, and what stands in this folder at every boot."""
    for text in scripts.user_data.values():
        assert "EACH=/var/lib/cloud/scripts/per-boot/spotkeeper\n" in text
        assert text.index('install -D -m 700 "$0" "$EACH"') < text.index("<<'PY'")


def test_the_watchdog_file_is_the_same_in_script_and_agent(scripts: boot.Scripts) -> None:
    assert scripts.sha256 == sha(scripts.startup.encode())


def test_render_shows_the_scripts_that_machines_run(scripts: boot.Scripts) -> None:
    from spotkeeper.cli.stacks.render import stack_texts

    shown = {each.name: each.text for each in stack_texts(STACKS / "Pulumi.example-aws.yaml", None)}
    assert shown == {
        "user-data (spot pools)": scripts.user_data["spot"],
        "user-data (static pools)": scripts.user_data["static"],
        "startup-script": scripts.startup,
    }


def test_a_machine_without_volume_links_gets_the_agents_link(settings: Settings, scripts: boot.Scripts) -> None:
    """Xen machines (P3) call what is attached as /dev/sdf xvdf, and udev knows no id of it."""
    (rule,) = [line for line in scripts.startup.splitlines() if line.startswith("SUBSYSTEM")]
    words = dict(re.findall(r'([A-Z]+)(?:\{\w+\})?\+?==?"([^"]+)"', rule))
    folder, _, link = words["SYMLINK"].rpartition("/")
    device = agent_settings.Settings.device.fget(SimpleNamespace(root=Path("/")))  # type: ignore[attr-defined]
    assert device == Path("/dev", folder, link) and roothelper.DISK.match(link)
    assert words["KERNEL"] == DEVICE.replace("/dev/sd", "xvd") == "xvdf"


@pytest.mark.parametrize(
    ("tags", "host", "region"),
    [
        ({}, "s3.us-west-2.amazonaws.com", "us-west-2"),
        (
            {"sk-storage": "https://s3.dualstack.us-east-1.amazonaws.com"},
            "s3.dualstack.us-east-1.amazonaws.com",
            REGION,
        ),
        ({"sk-storage": "http://127.0.0.1:9"}, "127.0.0.1:9", "us-west-2"),
    ],
)
def test_a_request_is_signed_for_the_buckets_region(tags: dict[str, str], host: str, region: str) -> None:
    """The machine is in us-west-2; only the address tells where the bucket is."""
    source = re.sub(r"{%.*?%}", "", (boot.TEMPLATES / "fetch-aws.py.j2").read_text())
    keys = {"AccessKeyId": "a", "SecretAccessKey": "s", "Token": "t"}
    said = {
        "tags/instance": "\n".join(tags), "tags/instance/sk-bucket": "b", "placement/region": "us-west-2",
        "iam/security-credentials/": ROLE, f"iam/security-credentials/{ROLE}": json.dumps(keys),
        **{f"tags/instance/{name}": value for name, value in tags.items()},
    }  # fmt: skip
    asked: list[tuple[str, dict[str, str]]] = []
    space: dict[str, Any] = {"checked": lambda _, data: data, "get": lambda *one: asked.append(one) or b""}
    exec("import hashlib, hmac, json, os, time, urllib.parse\n" + source, space)  # noqa: S102 - the shipped script
    space["meta"] = said.__getitem__
    space["fetched"]("boot/x.sh")
    ((url, headers),) = asked
    assert url.split("/")[2:] == [host, "b", "boot", "x.sh"]
    assert f"/{region}/s3/aws4_request," in headers["Authorization"]
