"""`metrics`: a job's curves as a table, CSV, JSON and TensorBoard's events; sparklines in `status` and `watch`."""

from __future__ import annotations

import base64
import csv
import io
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.cli.jobs import status
from spotkeeper.client.errors import Exit
from spotkeeper.client.metrics import MetricsReader
from spotkeeper.contract.metrics import object_name
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.metrics import joined
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job


def put(store: Store, gen: int, ancestors: list[tuple[int, int]], **curves: dict[int, float]) -> None:
    def column(kind: Any, values: Any) -> str:
        return base64.b64encode(array(kind, values).tobytes()).decode()

    metrics = {
        name: {"steps": column("q", curve), "seconds": column("f", curve), "values": column("d", curve.values())}
        for name, curve in curves.items()
    }
    content = {"gen": gen, "ancestors": ancestors, "began": 1000.0, "metrics": metrics}
    store.put(object_name(JOB, gen), json.dumps(content).encode())


def values(reader: MetricsReader) -> list[float]:
    return joined(reader.read())["loss"].values


@pytest.fixture
def job(store: Store) -> Store:
    """Generation 1 was lost after step 4, with a checkpoint at step 2."""
    a_job(store)
    put(store, 1, [], loss={1: 8.0, 2: 4.0, 3: 99.0, 4: 99.0})
    put(store, 2, [(1, 2)], loss={3: 2.0, 4: 1.0}, acc={4: 0.5})
    return store


def test_one_curve_over_all_generations(cli: Cli, job: Store) -> None:
    table = cli("metrics", "first").out.splitlines()
    assert table[1].split() == ["loss", "█▄▂▁", "1.0000", "4", "1.0000", "8.0000", "4"]
    found = json.loads(cli("metrics", JOB, "--json").out)
    assert (found["name"], found["resumed"], list(found["metrics"])) == ("first", [[1, 2]], ["loss", "acc"])
    loss = {"steps": [1, 2, 3, 4], "times": [1001.0, 1002.0, 1003.0, 1004.0], "values": [8.0, 4.0, 2.0, 1.0]}
    assert found["metrics"]["loss"] == loss
    rows = list(csv.DictReader(io.StringIO(cli("metrics", "first", "--csv").out)))
    assert [(row["metric"], row["step"], row["value"]) for row in rows[2:4]] == [
        ("loss", "3", "2.0"),
        ("loss", "4", "1.0"),
    ]


def test_events_for_tensorboard(cli: Cli, job: Store, tmp_path: Path) -> None:
    done = cli("metrics", "first", "--tensorboard", str(tmp_path / "runs"))
    (file,) = (tmp_path / "runs/first").iterdir()
    assert "tfevents" in file.name and b"brain.Event:2" in file.read_bytes()[:64]
    assert (done.out, f"tensorboard --logdir {tmp_path / 'runs'}" in done.err) == ("", True)
    cli("metrics", "first", "--tensorboard", str(tmp_path / "runs"))
    assert len(list((tmp_path / "runs/first").iterdir())) == 1, "the file is replaced"
    (tmp_path / "file").touch()
    assert cli("metrics", "first", "--tensorboard", str(tmp_path / "file")).code == Exit.USAGE


def test_what_a_job_writes_instead_is_named_and_left_out(cli: Cli, job: Store) -> None:
    job.put(object_name(JOB, 3), b"\x1b]0;title\x07")
    job.put(object_name(JOB, 1), b"{}")
    job.put(f"jobs/{JOB}/logs/metrics/x", b"")
    done = cli("metrics", "first", "--json")
    assert json.loads(done.out)["metrics"]["loss"]["steps"] == [3, 4]
    assert "the metrics of generation 3 are left out: no metrics" in done.err
    assert "the metrics of generation 1 are left out" in done.err


def test_a_job_without_metrics(cli: Cli, store: Store) -> None:
    a_job(store)
    done = cli("metrics", "first")
    assert done.code == Exit.MISSING and "has no metrics yet" in done.err and 'docs/metrics.md, "Report"' in done.err
    assert cli("metrics", "first", "--csv", "--json").code == Exit.USAGE
    assert cli("metrics", "nobody").code == Exit.MISSING


