"""What a job in a container image is started with; ``tests/agent/systemd/test_image.py`` runs it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.contract.generation import JobRun
from spotkeeper_agent.core.events import LauncherLost
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import job_path
from spotkeeper_agent.job.launch_spec import launcher_kind
from spotkeeper_agent.job.launcher_client import Launcher
from spotkeeper_agent.launcher import image, spool
from spotkeeper_agent.launcher.image import Container, ImageError

NAME = "docker.io/a/b@sha256:" + "0" * 64


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    monkeypatch.setattr(image, "CDI", (str(tmp_path / "cdi"),))
    monkeypatch.setenv("PYTHONPATH", "/bundle:/mine")
    return Container(NAME, "python3", str(tmp_path / "image"), ("/run/spotkeeper", "/mnt"))


def test_values_of_variables_are_not_in_the_command(container: Container) -> None:
    env = {"MINE": "hush", "PATH": "/opt/bin", "LD_PRELOAD": "/opt/lib.so", "GOOD_TOKEN": "hush"}
    env |= {"STORAGE_KEY": "hush", image.SECRETS: "STORAGE_KEY"}
    command, outside = container.command(["-m", "x"], env, "/src")
    assert "hush" not in " ".join(command)
    assert {"--env=MINE", "--env=GOOD_TOKEN", "--env=PYTHONPATH", "--workdir=/src"} <= set(command)
    assert "--env=STORAGE_KEY" in command and outside["STORAGE_KEY"] == "hush", "a secret, whatever its name"
    assert outside["MINE"] == "hush" and outside["PYTHONPATH"] == "/bundle:/mine"
    assert {"--env=PATH=/opt/bin", "--env=LD_PRELOAD=/opt/lib.so"} <= set(command), "podman itself does not see them"
    assert outside["PATH"] != "/opt/bin" and "LD_PRELOAD" not in outside
    assert command[-4:] == [NAME, "python3", "-m", "x"]
    assert [word for word in command if word.startswith("--volume")] == [
        f"--volume={folder}:{folder}:rslave"
        for folder in ("/run/spotkeeper", "/mnt", "/tmp", "/dev/shm")  # noqa: S108
    ]


def test_each_generation_begins_with_an_empty_state(container: Container, tmp_path: Path) -> None:
    for name in ("run", "layers", "images"):
        left = tmp_path / "image" / name / "left"
        left.mkdir(parents=True)
        left.chmod(0)
    container.command([], {}, "/src")
    assert [(tmp_path / "image" / name / "left").exists() for name in ("run", "layers", "images")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "logs_in", "ends"),
    [
        ("us-docker.pkg.dev/p/r/a", True, "exit 0"),
        ("us-docker.pkg.dev/p/r/a", True, "exit 125"),
        ("us-docker.pkg.dev/p/r/a", True, "kill -9 $$"),
        ("docker.io/a/b", False, "exit 0"),
        ("evilgcr.io/a/b", False, "exit 0"),
    ],
)
def test_a_pull_from_googles_registries_uses_the_jobs_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, logs_in: bool, ends: str
) -> None:
    """The token is nowhere once the pull has ended, even if it was killed."""
    script = '#!/bin/sh\ncase "$*" in *exists*) exit 1;; esac\necho "$@" >"$ASKED"\n'
    script += (
        f'for word in "$@"; do case $word in --authfile=*) cat "${{word#*=}}" >"$ASKED.auth";; esac; done\n{ends}\n'
    )
    (tmp_path / "podman").write_text(script)
    (tmp_path / "unshare").write_text('#!/bin/sh\nwhile [ "$1" != env ]; do shift; done; exec "$@"\n')
    for program in ("podman", "unshare"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if self.path.endswith("/service-accounts/default/token") else 404)
            self.end_headers()
            self.wfile.write(b'{"access_token": "of-the-job"}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        with contextlib.nullcontext() if ends == "exit 0" else pytest.raises(ImageError, match="cannot pull"):
            Container(f"{name}@sha256:{'0' * 64}", "python3", str(tmp_path / "image"), ()).pull()
        assert not [file for file in Path("/proc/self/fd").iterdir() if "auth.json" in str(file.resolve())]
    asked, seen = (tmp_path / "asked").read_text(), tmp_path / "asked.auth"
    assert ("pull --authfile=/proc/self/fd/" in asked) is logs_in and f"{name}@" in asked
    assert seen.exists() is logs_in
    if logs_in:
        auth = json.loads(seen.read_text())["auths"]["us-docker.pkg.dev"]["auth"]
        assert base64.b64decode(auth) == b"oauth2accesstoken:of-the-job"
    files = [file for file in (tmp_path / "image").rglob("*") if file.is_file()]
    assert not [file for file in files if b"of-the-job" in file.read_bytes() or b"auths" in file.read_bytes()]


def test_only_googles_own_hosts_get_the_identitys_token() -> None:
    for host in ("gcr.io", "eu.gcr.io", "us-docker.pkg.dev"):
        assert image.GOOGLES.match(host)
    for host in ("evilgcr.io", "evilpkg.dev", "gcr.io.evil.dev", "gcr.io:5000", "x@gcr.io", "evil/gcr.io", ".pkg.dev"):
        assert not image.GOOGLES.match(host)


def test_secrets_are_named_as_in_the_spool() -> None:
    assert image.SECRETS == spool.SECRETS


def test_gpus_need_a_cdi_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "CDI", (str(tmp_path),))
    monkeypatch.setattr(image, "GPU_DRIVER", str(tmp_path / "nvidiactl"))
    assert "--device=nvidia.com/gpu=all" not in image.devices()
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(ImageError, match="nvidia-ctk cdi generate"):
        image.devices()
    (tmp_path / "nvidia.yaml").write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    assert "--device=nvidia.com/gpu=all" in image.devices()


def test_a_machine_without_podman_says_what_it_lacks(tmp_path: Path) -> None:
    words = [sys.executable, "-BS", image.__file__, str(tmp_path), NAME, "python3", "/mnt"]
    done = subprocess.run(words, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("image: this machine lacks unshare, podman, conmon, crun: install podman")


def test_the_launcher_of_an_image_is_cold_and_runs_under_the_agents_python(tmp_path: Path) -> None:
    run = JobRun("a", ("train.py",), None, env={"A": "1", "PYTHONPATH": "/x"}, python="python3.13", image=NAME)
    kind = launcher_kind(run, tmp_path, tmp_path, (tmp_path,))
    assert (kind.mode, kind.python, kind.env) == ("exec", sys.executable, (("PYTHONPATH", "/x"),))
    assert kind.image is not None and kind.image.python == "python3.13"
    assert kind.key() != launcher_kind(run, tmp_path, tmp_path, (tmp_path / "b",)).key()


def test_machines_of_the_one_machine_cloud_refuse_an_image(tmp_path: Path) -> None:
    posted: queue.Queue[Any] = queue.Queue()
    launcher = Launcher(tmp_path, job_path(), posted.put, Log(write=lambda _: None))
    launcher.begin(launcher_kind(JobRun("a", ("train.py",), None, image=NAME), tmp_path, tmp_path))
    lost = posted.get(timeout=30)
    assert isinstance(lost, LauncherLost)
    assert lost.reason == "image: machines of the one-machine cloud run no containers: leave it out there"
