"""The command as a process: where it listens, how a browser gets in, what it leaves behind."""

from __future__ import annotations

import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import requests

from spotkeeper.client.errors import CliError
from spotkeeper.dashboard import server
from spotkeeper.dashboard.guard import Guard
from spotkeeper.reconcile.store.store import Store
from tests.cli.records import a_job
from tests.dashboard.conftest import a_bucket
from tests.dashboard.served import Served, serving
from tests.dashboard.test_guard import App

HEAP_BYTES = 64 << 20  # what glibc reserves for each further heap
Bucket = tuple[Store, dict[str, str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("dashboard")
    store, environment = a_bucket(folder)
    a_job(store)
    with serving(environment, folder, "first") as served:
        yield served
    assert not served.file.exists()


def test_the_file_opens_the_page_and_only_its_owner_can_read_it(served: Served) -> None:
    assert served.url.startswith(f"http://127.0.0.1:{served.port}/open?code=")
    assert stat.S_IMODE(served.file.stat().st_mode) == 0o600
    before = served.file.read_text()
    code = served.url.partition("code=")[2].partition("&")[0]
    assert code in before and "/jobs/abcdefgh" in before
    browser = requests.Session()
    page = browser.get(served.url, timeout=30)
    assert page.status_code == 200 and page.url == f"{served.root}/jobs/abcdefgh"
    assert 'lang="en-US"' in page.text and "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert '"skipHijack":true' in page.text.replace(" ", ""), "no progress bar without a name"
    assert requests.get(served.url, timeout=30).status_code == 403
    assert code not in served.file.read_text(), "the file has the next address"
    assert requests.get(f"{served.root}/_nicegui_ws/socket.io/?EIO=4&transport=polling", timeout=30).status_code == 403
    assert requests.get(f"{served.root}/alive", timeout=30).text == "alive\n"
    missing = browser.get(f"{served.root}/nothing", timeout=30)
    assert missing.status_code == 404 and "No such page" in missing.text and 'href="/stack"' in missing.text


def test_all_threads_share_one_heap(served: Served) -> None:
    """Ten tabs on five jobs with many metrics take 120 MB less by that (``bench/service/dashboard.py``)."""
    browser = requests.Session()
    page = browser.get(served.next_url(), timeout=30).text
    for path in re.findall(r'(?:src|href)="(/_nicegui/[^"]+)"', page):  # a thread reads each file
        assert browser.get(served.root + path, timeout=30).ok
    maps = [line.split()[:2] for line in Path(f"/proc/{served.pid}/maps").read_text().splitlines()]
    ends = [tuple(int(end, 16) for end in span.split("-")) for span, _ in maps]
    heaps = [begin for (begin, _), (_, end) in pairwise(ends) if end - begin == HEAP_BYTES and begin % HEAP_BYTES == 0]
    assert heaps == []


def test_large_buffers_are_no_part_of_the_heap() -> None:
    """Also after one was freed, which makes glibc take the next ones from the heap."""
    grown = """
from spotkeeper.dashboard import server
def heap():
    begin, end = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0].split("-")
    return int(end, 16) - int(begin, 16)
server.bound_memory()
before = heap()
del (freed := [bytearray(8 << 20)])[0]
one = bytearray(4 << 20)
print(heap() - before)
"""
    done = subprocess.run([sys.executable, "-c", grown], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 1 << 20


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGHUP])
def test_no_file_stays_when_the_dashboard_is_ended(bucket: Bucket, tmp_path: Path, ended_by: signal.Signals) -> None:
    """Until then it has a new one-time address long before the last one expires; the last one works meanwhile."""
    hasty = "from spotkeeper.dashboard import server; server.CODE_S = 0.2"
    with serving(bucket[1], tmp_path, ended_by=ended_by, first=hasty) as served:
        code = served.url.partition("code=")[2].partition("&")[0]
        ends = time.monotonic() + 30
        while code in served.file.read_text():
            assert time.monotonic() < ends, "the one-time address is not renewed"
            time.sleep(0.05)
        assert requests.get(served.url, timeout=30, allow_redirects=False).status_code == 303
    assert list(served.file.parent.iterdir()) == []


def test_files_of_killed_dashboards_are_removed_at_the_next_start_and_nothing_else(
    bucket: Bucket, tmp_path: Path
) -> None:
    with serving(bucket[1], tmp_path, ended_by=signal.SIGKILL) as killed:
        folder = killed.file.parent
        kept = {folder / "notes.html", folder / "dashboard-1-folder.html", folder / "dashboard-1-link.html"}
        (folder / "notes.html").touch()
        (folder / "dashboard-1-folder.html").mkdir()
        (tmp_path / "mine").touch()
        (folder / "dashboard-1-link.html").symlink_to(tmp_path / "mine")
        server.remove_stale(folder)
        assert killed.file.exists(), "it runs"
    assert killed.file.exists()
    server.remove_stale(folder)
    assert set(folder.iterdir()) == kept and (tmp_path / "mine").exists()


def test_a_start_removes_what_a_killed_dashboard_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "spotkeeper").mkdir()
    stale = tmp_path / "spotkeeper" / "dashboard-1-a.html"
    stale.touch(0o600)
    one, two = server.Opening(1, "/"), server.Opening(2, "/")
    assert not stale.exists() and one.file.exists() and stat.S_IMODE(one.file.stat().st_mode) == 0o600
    for opening in (one, two):
        opening.write(Guard(App(), 1))
        assert "code=" in opening.file.read_text()
        opening.remove()
    assert list(stale.parent.iterdir()) == []


def test_a_taken_port_is_a_readable_error() -> None:
    with server.bound(0) as taken, pytest.raises(CliError, match="cannot listen on"):
        taken.listen()
        server.bound(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("proxy", "secret", "said"),
    [("http://dash.example.com", "s" * 40, "https://"), ("https://dash.example.com", "short", "at least 32")],
)
def test_a_proxy_needs_https_and_a_long_secret(
    proxy: str, secret: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(server.PROXY_SECRET, secret)
    with pytest.raises(CliError, match=said):
        server.proxy_secret(proxy)


def test_a_proxy_needs_read_only(bucket: Bucket, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="needs --read-only"),
        serving(bucket[1], tmp_path, "--behind", "https://a.b"),
    ):
        pass
