"""What people train with, one small training each, made anew by each life of a script."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

STEPS = 8
_STOP = 3


@dataclass
class Training:
    """What a script has made before it attaches. ``step`` trains on a batch."""

    model: nn.Module
    optimizer: Any
    loader: Iterable[Any]
    step: Callable[[Any], None]
    parts: dict[str, Any] = field(default_factory=dict)


Make = Callable[[int], Training]  # of the number of ranks
FEATURES: dict[str, Make] = {}
COPIES: list[Callable[[], object]] = []  # each ends a copy that runs; those of earlier steps do nothing


def feature(name: str) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        FEATURES[name] = make
        return make

    return keep


# ------------------------------------------------------------ what they have in common


class Body(nn.Module):
    """Dropout, BatchNorm, a tied weight, one parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(11, 3)  # declared first, used last
        self.first = nn.Linear(6, 11)
        self.norm = nn.BatchNorm1d(11)
        self.inner = nn.Sequential(nn.Linear(11, 11), nn.GELU(), nn.Dropout(0.2))
        self.again = nn.Linear(11, 11)
        self.again.weight = self.inner[0].weight
        self.frozen = nn.Parameter(torch.ones(11), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.first(x)))
        return self.last(self.again(self.inner(x)) * self.frozen)


class Wasteful(Body):
    """A part of it is used now and then only."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(x if x[0, 0] > 0.5 else self.inner(x))


class Checkpointed(Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.first(x)))
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


def replicate(module: nn.Module, world: int, *, bucket_mb: float = 0.0005, **more: Any) -> nn.Module:
    """In buckets so small that DDP sorts them anew after the first step."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb, **more) if world > 1 else module


def shard(module: nn.Module, **more: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard([module.inner, module.again], **more)  # together, for they share a weight
    return fully_shard(module, **more)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(90, 6, generator=generator), torch.randint(3, (90,), generator=generator))


def adam(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01, **more)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def usual(model: nn.Module, optimizer: Any = None, loader: Any = None, **parts: Any) -> Training:
    """One step a batch, each optimizer, then whatever of the parts has a step or an update."""
    optimizer = adam(model) if optimizer is None else optimizer
    several = optimizer if isinstance(optimizer, list) else [optimizer]

    def step(batch: Any) -> None:
        loss = loss_of(model, batch)
        loss.backward()
        for each in several:
            each.step()
            each.zero_grad()
        for part in parts.values():
            if isinstance(part, torch.optim.lr_scheduler.ReduceLROnPlateau):
                part.step(1.0)
            elif hasattr(part, "update_parameters"):
                part.update_parameters(model)
            else:
                part.step()

    data = samples()
    return Training(model, optimizer, DataLoader(data, 4, shuffle=True) if loader is None else loader, step, parts)


def accumulated(training: Training, times: int, reducing: Callable[[bool], AbstractContextManager[None]]) -> Training:
    """A step for so many batches. ``reducing``: around each one's backward, told whether it is the last."""
    model, optimizer, count = training.model, training.optimizer, iter(range(10**6))

    def step(batch: Any) -> None:
        last = next(count) % times == times - 1
        with reducing(last):
            (loss_of(model, batch) / times).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    training.step = step
    return training


# ------------------------------------------------------------ replicated


@feature("ddp")
def _(world: int) -> Training:
    return usual(replicate(Body(), world))


@feature("ddp, SGD with momentum, OneCycleLR")
def _(world: int) -> Training:
    model = replicate(Body(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return usual(model, optimizer, scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1))


@feature("ddp, several optimizers and schedulers")
def _(world: int) -> Training:
    model = replicate(Body(), world)
    named = dict(model.named_parameters())
    ours = [param for name, param in named.items() if "last" in name]
    others = [param for name, param in named.items() if "last" not in name and param.requires_grad]
    optimizers = [torch.optim.Adam(ours, lr=0.01, amsgrad=True), torch.optim.RMSprop(others, lr=0.003, momentum=0.5)]
    return usual(
        model,
        optimizers,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=1),
        second=torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], STEPS),
    )


