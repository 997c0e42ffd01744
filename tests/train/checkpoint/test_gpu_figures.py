"""``make gpu``: which figures it has, and that they are measured on the device. Nothing is measured here."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from bench import gpu
from bench.train.loss import Kill


def test_all_figures_are_measured_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[Any]] = {}

    def note(name: str, device: Any, value: Any) -> Any:
        asked.setdefault(name, set()).add(device)
        return value

    kinds = {"fresh": [0.1], "disk": [0.4], "memory": [0.2], "read and hash": [0.5]}
    for module, figure in ((gpu.save, "save"), (gpu.snapshot, "snapshot")):
        monkeypatch.setattr(module, "of_a_size", lambda _, device, figure=figure: note(figure, device, {}))
        monkeypatch.setattr(module, "compared", lambda sizes, figure=figure: [{"name": f"{figure}.{len(sizes)}"}])
    monkeypatch.setattr(gpu.restore, "measure", lambda device: note("restore", device, kinds))
    monkeypatch.setattr(gpu.steps, "_least", lambda begin, size, workers, device: note("steps", device, 9.0))
    monkeypatch.setattr(
        gpu.loss, "measure", lambda device, count: note("loss", device, [Kill.of(9, 5, [2, 4], 0.1)] * count)
    )
    monkeypatch.setattr(gpu, "_context", lambda device: note("context", device, {"name": "context_s"}))
    monkeypatch.setattr(gpu, "_recovery", lambda touch: note("recovery", "cuda:7" if "cuda:7" in touch else touch, []))
    found = gpu.measured("cuda:7", (48,))
    assert [figure["name"].removeprefix("gpu.") for figure in found] == [
        "context_s",
        "save.1",
        "snapshot.1",
        "restore.vs_read.disk",
        "restore.vs_read.memory",
        "steps.overhead_us",
        "steps.overhead_us_per_sample",
        "loss.steps_lost_max",
    ]
    parts = ("save", "snapshot", "restore", "steps", "loss", "context", "recovery")
    assert asked == {part: {"cuda:7"} for part in parts}
    assert found[-1]["value"] == 2.0 and f"{gpu.KILLS} kills" in str(found[-1]["against"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_why_it_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu, "measured", lambda *_: pytest.fail("measured"))
    assert gpu.main() == 0
    assert capsys.readouterr().out == "bench/gpu.json: not measured: torch finds no CUDA device here\n"
