"""The scripts a machine runs: rendered from constants, correct shell, and they do what they say."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import UndefinedError
from msgspec.structs import replace

from infra import boot
from infra.settings.model import Agent, Settings
from infra.settings.read import from_config
from spotkeeper.contract import names
from spotkeeper.local.deploy.config import read_config
from spotkeeper_agent.__main__ import CONFIG_ERROR
from tests import web
from tests.infra.conftest import STACKS

TOKEN = "a-token-that-must-not-leak"  # noqa: S105


@pytest.fixture(scope="module")
def settings() -> Settings:
    return from_config(read_config(STACKS / "Pulumi.local.yaml", "http://127.0.0.1:9"), "local")


@pytest.fixture(scope="module")
def scripts(settings: Settings) -> boot.Scripts:
    return boot.render(settings)


def test_the_scripts_are_correct_shell(scripts: boot.Scripts) -> None:
    for text in (scripts.startup, scripts.shutdown):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        found = subprocess.run(
            [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "-"],
            input=text, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout


def test_the_startup_script_is_short_and_its_template_too(scripts: boot.Scripts) -> None:
    assert len((boot.TEMPLATES / "startup.sh.j2").read_text().splitlines()) <= 60
    assert len(scripts.startup.encode()) < boot.METADATA_BYTES


def test_the_python_inside_compiles(scripts: boot.Scripts) -> None:
    inner = scripts.startup.split("<<'PY'\n")[1].split("\nPY\n")[0]
    compile(inner, "startup", "exec")


def test_an_interpreter_with_a_space_is_one_word(settings: Settings) -> None:
    text = boot.render(replace(settings, agent=Agent(interpreter="/opt/my python/bin/python3"))).startup
    assert "PYTHON='/opt/my python/bin/python3'" in text
    assert 'ExecStart=/usr/bin/env "/opt/my python/bin/python3" -m spotkeeper_agent' in text


def files_of(scripts: boot.Scripts) -> dict[str, str]:
    """What the startup script writes, by path."""
    return dict(re.findall(r"(?ms)^  cat >(\S+) <<'FILE'\n(.*?\n)FILE$", scripts.startup))


def test_the_agents_exit_code_is_respected_with_and_without_systemd(scripts: boot.Scripts) -> None:
    unit = files_of(scripts)["/etc/systemd/system/spotkeeper.service"]
    assert f"\nRestartPreventExitStatus={CONFIG_ERROR}\n" in unit
    assert f"[ $? -ne {CONFIG_ERROR} ] || exit {CONFIG_ERROR}" in scripts.startup


def test_root_programs_are_part_of_the_template(scripts: boot.Scripts) -> None:
    files = files_of(scripts)
    assert set(files) == {f"/usr/local/lib/spotkeeper/{name}" for name in boot.AS_ROOT} | {
        f"/etc/systemd/system/{name}" for name in boot.UNITS
    }
    for name in boot.AS_ROOT:
        assert (
            files[f"/usr/local/lib/spotkeeper/{name}"] == (boot.ROOT / "agent/spotkeeper_agent/host" / name).read_text()
        )
    for text in files.values():
        for line in re.findall(r"(?m)^Exec\w+=(.*)$", text):
            program = line.partition("-IBS ")[2].split()
            if not program:  # the agent, which runs as nobody in particular
                continue
            assert program[0].startswith("/usr/local/lib/spotkeeper/") == ("+" in line or "root" in program[0])


needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def analyze(folder: Path, units: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    for name, text in units.items():
        (folder / name).write_text(text)
    paths = [str(folder / name) for name in units]
    return subprocess.run(
        ["systemd-analyze", *words, *paths], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


@needs_analyze
def test_systemd_analyze_accepts_the_units(settings: Settings, tmp_path: Path) -> None:
    def verify(units: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return analyze(tmp_path, units, "verify", "--man=no", "--recursive-errors=no")

    units = boot.units(settings)
    done = verify(units)
    assert (done.returncode, done.stderr) == (0, "")
    for name, text in units.items():
        spoilt = {name: re.sub(r"(?m)^(Type|SocketMode)=\w+", r"\1=wrong", text)}
        assert "Failed to parse" in verify(spoilt).stderr


@needs_analyze
def test_the_units_exposure_is_low(settings: Settings, tmp_path: Path) -> None:
    """Tenths, as systemd counts them: a unit as it comes has 96."""
    units = boot.units(settings)
    most = {"spotkeeper": 22, "spotkeeper-fence": 33, "spotkeeper-job": 42, "spotkeeper-root": 50}
    for name, tenths in most.items():
        unit = {f"{name}.service": units[f"{name}.service"]}
        done = analyze(tmp_path, unit, "security", "--offline=true", f"--threshold={tenths}")
        assert done.returncode == 0, done.stdout[-200:]
    unit = {"spotkeeper.service": units["spotkeeper.service"]}
    bare = {"spotkeeper.service": re.sub(r"(?s)NoNewPrivileges=.*?\n\n", "\n", unit["spotkeeper.service"])}
    assert analyze(tmp_path, bare, "security", "--offline=true", "--threshold=25").returncode == 1


def test_the_boot_watchdog_is_armed_first_and_only_on_dynamic_machines(
    settings: Settings, scripts: boot.Scripts
) -> None:
    armed = scripts.startup.index(f"systemd-run --quiet --collect --on-active={2 * settings.boot_deadline_s()} ")
    assert armed < scripts.startup.index("<<'FILE'"), "a bundle that does not come must not disarm it"
    (pattern,) = re.findall(r'"\$\{HOSTNAME%%\.\*\}" =~ (\S+) \]\]', scripts.startup)
    assert re.search(pattern, names.vm_name("demo", "abcd2345", 7, 3))
    assert not re.search(pattern, names.static_machine_name("demo", "steady", 0)), "a static machine is Pulumi's"


def test_unquotable_values_are_refused(settings: Settings) -> None:
    with pytest.raises(ValueError, match="cannot"):
        boot.render(replace(settings, agent=Agent(interpreter="python3\nrm -rf /")))


def test_quoting_filters() -> None:
    assert boot.sh("a'b") == "'a'\"'\"'b'"
    assert boot.unit('50% of "$HOME"\\') == '"50%% of \\"$$HOME\\"\\\\"'
    with pytest.raises(ValueError, match="UNIT"):
        boot.heredoc("a\nUNIT\nb", "UNIT")


def test_a_substitution_without_a_filter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "startup.sh.j2").write_text("echo {{ stack }}")
    monkeypatch.setattr(boot, "TEMPLATES", tmp_path)
    boot._environment.cache_clear()
    with pytest.raises(ValueError, match=r"startup.sh.j2: \{\{ stack \}\} passes no filter"):
        boot._render("startup.sh.j2", {"stack": "x"}, boot.METADATA_BYTES)
    (tmp_path / "startup.sh.j2").write_text("echo {{ stak|sh }}")
    with pytest.raises(UndefinedError):
        boot._render("startup.sh.j2", {"stack": "x"}, boot.METADATA_BYTES)
    boot._environment.cache_clear()


# --- run for real: a metadata server, a bucket, a root of its own -------------------------


class Site:
    """Metadata and storage of one machine. ``bundle`` is what the bucket holds under the promised name."""

    def __init__(self, bundle: bytes, promised: str) -> None:
        self.bundle = bundle
        self.promised = promised
        self.downloads = 0
        self.address = ""

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        attributes = {"sk-bundle": self.promised, "sk-bucket": "sk-test", "sk-storage": f"http://{self.address}"}
        base = "/computeMetadata/v1/instance/"
        if path.startswith(base):
            assert headers["Metadata-Flavor"] == "Google"
            if path == f"{base}service-accounts/default/token":
                return 200, json.dumps({"access_token": TOKEN}).encode()
            return 200, attributes[path.removeprefix(f"{base}attributes/")].encode()
        assert path == f"/storage/v1/b/sk-test/o/bundles/{self.promised}.tar"
        assert headers["Authorization"] == f"Bearer {TOKEN}"
        self.downloads += 1
        return 200, self.bundle


@pytest.fixture
def serve() -> Iterator[object]:
    def start(site: Site) -> Site:
        class Handler(web.Handler):
            def do_GET(self) -> None:
                path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
                self.answer(*site.answer(path, dict(self.headers)))

        site.address = running.enter_context(web.serving(Handler)).address
        return site

    with contextlib.ExitStack() as running:
        yield start


def bundle_of(text: str) -> bytes:
    """A bundle whose agent is ``text``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in (
            ("spotkeeper/__init__.py", ""),
            ("spotkeeper_agent/__init__.py", ""),
            ("spotkeeper_agent/__main__.py", text),
        ):
            entry = tarfile.TarInfo(f"site/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content.encode()))
    return buffer.getvalue()


def run(script: str, site: Site, root: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "SPOTKEEPER_ROOT": str(root), "GCE_METADATA_HOST": site.address,
                   "http_proxy": "http://127.0.0.1:1"}  # fmt: skip
    return subprocess.run(
        ["bash", "-s"], input=script, env=environment, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_machine_fetches_verifies_and_starts_the_agent(scripts: boot.Scripts, serve: object, tmp_path: Path) -> None:
    data = bundle_of("import spotkeeper, sys; print('agent', spotkeeper.__file__)")
    site: Site = serve(Site(data, hashlib.sha256(data).hexdigest()))  # type: ignore[operator]
    first = run(scripts.startup, site, tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"agent {tmp_path}/var/lib/spotkeeper/bundle/{site.promised}/site/spotkeeper/__init__.py\n"
    second = run(scripts.startup, site, tmp_path)
    assert second.returncode == 0 and site.downloads == 1, "a bundle that is there is not fetched again"
    assert TOKEN not in first.stdout + first.stderr


@pytest.mark.parametrize(("granted_s", "gives_up"), [(590.0, False), (700.0, True)])
def test_a_machine_waits_ten_minutes_for_fresh_rights(granted_s: float, gives_up: bool) -> None:
    """The conditional grants of a first `up` can take minutes, and nobody boots a static machine again."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def opened(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        if now < granted_s:
            raise urllib.error.HTTPError(request.full_url, 403, "Forbidden", Message(), None)
        return io.BytesIO(b"bundle")

    program: dict[str, Any] = {}
    exec(compile((boot.TEMPLATES / "get.py.j2").read_text(), "get", "exec"), program)  # noqa: S102 - what machines run
    program |= {"OPEN": opened, "time": SimpleNamespace(sleep=sleep)}
    if gives_up:
        with pytest.raises(SystemExit, match="http://bucket: HTTP Error 403"):
            program["get"]("http://bucket", {})
        assert 540 <= now <= 660
    else:
        assert program["get"]("http://bucket", {}) == b"bundle"


def test_a_bundle_with_another_hash_is_not_used(scripts: boot.Scripts, serve: object, tmp_path: Path) -> None:
    data = bundle_of("print('must not run')")
    site: Site = serve(Site(data, hashlib.sha256(b"another").hexdigest()))  # type: ignore[operator]
    done = run(scripts.startup, site, tmp_path)
    assert done.returncode != 0
    assert "does not have the hash of its name: not used" in done.stderr
    assert "must not run" not in done.stdout
    assert not list(tmp_path.glob("var/lib/spotkeeper/bundle/*/site"))


def test_a_half_unpacked_bundle_is_unpacked_again(scripts: boot.Scripts, serve: object, tmp_path: Path) -> None:
    data = bundle_of("print('whole')")
    site: Site = serve(Site(data, hashlib.sha256(data).hexdigest()))  # type: ignore[operator]
    part = tmp_path / "var/lib/spotkeeper/bundle" / f"{site.promised}.part"
    (part / "site").mkdir(parents=True)
    (part / "site/junk").write_text("left by a machine that lost power")
    done = run(scripts.startup, site, tmp_path)
    assert done.stdout == "whole\n", done.stderr
    assert not part.exists() and not list(tmp_path.rglob("junk"))


def test_the_shutdown_script_stops_the_agent_and_waits(scripts: boot.Scripts, tmp_path: Path) -> None:
    (tmp_path / "run/spotkeeper").mkdir(parents=True)
    agent = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    (tmp_path / "run/spotkeeper/agent.pid").write_text(f"{child.pid}\n")
    reaper = threading.Thread(target=child.wait)
    reaper.start()
    site = Site(b"", "")
    done = run(scripts.shutdown, site, tmp_path)
    reaper.join(10)
    assert done.returncode == 0 and child.returncode == 7


def test_the_shutdown_script_works_without_an_agent(scripts: boot.Scripts, tmp_path: Path) -> None:
    assert run(scripts.shutdown, Site(b"", ""), tmp_path).returncode == 0
