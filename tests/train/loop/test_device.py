"""A run whose state lies on a GPU goes on bitwise where it stopped. The CPU is asked for the same everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spotkeeper

STEPS, STOPS = 8, 3
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            "not __import__('torch').cuda.is_available()", reason="torch finds no CUDA device here"
        ),
    ),
]


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SPOTKEEPER_")]:
        monkeypatch.delenv(name)


def train(device: str, folder: Path, until: int) -> list[Any]:
    """Mixed precision, a gradient scaler, dropout from the device's own generator, data that is shuffled."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    run = spotkeeper.attach(model, optimizer, scaler=scaler, checkpoint_dir=folder)
    for x, y in run.steps(loader, steps=until):
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.save()
    return [model.state_dict(), optimizer.state_dict(), scaler.state_dict()]


def flat(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.device.type, part.tolist()
    if isinstance(part, dict):
        return {key: flat(value) for key, value in part.items()}
    return [flat(each) for each in part] if isinstance(part, (list, tuple)) else part


@pytest.mark.parametrize("device", DEVICES)
def test_state_on_a_device_resumes_bitwise(tmp_path: Path, device: str) -> None:
    train(device, tmp_path / "stopped", STOPS)
    again = train(device, tmp_path / "stopped", STEPS)
    assert flat(again) == flat(train(device, tmp_path / "alone", STEPS))
