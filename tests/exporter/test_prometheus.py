"""``spotkeeper exporter`` as a process: its formats, how it ends, and what a real Prometheus makes of it.

Prometheus and promtool are Debian's package `prometheus`; without them these tests are skipped.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotkeeper.cli.stacks import exporter
from spotkeeper.client.errors import CliError
from spotkeeper.client.target import Target
from spotkeeper.exporter import server
from spotkeeper.exporter.reading import StackReader
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus and promtool are not installed (Debian: prometheus)"
)
LIMIT_S = 60.0


@pytest.fixture
def url(target: Target, store: Store) -> Iterator[str]:
    """The address of a running exporter."""
    mine = {"SPOTKEEPER_STACK": "prod", "SPOTKEEPER_BUCKET": target.bucket, "SPOTKEEPER_CLOCK": "0:0:1"}
    command = [sys.executable, "-m", "spotkeeper.cli.main", "exporter", "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(command, env={**os.environ, **mine}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, "a stop is no failure"


@pytest.fixture
def served() -> Iterator[int]:
    """The port of a server on loopback without a reading."""
    http = server.serve("127.0.0.1", 0, server.Pages())
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield http.server_address[1]
    http.shutdown()
    http.server_close()


def get(url: str, **headers: str) -> tuple[str, str]:
    """The body and the content type."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, headers=named)  # noqa: S310 - this test's own server
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
        body = answer.read()
        if answer.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        return body.decode(), answer.headers["Content-Type"]


