"""What may be attached, and that its state does not depend on how it is wrapped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import spotkeeper
from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.core import settings
from spotkeeper.train.core.errors import AttachError, PartError
from spotkeeper.train.core.microbatch import Update
from spotkeeper.train.core.parts import Attached
from spotkeeper.train.core.shards import is_shared


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1))


def whole(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def inner(module: nn.Sequential) -> nn.Module:
    module[1] = torch.compile(module[1], backend="eager")
    return module


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


HOW: dict[str, Any] = {"plain": lambda module: module, "whole": whole, "inner": inner, "in place": in_place}


def attached(how: str, fill: float) -> Attached:
    model = HOW[how](body())
    ema = AveragedModel(model)
    with torch.no_grad():
        for tensor in [*model.state_dict().values(), *ema.state_dict().values()]:
            tensor.fill_(fill)
    return Attached.of(model, torch.optim.SGD(model.parameters(), lr=0.1), None, {"ema": ema})


@pytest.mark.parametrize("then", HOW)
@pytest.mark.parametrize("now", HOW)
def test_state_is_the_same_whether_or_not_the_model_or_a_part_of_it_is_compiled(then: str, now: str) -> None:
    saved, other = attached(then, 7.0), attached(now, 1.0)
    model, rest = saved.take_common()
    assert not [name for name in model if "_orig_mod" in name]  # type: ignore[attr-defined]
    other.load(model, rest, saved.take_local())
    assert other.model is not None
    tensors = [*other.model.state_dict().values(), *other.common["ema"].state_dict().values()]
    assert all(bool((tensor == 7).all()) for tensor in tensors) and len(tensors) == 23


def test_several_named_optimizers_keep_their_order() -> None:
    model = body()
    named = {"first": torch.optim.SGD(model[0].parameters(), lr=1.0), "second": torch.optim.Adam(model[1].parameters())}
    assert Attached.of(model, named, None, {}).optimizers == tuple(named.values())
    with pytest.raises(PartError, match=r"want a torch\.optim\.Optimizer, got str"):
        Attached.of(model, {"first": "sgd"}, None, {})


def test_fsdp1_is_refused_and_names_fully_shard() -> None:
    model = body()
    model[0]._fsdp_wrapped_module = nn.Identity()  # as FullyShardedDataParallel has it
    with pytest.raises(PartError, match=r"fully_shard\(model\)"):
        Attached.of(model, None, None, {})


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield fully_shard(body())
    dist.destroy_process_group()


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_checkpoint_of_the_other_strategy_is_refused(sharded: nn.Module, handlers: None, tmp_path: Path) -> None:
    attach, plain = spotkeeper.attach, body()
    assert attach(sharded, checkpoint_dir=tmp_path / "sharded").save() == Commit(0, 0)
    assert attach(plain, checkpoint_dir=tmp_path / "plain").save() == Commit(0, 0)
    settings._UNLOOPED.clear()  # as in another process: nothing has attached to these folders
    with pytest.raises(AttachError, match="has sharded state, but this model is not sharded"):
        attach(plain, checkpoint_dir=tmp_path / "sharded")
    with pytest.raises(AttachError, match="has replicated state, but this model is sharded"):
        attach(sharded, checkpoint_dir=tmp_path / "plain")


def test_a_sharded_model_needs_a_sharded_job_of_fixed_size(
    sharded: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.AdamW(sharded.parameters())
    parts = Attached.of(sharded, optimizer, None, {})
    assert parts.sharded and all(map(is_shared, sharded.parameters()))
    with pytest.raises(AttachError, match="a sharded model needs a fixed number of nodes"):
        Update(parts, 1, elastic=True)
    monkeypatch.setenv("SPOTKEEPER_REPLICATED", "1")
    with pytest.raises(AttachError, match=r"checkpoint: \{replicated: false\}"):
        spotkeeper.attach(sharded, optimizer, checkpoint_dir=tmp_path)