def test_an_ended_job_without_metrics(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.DONE, outcome=Outcome.SUCCEEDED)
    assert "has reported no metrics" in cli("metrics", "first").err


def test_status_and_watch_draw_the_first_metrics(cli: Cli, job: Store) -> None:
    out = cli("status", "first").out
    assert "loss  █▄▂▁  1.0000" in out and out.index("loss  █") < out.index("acc ")
    (loss, _) = json.loads(cli("status", "first", "--json").out)["metrics"]
    assert (loss["name"], loss["last"], loss["curve"]) == ("loss", 1.0, "█▄▂▁")


def test_damaged_metrics_do_not_hide_the_status(cli: Cli, store: Store) -> None:
    a_job(store)
    store.put(object_name(JOB, 1), b"")
    assert cli("status", "first").code == 0


def reads_of_metrics(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The generations whose metrics are read, in order."""
    read: list[str] = []
    part = Store.part

    def counted(self: Store, path: str, start: int, size: int) -> bytes | None:
        read.append(path.rpartition("/")[2])
        return part(self, path, start, size)

    monkeypatch.setattr(Store, "part", counted)
    return read


def test_watch_reads_ended_generations_once(job: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reads_of_metrics(monkeypatch)
    reader = MetricsReader(job, JOB)
    assert values(reader) == [8.0, 4.0, 2.0, 1.0] and sorted(read) == ["1", "2"]
    put(job, 3, [(1, 2), (2, 4)], loss={5: 1.0})
    read.clear()
    assert values(reader) == [8.0, 4.0, 2.0, 1.0, 1.0]
    assert sorted(read) == ["2", "3"], "2 was the newest, and may have changed once more"
    read.clear()
    assert values(reader) == [8.0, 4.0, 2.0, 1.0, 1.0] and read == ["3"]
    assert values(MetricsReader(job, JOB, 2)) == [2.0, 1.0, 1.0], "the newest two only"
    put(job, 4, [(1, 2), (2, 3)], loss={4: 7.0})
    read.clear()
    assert values(reader) == [8.0, 4.0, 2.0, 7.0], "4 resumed from an older checkpoint than 3"
    assert sorted(read) == ["1", "2", "4"]
    lines = status.Sparklines(job, JOB)
    assert lines.read() and lines.read()
    read.clear()
    assert lines.read() and not read, "not at each look"


def test_only_the_first_metrics_are_kept_with_their_whole_history(store: Store) -> None:
    a_job(store)
    put(store, 1, [], b={1: 1.0}, d={1: 4.0}, loss={1: 9.0})
    put(store, 2, [(1, 1)], b={2: 2.0}, d={2: 4.0}, loss={2: 8.0})
    put(store, 3, [(1, 1), (2, 2)], a={3: 0.0}, b={3: 3.0}, d={3: 4.0}, loss={3: 7.0})
    reader = MetricsReader(store, JOB, metrics=3)
    found = reader.read()
    assert {name: curve.steps for name, curve in joined(found).items() if name != "d"} == {
        "a": [3],
        "b": [1, 2, 3],
        "loss": [1, 2, 3],
    }
    assert all(len(one.metrics) == 3 for one in found) and reader.names == {"a", "b", "d", "loss"}


def test_ended_generations_take_no_memory_each(job: Store) -> None:
    """100 generations of 2,000 points, which the curve's 4,000 points stand for."""
    for gen in range(3, 103):
        ancestors = [(of, 2000 * of) for of in range(3, gen)]
        put(job, gen, ancestors, loss={2000 * (gen - 1) + at: float(at) for at in range(2000)})
    reader = MetricsReader(job, JOB)
    curve = joined(reader.read())["loss"]
    assert (curve.steps[0], curve.steps[-1], max(curve.values)) == (4000, 203_999, 1999.0)
    kept = [len(each.metrics["loss"].steps) for each in reader.read()]
    assert kept[0] <= 4000 and kept[1:] == [2000]