def test_a_request_chooses_the_format(url: str) -> None:
    text, kind = get(url)
    assert kind.startswith("text/plain; version=0.0.4") and "# EOF" not in text
    opened, kind = get(url, Accept=server.USUAL[0], Accept_Encoding="gzip")
    assert kind.startswith("application/openmetrics-text; version=1.0.0") and opened.endswith("# EOF\n")
    for page in (text, opened):
        assert 'spotkeeper_job_step{job_id="abcdefgh",job_name="first"} 40.0' in page
    assert get(url.replace("/metrics", "/-/healthy"))[0] == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(url.replace("/metrics", "/"))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9464", "127.0.0.1.evil.example", "[::1"])
def test_a_name_of_a_stranger_is_refused_on_loopback(served: int, host: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(f"http://127.0.0.1:{served}/metrics", Host=host)


@pytest.mark.parametrize("host", ["localhost:9464", "127.0.0.1:9464", "[::1]:9464", "10.0.0.7"])
def test_addresses_and_localhost_are_answered(served: int, host: str) -> None:
    assert get(f"http://127.0.0.1:{served}/-/healthy?from=a-probe", Host=host)[0] == "ok\n"


@needs_prometheus
def test_promtool_finds_no_fault_in_the_metrics(url: str) -> None:
    """It reads the classic text only."""
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=get(url)[0], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_prometheus
def test_promtool_finds_no_fault_in_the_rules() -> None:
    assert PROMTOOL is not None
    for command in (["rules", str(MONITORING / "alerts.yml")], ["config", str(MONITORING / "prometheus.yml")]):
        done = subprocess.run([PROMTOOL, "check", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_prometheus_scrapes_and_evaluates_the_rules(url: str, tmp_path: Path) -> None:
    prometheus = Prometheus(url, tmp_path)
    try:
        found = prometheus.until("spotkeeper_job_spent_usd")
        assert {one["metric"]["job_name"] for one in found} >= {"first", "held"}
        assert all(one["metric"]["job"] == "spotkeeper" for one in found), "no label of ours is Prometheus's own"
        prometheus.until('ALERTS{alertname="SpotkeeperJobOnHold", job_name="held"}')
        rules = prometheus.api("rules")["groups"]
        assert [rule["lastError"] for group in rules for rule in group["rules"] if rule.get("lastError")] == []
        panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
        for query in (target["expr"] for panel in panels for target in panel["targets"]):
            prometheus.api("query", query=query.replace("$job_name", ".*"))  # a wrong expression answers 400
        (scraped,) = prometheus.api("targets")["activeTargets"]
        assert (scraped["health"], scraped["lastError"]) == ("up", "")
    finally:
        prometheus.stop()


class Prometheus:
    """A server that scrapes one address every second and evaluates the shipped rules."""

    def __init__(self, url: str, folder: Path) -> None:
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["rule_files"] = [str(MONITORING / "alerts.yml")]
        config["global"] = {"evaluation_interval": "1s"}
        config["scrape_configs"][0]["scrape_interval"] = "1s"
        config["scrape_configs"][0]["scrape_timeout"] = "1s"
        config["scrape_configs"][0]["static_configs"] = [{"targets": [urllib.parse.urlsplit(url).netloc]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._at = f"127.0.0.1:{free.getsockname()[1]}"
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
        assert PROMETHEUS is not None
        with (folder / "prometheus.log").open("w") as told:
            command = [PROMETHEUS, *options, f"--web.listen-address={self._at}"]
            self._process = subprocess.Popen(command, stdout=told, stderr=told)
        self._log = folder / "prometheus.log"

    def api(self, path: str, **query: str) -> Any:
        address = f"http://{self._at}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
            return json.load(answer)["data"]

    def until(self, query: str) -> list[Any]:
        """Ask until the answer has samples; Prometheus tells nobody that it has scraped."""
        ends = time.monotonic() + LIMIT_S
        while time.monotonic() < ends:
            assert self._process.poll() is None, self._log.read_text()
            try:
                if found := self.api("query", query=query)["result"]:
                    return found
            except (OSError, ValueError):  # it does not listen yet
                pass
            time.sleep(0.2)
        raise AssertionError(f"{query}: no samples; {self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)


@pytest.mark.parametrize("error", [StoreError("the bucket is away"), ValueError("absurd")])
def test_a_failed_read_keeps_the_last_reading_and_is_counted(target: Target, store: Store, error: Exception) -> None:
    pages, told = server.Pages(), list[Any]()
    server.read_once(StackReader(target).read, pages, told.append)

    def fails() -> Any:
        raise error

    server.read_once(fails, pages, told.append)
    assert len(told) == 1
    page = pages.page("", packed=False)[0].decode()
    assert "spotkeeper_exporter_read_failures_total 1.0" in page
    assert 'spotkeeper_job_step{job_id="abcdefgh",job_name="first"} 40.0' in page


def test_a_scrape_renders_nothing(target: Target, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = server.Pages()
    reading = StackReader(target).read()
    pages.show(reading)
    pages.page("", packed=False)
    pages.show(reading)
    monkeypatch.setattr(server, "_render", None)
    for accept, packed in ((server.USUAL[0], True), (server.USUAL[1], True), ("", False)):
        assert pages.page(accept, packed=packed)[0]


def test_strange_requests_fill_no_memory(target: Target, store: Store) -> None:
    pages = server.Pages()
    pages.show(StackReader(target).read())
    for number in range(50):
        pages.page(f"application/openmetrics-text; version={number + 1}.0.0", packed=False)
    assert len(pages._rendered) <= server.MOST_FORMATS


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:80", ("::1", 80)),
        (":9464", ("", 9464)),
        ("host:0", ("host", 0)),
    ],
)
def test_addresses(listen: str, found: tuple[str, int]) -> None:
    assert exporter.address(listen) == found


@pytest.mark.parametrize("listen", ["9464", "127.0.0.1", "127.0.0.1:70000", "::1:80", "a:b:1"])
def test_wrong_addresses_are_refused(listen: str) -> None:
    with pytest.raises(CliError, match="ADDRESS:PORT"):
        exporter.address(listen)


def test_an_address_in_use_is_refused(target: Target, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTKEEPER_STACK", "prod")
    monkeypatch.setenv("SPOTKEEPER_BUCKET", target.bucket)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CliError, match="cannot listen"):
            exporter.run(f"127.0.0.1:{taken.getsockname()[1]}", 30.0, None, None, as_json=True)
    with pytest.raises(CliError, match="at least 5 seconds"):
        exporter.run("127.0.0.1:0", 0.1, None, None, as_json=True)
