"""``spotkeeper preflight`` as a person and a program see it; its checks are tested in ``tests/agent/preflight``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spotkeeper_agent import cloud, preflight
from spotkeeper_agent.cloud import metadata
from spotkeeper_agent.preflight.findings import Check, Finding, Level, Machine
from tests.cli.conftest import Cli


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Machine]]:
    """Sets what is found; gives the places that were looked at."""
    monkeypatch.setattr(cloud, "DMI", tmp_path / "nobody")
    for name in (metadata.GCE_HOST, metadata.EC2_ENDPOINT):
        monkeypatch.delenv(name, raising=False)

    def set_to(*findings: Finding) -> list[Machine]:
        seen: list[Machine] = []

        def looks(finding: Finding) -> Check:
            def look(place: Machine) -> Finding:
                seen.append(place)
                return finding

            return Check(finding.check, look, 5.0, "")

        monkeypatch.setattr(preflight, "all_checks", lambda: tuple(looks(finding) for finding in findings))
        return seen

    return set_to


GOOD = Finding("space", Level.OK, "20 GB free", figures={"free_gb": 20.0})
BAD = Finding("driver", Level.ERROR, "2 GPUs, no driver", "install the driver")
ODD = Finding("clock", Level.WARNING, "+3.0 s", "chrony")


def test_findings_are_printed_with_remedies(cli: Cli, checks: Callable[..., list[Machine]]) -> None:
    checks(GOOD, ODD)
    done = cli("preflight")
    assert done.code == 0 and done.err == ""
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0] == ["check", "found", "what", "to", "do"]
    assert rows[1:] == [["space", "ok", "20", "GB", "free"], ["clock", "warning", "+3.0", "s", "chrony"]]


def test_an_error_is_shown_and_sets_the_exit_code(cli: Cli, checks: Callable[..., list[Machine]]) -> None:
    checks(GOOD, BAD)
    done = cli("preflight", "--json")
    assert done.code == 1 and done.err == "error: preflight: driver\n"
    said = json.loads(done.out)
    assert said["level"] == "error"
    assert said["findings"][0] == {"check": "space", "level": "ok", "found": "20 GB free", "figures": {"free_gb": 20.0}}
    assert said["findings"][1]["remedy"] == "install the driver"


def test_the_output_names_the_folder(cli: Cli, checks: Callable[..., list[Machine]], tmp_path: Path) -> None:
    seen = checks(GOOD)
    words = ["--folder", tmp_path, "--peer", "10.0.0.7", "--peer", "10.0.0.8:22", "--notice", "30", "--python", "py"]
    assert cli("preflight", *words).code == 0
    place = seen[0]
    assert (place.folder, place.peers, place.notice_s) == (tmp_path, ("10.0.0.7", "10.0.0.8:22"), 30.0)
    assert (place.python, place.metadata) == ("py", None), "this is no cloud machine"


def test_a_missing_folder_is_an_error(cli: Cli, checks: Callable[..., list[Machine]], tmp_path: Path) -> None:
    checks(GOOD)
    assert cli("preflight", "--folder", tmp_path / "no").code == 2


def test_a_laptop_skips_checks_that_need_a_cloud_machine(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real checks, the quick ones: nothing asks for an address that only a cloud has."""
    monkeypatch.setattr(cloud, "DMI", tmp_path / "nobody")
    for name in (metadata.GCE_HOST, metadata.EC2_ENDPOINT):
        monkeypatch.delenv(name, raising=False)
    said = json.loads(cli("preflight", "--quick", "--json", "--folder", tmp_path).out)
    levels = {finding["check"]: finding["level"] for finding in said["findings"]}
    assert levels["metadata"] == "skipped" and set(levels) >= {"clock", "space", "tcp_retries2", "driver", "nccl"}