@feature("ddp, accumulation with no_sync")
def _(world: int) -> Training:
    training = usual(replicate(Body(), world))
    return accumulated(
        training, 3, lambda last: contextlib.nullcontext() if last or world == 1 else training.model.no_sync()
    )


@feature("ddp, bf16 autocast")
def _(world: int) -> Training:
    training = usual(replicate(Body(), world))
    plain = training.step

    def step(batch: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            plain(batch)

    training.step = step
    return training


def scaled(model: nn.Module) -> Training:
    training = usual(model)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), training.optimizer

    def step(batch: Any) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    training.step, training.parts = step, {"scaler": scaler}
    return training


@feature("ddp, fp16 with GradScaler")
def _(world: int) -> Training:
    return scaled(replicate(Body(), world))


@feature("ddp, EMA")
def _(world: int) -> Training:
    body = Body()
    ema = torch.optim.swa_utils.AveragedModel(body, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    model = replicate(body, world)
    training = usual(model)
    plain = training.step

    def step(batch: Any) -> None:
        plain(batch)
        ema.update_parameters(body)

    training.step, training.parts = step, {"ema": ema}
    return training


@feature("ddp, torch.compile of it")
def _(world: int) -> Training:
    return usual(torch.compile(replicate(Body(), world, bucket_mb=25), backend="aot_eager"))


@feature("ddp, torch.compile of a part")
def _(world: int) -> Training:
    body = Body()
    body.inner = torch.compile(body.inner, backend="aot_eager")
    return usual(replicate(body, world, bucket_mb=25))


@feature("ddp, static graph")
def _(world: int) -> Training:
    return usual(replicate(Body(), world, static_graph=True))


@feature("ddp, unused parameters")
def _(world: int) -> Training:
    return usual(replicate(Wasteful(), world, find_unused_parameters=True))


@feature("ddp, activation checkpointing")
def _(world: int) -> Training:
    return usual(replicate(Checkpointed(), world, find_unused_parameters=True))


@feature("ddp, buffers not broadcast")
def _(world: int) -> Training:
    return usual(replicate(Body(), world, broadcast_buffers=False))


@feature("ddp, weighted sampler, last batch kept")
def _(world: int) -> Training:
    data = samples()
    sampler = WeightedRandomSampler([1.0 + at for at in range(len(data))], 50)
    return usual(replicate(Body(), world), loader=DataLoader(data, 4, sampler=sampler))


class Stream(IterableDataset[Any]):
    """Each rank its own, as scripts do it; with an order that it draws."""

    def __iter__(self) -> Iterator[Any]:
        data = samples()
        at = dist.get_rank() if dist.is_initialized() else 0
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        order = torch.randperm(len(data)).tolist()
        yield from (data[index] for index in order[at::ranks])


class Placed(Stream):
    """It knows its place, and goes on from there."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        data = samples()
        while self.done < len(data):
            self.done += 1
            yield data[self.done - 1]
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


@feature("ddp, iterable data, skipped")
def _(world: int) -> Training:
    return usual(replicate(Body(), world), loader=DataLoader(Stream(), 4))


@feature("ddp, iterable data with a state")
def _(world: int) -> Training:
    return usual(replicate(Body(), world), loader=DataLoader(Placed(), 4))


def _stateful(data: Any, **more: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, 4, **more)


@feature("ddp, StatefulDataLoader, map-style")
def _(world: int) -> Training:
    return usual(replicate(Body(), world), loader=_stateful(samples(), shuffle=True))


@feature("ddp, StatefulDataLoader, iterable")
def _(world: int) -> Training:
    return usual(replicate(Body(), world), loader=_stateful(Placed()))


# ------------------------------------------------------------ sharded


@feature("fsdp")
def _(world: int) -> Training:
    return usual(shard(Body()))


@feature("fsdp, several optimizers and schedulers")
def _(world: int) -> Training:
    model = shard(Body())
    named = dict(model.named_parameters())
    ours = [param for name, param in named.items() if "last" in name]
    others = [param for name, param in named.items() if "last" not in name and param.requires_grad]
    optimizers = [torch.optim.Adam(ours, lr=0.01), torch.optim.SGD(others, lr=0.01, momentum=0.5)]
    return usual(model, optimizers, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], STEPS))


@feature("fsdp, accumulation")
def _(world: int) -> Training:
    training = usual(shard(Body()))
    return accumulated(
        training, 2, lambda last: contextlib.nullcontext(training.model.set_requires_gradient_sync(last))
    )


@feature("fsdp, mixed precision policy")
def _(world: int) -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    body = Body()
    body.norm = nn.LayerNorm(11)  # BatchNorm takes no mixture of types on a CPU
    return usual(shard(body, mp_policy=policy))


@feature("fsdp, fp16 with GradScaler")
def _(world: int) -> Training:
    return scaled(shard(Body()))


class Average:
    """An EMA as people write it for sharded parameters: this rank's part of each."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: param.detach().clone() for name, param in model.named_parameters()}

    def update_parameters(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.shadow[name].lerp_(param.detach(), 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self.shadow[name].copy_(value)


@feature("fsdp, EMA")
def _(world: int) -> Training:
    model = shard(Body())
    return usual(model, ema=Average(model))


@feature("fsdp, torch.compile of it")
def _(world: int) -> Training:
    return usual(torch.compile(shard(Body()), backend="aot_eager"))


@feature("fsdp, activation checkpointing")
def _(world: int) -> Training:
    return usual(shard(Checkpointed()))


@feature("fsdp over a mesh with names")
def _(world: int) -> Training:
    from torch.distributed.device_mesh import init_device_mesh

    return usual(shard(Body(), mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("copies", "parts"))))


@feature("ddp, StatefulDataLoader, iterable, a worker")
def _(world: int) -> Training:
    return usual(replicate(Body(), world), loader=_stateful(Placed(), num_workers=1))


@feature("ddp, LBFGS")
def _(world: int) -> Training:
    model = replicate(Body(), world)
    optimizer = torch.optim.LBFGS([param for param in model.parameters() if param.requires_grad], lr=0.1, max_iter=2)
    training = usual(model, optimizer)

    def step(batch: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    training.step = step
    return training


@feature("fsdp, iterable data, skipped")
def _(world: int) -> Training:
    return usual(shard(Body()), loader=DataLoader(Stream(), 4))


# ------------------------------------------------------------ state that changes elsewhere than in an optimizer's step


def worst_moment() -> None:
    """Copy now, if a copy runs: the weights are what no image may have."""
    while COPIES:
        COPIES.pop()()


def sharpness_aware(world: int, perturb: Callable[[Tensor, Tensor], None]) -> Training:
    """Two passes a step, the second at weights that are changed for it and then set back (SAM)."""
    training = usual(replicate(Body(), world))
    model, optimizer = training.model, training.optimizer
    trained = [param for param in model.parameters() if param.requires_grad]

    def step(batch: Any) -> None:
        loss_of(model, batch).backward()
        before = [param.detach().clone() for param in trained]
        for param in trained:
            perturb(param, 0.05 * torch.nn.functional.normalize(param.grad, dim=0))  # type: ignore[arg-type]
        worst_moment()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for param, old in zip(trained, before, strict=True):
            param.data.copy_(old)
        optimizer.step()
        optimizer.zero_grad()

    training.step = step
    return training


@feature("ddp, SAM")
def _(world: int) -> Training:
    def perturb(param: Tensor, by: Tensor) -> None:
        with torch.no_grad():
            param.add_(by)

    return sharpness_aware(world, perturb)


@feature("ddp, SAM through .data")
def _(world: int) -> Training:
    def perturb(param: Tensor, by: Tensor) -> None:
        param.data.add_(by)

    return sharpness_aware(world, perturb)


@feature("ddp, SAM as an optimizer that replaces .data")
def _(world: int) -> Training:
    training = usual(replicate(Body(), world))
    model, inner = training.model, training.optimizer
    outer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.0)  # holds old weights

    def step(batch: Any) -> None:
        loss_of(model, batch).backward()
        for param in outer.param_groups[0]["params"]:
            outer.state[param]["old_p"] = param.data.clone()
            param.data.add_(0.05 * torch.sign(param.grad))
        worst_moment()
        inner.zero_grad()
        loss_of(model, batch).backward()
        for param in outer.param_groups[0]["params"]:
            param.data = outer.state[param]["old_p"]
        inner.step()
        inner.zero_grad()

    training.step, training.optimizer = step, [inner, outer]
    return training


class Momentum(nn.Module):
    """MoCo: an encoder that follows another one in forward, and a queue of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(6, 11), nn.BatchNorm1d(11), nn.Linear(11, 8)) for _ in "qk")
        for param_q, param_k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(8, 24), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self, x: Tensor) -> Tensor:
        for param_q, param_k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            param_k.data = param_k.data * 0.9 + param_q.data * 0.1
        keys = nn.functional.normalize(self.key(x), dim=1)
        every = [torch.empty_like(keys) for _ in range(dist.get_world_size())] if dist.is_initialized() else [keys]
        if dist.is_initialized():
            dist.all_gather(every, keys)
        for column in torch.cat(every):
            at = int(self.queue_ptr)
            self.queue[:, at] = column
            self.queue_ptr[0] = (at + 1) % 24
        return keys

    def forward(self, x: Tensor) -> Tensor:
        queries, queue = nn.functional.normalize(self.query(x), dim=1), self.queue.clone()
        keys = self.follow(x + 0.1 * torch.randn_like(x))
        worst_moment()
        return torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue], 1) / 0.2


@feature("ddp, MoCo's momentum encoder and queue")
def _(world: int) -> Training:
    model = replicate(Momentum(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # also the key encoder's, as in MoCo's code
    training = usual(model, optimizer)

    def step(batch: Any) -> None:
        first = torch.zeros(len(batch[0]), dtype=torch.long)
        nn.functional.cross_entropy(model(batch[0]), first).backward()
        optimizer.step()
        optimizer.zero_grad()

    training.step = step
    return training


@feature("ddp, WGAN with its clamp")
def _(world: int) -> Training:
    critic = replicate(nn.Sequential(nn.Linear(6, 11), nn.LeakyReLU(), nn.Linear(11, 1)), world)
    generator = replicate(nn.Sequential(nn.Linear(4, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Linear(11, 6)), world)
    first, second = (torch.optim.RMSprop(each.parameters(), lr=0.01) for each in (critic, generator))
    training, batches = usual(critic, [first, second]), {"done": 0}

    def step(batch: Any) -> None:
        for param in critic.parameters():
            param.data.clamp_(-0.05, 0.05)
        worst_moment()
        fake = generator(torch.randn(len(batch[0]), 4))
        (critic(fake.detach()).mean() - critic(batch[0]).mean()).backward()
        first.step()
        batches["done"] += 1
        if batches["done"] % 3 == 0:
            critic.requires_grad_(False)  # its gradients would be reduced
            (-critic(generator(torch.randn(len(batch[0]), 4))).mean()).backward()
            critic.requires_grad_(True)
            second.step()
        first.zero_grad()
        second.zero_grad()

    training.step, training.parts = step, {"generator": generator, "batches": batches}
    return training


@feature("ddp, spectral norm")
def _(world: int) -> Training:
    body = Body()
    body.first = nn.utils.parametrizations.spectral_norm(body.first)
    body.last = nn.utils.spectral_norm(body.last)
    return usual(replicate(body, world))


@feature("ddp, two optimizers at different rhythms")
def _(world: int) -> Training:
    model = replicate(Body(), world)
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    slow = torch.optim.Adam([param for name, param in named.items() if "last" in name], lr=0.01)
    fast = torch.optim.SGD([param for name, param in named.items() if "last" not in name], lr=0.01, momentum=0.5)
    training, batches = usual(model, [slow, fast]), {"done": 0}

    def step(batch: Any) -> None:
        loss_of(model, batch).backward()
        fast.step()
        worst_moment()
        fast.zero_grad()
        batches["done"] += 1
        if batches["done"] % 2 == 0:  # the run counts its steps
            slow.step()
            slow.zero_grad()

    training.step, training.parts = step, {"batches": batches}
    return training
