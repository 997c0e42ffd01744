"""``spotkeeper live-check`` against a whole cloud: its checks and errors; it leaves nothing behind."""

from __future__ import annotations

import json

import pytest

from spotkeeper.cli.main import run
from spotkeeper.cli.stacks import live_check
from spotkeeper.cli.stacks.live_check import CheckResult, Row
from spotkeeper.client import submit as submitting
from spotkeeper.client.target import FOLDER
from tests.lifecycle.stage import Stage

pytestmark = pytest.mark.lifecycle


@pytest.fixture
def shell(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv(FOLDER, str(stage.cloud.folder))
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET", "SPOTKEEPER_CLOCK", "SPOTKEEPER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return stage


def checked(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Row]]:
    code = run(["live-check", "--json", *argv])
    out, err = capsys.readouterr()
    assert out, err
    rows = [Row(row["check"], CheckResult(row["state"]), row["found"], row["remedy"]) for row in json.loads(out)]
    return code, {row.check: row for row in rows}


@pytest.mark.matrix  # without capacity and interrupted in `make test`; tests/cli/stacks has each check's findings
def test_live_check_runs_every_check_and_leaves_nothing(shell: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    _, rows = checked(capsys, "--yes")
    drill = rows.pop("a preemption costs no step")
    assert drill.state is CheckResult.OK or "target" in drill.found, drill  # a busy machine may miss a target of time
    fence = rows.pop("the job cannot get the machine's token")
    assert (fence.state, "does not apply" in fence.found) == (CheckResult.SKIPPED, True)
    assert {row.state for row in rows.values()} == {CheckResult.OK}, rows
    assert "spot in " in rows["a spot machine is launched"].found
    assert list(rows)[-1] == "everything is deleted"
    shell.until("nothing to be left", shell.is_quiet)


def test_without_capacity_live_check_fails_and_cleans_up(
    shell: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_check, "LEAST_S", 5.0)
    monkeypatch.setattr(live_check, "MACHINE_S", 100.0)
    for zone in shell.cloud.config.zones:
        shell.cloud.set_capacity(zone, 0)
    try:
        code, rows = checked(capsys, "--yes")
    finally:
        shell.fill()
    assert code == 1
    assert rows["a spot machine is launched"].state is CheckResult.FAILED
    assert rows["a checkpoint is durable"].state is CheckResult.SKIPPED
    shell.until("nothing to be left", shell.is_quiet)


def test_without_a_terminal_live_check_only_states_its_cost(shell: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["live-check"]) == 4
    err = capsys.readouterr().err
    assert "at most $" in err and "--yes" in err
    assert shell.store.active_jobs() == ()


def test_an_interrupted_live_check_leaves_nothing(
    shell: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the job's record is written and before the command knows its id."""

    def cut_off(*_: object) -> tuple[object, bool]:
        submit_file(*_)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    submit_file = submitting.submit_file
    monkeypatch.setattr(submitting, "submit_file", cut_off)
    with pytest.raises(KeyboardInterrupt):
        live_check.run(None, yes=True, listed=False, as_json=True)
    capsys.readouterr()
    shell.until("nothing to be left", shell.is_quiet)
    assert shell.store.active_jobs() == () or shell.until("its burial", lambda: not shell.store.active_jobs())
