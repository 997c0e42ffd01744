"""Generations' metrics become one curve; what a job writes instead is refused; curves as text, CSV and events."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from array import array
from typing import Any

import msgspec
import pytest
from rich.console import Console

from spotkeeper.contract.metrics import BYTES, GenerationMetrics, MetricPoints, read_metrics
from spotkeeper.report.job import tensorboard
from spotkeeper.report.job.lines import metric_lines
from spotkeeper.report.job.metrics import JobMetrics, MetricColumns, in_order, job_metrics, joined, metric_views, pace
from spotkeeper.report.job.tensorboard import event_file
from spotkeeper.report.text.metrics import metrics_csv, metrics_table
from spotkeeper.report.text.words import sparkline
from tests.report.ledgers import printed


def generation(gen: int, *ancestors: tuple[int, int], **curves: dict[int, float]) -> GenerationMetrics:
    points = {
        name: MetricPoints(tuple(curve), tuple(map(float, curve)), tuple(curve.values()))
        for name, curve in curves.items()
    }
    return GenerationMetrics(gen, ancestors, points)


def columns() -> MetricColumns:
    return MetricColumns([1, 2], [10.0, 11.5], [0.5, math.nan])


# ------------------------------------------------------------ join


def test_a_generation_is_cut_where_its_successor_resumed() -> None:
    first = generation(1, loss={1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    second = generation(2, (1, 2), loss={3: 30.0, 4: 40.0})
    assert joined([second, first])["loss"] == MetricColumns([1, 2, 3, 4], [1, 2, 3, 4], [1.0, 2.0, 30.0, 40.0])


def test_carried_points_close_the_gap_to_the_last_upload() -> None:
    first = generation(1, loss={1: 1.0, 2: 2.0, 9: 9.0})
    second = generation(2, (1, 4), loss={2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0})
    assert joined([first, second])["loss"].values == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_generation_that_led_nowhere_is_left_out() -> None:
    first, lost = generation(1, loss={1: 1.0, 2: 2.0}), generation(2, (1, 1), loss={2: 20.0, 3: 30.0})
    third = generation(3, (1, 2), loss={3: 3.0})
    assert joined([first, lost, third])["loss"].values == [1.0, 2.0, 3.0]
    assert joined([]) == {}


def test_a_curve_of_many_generations_has_at_most_4000_points() -> None:
    many = [
        generation(gen, *((of, 1000 * (of + 1)) for of in range(gen)), x={1000 * gen + at: at for at in range(1, 1001)})
        for gen in range(9)
    ]
    curve = joined(many)["x"]
    assert 1000 < len(curve.steps) <= 4000 and (min(curve.values), max(curve.values)) == (1, 1000)
    assert (curve.steps[0], curve.steps[-1]) == (1, 9000)


# ------------------------------------------------------------ what a job may write


def column(kind: str, *values: float) -> str:
    return base64.b64encode(array(kind, values).tobytes()).decode()


def written(**changes: Any) -> dict[str, Any]:
    loss = {"steps": column("q", 1, 2), "seconds": column("f", 0, 1.5), "values": column("d", 0.5, math.nan)}
    loss |= changes.pop("loss", {})
    return {"gen": 3, "ancestors": [[0, 5], [2, 9]], "began": 10.0, "metrics": {"loss": loss}} | changes


def test_what_the_library_writes_is_read() -> None:
    found = read_metrics(json.dumps(written()).encode(), 3)
    assert (found.gen, found.ancestors) == (3, ((0, 5), (2, 9)))
    loss = found.metrics["loss"]
    assert (list(loss.steps), list(loss.times)) == ([1, 2], [10.0, 11.5]) and math.isnan(loss.values[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"gen": 4},
        {"gen": "3"},
        {"more": 1},
        {"began": -1.0},
        {"began": 1e300},
        {"ancestors": [[3, 1]]},
        {"ancestors": [[2, 1], [1, 1]]},
        {"ancestors": [[1, 1], [1, 2]]},  # each would be read and joined again: a file has space for a million
        {"ancestors": [[-1, 1]]},
        {"ancestors": [[1, 1 << 50]]},
        {"metrics": {f"m{number}": written()["metrics"]["loss"] for number in range(65)}},
        {"metrics": {"\x1b[31m": written()["metrics"]["loss"]}},
        {"metrics": {"x" * 101: written()["metrics"]["loss"]}},
        {"loss": {"steps": column("q", 2, 1)}},
        {"loss": {"steps": column("q", 1, 1)}},
        {"loss": {"steps": column("q", -1, 1)}},
        {"loss": {"steps": column("q", 1, 1 << 50)}},
        {"loss": {"steps": column("q", 1)}},
        {"loss": {"steps": "AAAA"}},
        {"loss": {"steps": "no base64!"}},
        {"loss": {"seconds": column("f", 0, math.inf)}},
        {"loss": {"seconds": column("f", -9e10, 0)}},  # before the year 1, which no date can be
        {"loss": {"seconds": column("f", 0, math.nan)}},
        {
            "loss": {
                "steps": column("q", *range(4001)),
                "seconds": column("f", *range(4001)),
                "values": column("d", *range(4001)),
            }
        },
    ],
)
def test_what_a_job_writes_instead_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_metrics(json.dumps(written(**changes)).encode(), 3)


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff", b"null", b" " * (BYTES + 1)])
def test_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_metrics(data, 3)


# ------------------------------------------------------------ text


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        ([7.0, math.nan, 0.0, math.inf], "█ ▁ "),
        ([-1.7e308, 1.7e308], "▁█"),
        ([math.nan], " "),
    ],
)
def test_a_sparkline(values: list[float], drawn: str) -> None:
    assert sparkline(range(len(values)), values) == drawn


def test_a_sparkline_has_a_fixed_width_and_fills_gaps() -> None:
    assert len(sparkline(range(10_000), [0.0] * 10_000)) == 40
    assert sparkline([5, 9, 10], [1.0, 2.0, 1.0]) == "▁▁▁▁█▁", "a metric that is reported now and then"


def test_views_begin_with_the_loss_and_name_what_is_no_number() -> None:
    found = {"acc": columns(), "loss": columns(), "z": MetricColumns([1], [1.0], [math.inf])}
    loss, acc, z = metric_views(found)
    assert (loss.name, loss.step, loss.points, loss.last, loss.low, loss.high) == ("loss", 2, 2, None, 0.5, 0.5)
    assert (acc.name, z.low) == ("acc", None)
    assert metric_lines([loss, acc]) == ["loss  not a number at step 2", "acc   not a number at step 2"]
    assert metric_lines([z])[0].endswith("inf at step 1")
    assert b'"last":null' in msgspec.json.encode(z), "JSON has no infinity"
    table = printed(metrics_table(JobMetrics("abcdefgh", "gpt", (), found))).split()
    assert table.count("inf") == 1 and table.count("-") == 2
    assert [view.name for view in metric_views(found, 1)] == ["loss"]


def test_the_pace_of_a_run_comes_from_the_times_of_its_points() -> None:
    times = [float(at) for at in range(100)] + [float(at) for at in range(150, 250)]  # 51 s without training
    found = pace(MetricColumns(list(range(1, 201)), times, [0.0] * 200), parts=20)
    assert [step for step, _ in found] == list(range(11, 201, 10)), "a part has ten steps"
    assert [speed for _, speed in found if speed != 1.0] == [10 / 60]
    assert pace(MetricColumns([1], [5.0], [0.0])) == [] and pace(MetricColumns([], [], [])) == []
    thinned = [*range(1, 101, 10), *range(101, 201)]
    found = pace(MetricColumns(thinned, list(map(float, thinned)), [0.0] * 110), parts=10)
    assert found == [(step, 1.0) for step in range(21, 201, 20)], "equal parts of the run, not of its points"


def test_a_table_and_csv() -> None:
    found = JobMetrics("abcd2345", "gpt", (), {"loss": columns(), "-1+2": MetricColumns([3], [0.0], [0.1])})
    out = io.StringIO()
    Console(file=out, width=120).print(metrics_table(found))
    assert out.getvalue().splitlines()[1].split() == ["loss", "not", "a", "number", "2", "0.5000", "0.5000", "2"]
    assert metrics_csv(found).splitlines() == [
        "metric,step,time,value",
        "loss,1,1970-01-01T00:00:10.000+00:00,0.5",
        "loss,2,1970-01-01T00:00:11.500+00:00,nan",
        "'-1+2,3,1970-01-01T00:00:00.000+00:00,0.1",
    ]


def test_a_jobs_metrics_name_the_checkpoints_that_led_to_them() -> None:
    second = generation(2, (1, 2), loss={3: 3.0})
    assert job_metrics("abcd2345", "gpt", [generation(1, loss={1: 1.0}), second]).resumed == ((1, 2),)
    assert job_metrics("abcd2345", "gpt", []) == JobMetrics("abcd2345", "gpt", (), {})


# ------------------------------------------------------------ TensorBoard


def test_an_event_file_has_the_bytes_that_tensorboard_writes() -> None:
    data = event_file({"loss": MetricColumns([300], [1.0], [0.5])})
    records = []
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        record = data[at + 12 : at + 12 + size]
        assert data[at + 8 : at + 12] == tensorboard._masked(data[at : at + 8])
        assert data[at + 12 + size : at + 16 + size] == tensorboard._masked(record)
        records.append(record)
        at += size + 16
    second = b"\x09" + struct.pack("<d", 1.0)
    assert records == [
        second + b"\x10\x00" + b"\x1a\x0dbrain.Event:2",
        second + b"\x10\xac\x02" + b"\x2a\x0d\x0a\x0b\x0a\x04loss\x15" + struct.pack("<f", 0.5),
    ]
    crc = 0xE3069283  # CRC-32C of these digits: its usual check value
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert tensorboard._masked(b"123456789") == struct.pack("<I", masked)


def test_a_value_that_no_float32_holds_is_infinite() -> None:
    data = event_file({"x": MetricColumns([1, 2], [0.0, 0.0], [1e300, -1e300])})
    assert struct.pack("<f", math.inf) in data and struct.pack("<f", -math.inf) in data


def test_numbered_metrics_are_in_the_order_of_their_numbers() -> None:
    names = ["m10", "m2", "loss", "m1", "a/2/x", "a/10/x", "m"]
    assert sorted(names, key=in_order) == ["loss", "a/2/x", "a/10/x", "m", "m1", "m2", "m10"]
    columns = MetricPoints([1], [1.0], [1.0])
    assert list(joined([GenerationMetrics(1, (), dict.fromkeys(names, columns))])) == sorted(names, key=in_order)
