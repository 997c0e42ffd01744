"""Resuming the data 30,000 batches into an epoch: our sampler against torchdata's ``StatefulDataLoader``.

From a saved position to the first batch. Our position is one integer, and the permutation follows from seed and epoch;
the other loader iterates over all batches again without making their samples. Both read the same tensors in memory,
without workers, so data costs nothing.

Also: the cost of seeding each sample's random numbers by its place, on the training thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
BATCHES, BATCH, RUNS = 30_000, 4, 3
GOAL_S = 0.1
SMALL, LARGE = 8, 128  # samples of a batch
STEP_GOAL_US, SAMPLE_GOAL_US = 50.0, 1.0


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    return [_resumed(), *_loaded()]


def _resumed() -> dict[str, object]:
    ours, theirs = _least(_ours), None
    try:
        theirs = _least(_stateful)
        against = f"StatefulDataLoader: {theirs:.2f} s, {theirs / ours:.0f} times as long"
    except ImportError as error:
        against = f"StatefulDataLoader is not here ({error}); pip install torchdata"
    return {
        "name": "sampler.resume_s",
        "value": round(ours, 4),
        "unit": "s",
        "goal": f"<= {GOAL_S}",
        "holds": ours <= GOAL_S,
        "against": f"{against}; {BATCHES} batches of {BATCH}, least of {RUNS}",
    }


def _loaded() -> list[dict[str, object]]:
    """Cost of seeding on the training thread of a loader without workers, per batch and per sample."""
    (step, sample), (once_step, once_sample) = _costs(_batches), _costs(_by_sample)
    found = []
    for name, value, goal, once in (
        ("step", step, STEP_GOAL_US, once_step),
        ("sample", sample, SAMPLE_GOAL_US, once_sample),
    ):
        found.append(
            {
                "name": f"sampler.seed_us_a_{name}",
                "value": round(value, 2),
                "unit": "us",
                "goal": f"<= {goal:g}",
                "holds": value <= goal,
                "against": f"seeding each sample and copying all states: {once:.1f} us; numpy in use, no workers, "
                f"batches of {SMALL} and {LARGE} against torch's own loader, least of {RUNS * 3}",
            }
        )
    return found


def _costs(ours: Callable[[object, int], Iterable[object]]) -> tuple[float, float]:
    """(us per batch, us per sample) beyond torch's own loader."""
    small, large = (_passed(ours, size) - _passed(_plain, size) for size in (SMALL, LARGE))
    sample = (large - small) / (LARGE - SMALL)
    return small - SMALL * sample, sample


def _passed(make: Callable[[object, int], Iterable[object]], size: int) -> float:
    """Microseconds per batch."""
    data, least = _Samples(), float("inf")
    for _ in range(RUNS * 3):
        began = time.thread_time()
        for _ in make(data, size):
            pass
        least = min(least, time.thread_time() - began)
    return 1e6 * least / (len(data) / size)


class _Samples:
    def __len__(self) -> int:
        return 200 * LARGE

    def __getitem__(self, index: int) -> int:
        return index


def _loader(data: object, size: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(data, size, collate_fn=len)


def _plain(data: object, size: int) -> Any:
    return _loader(data, size)


def _batches(data: object, size: int) -> Any:
    import numpy  # noqa: F401 - in use, as in most scripts

    from spotkeeper.train.data.sampler import rebuild

    return rebuild(_loader(data, size), 0, None, 0, 1)[0]


def _by_sample(data: object, size: int) -> Any:
    """The former way: every sample has its own seed, and all states are copied for each batch."""
    from spotkeeper.train.core import rng

    def collate(indices: list[int]) -> int:
        before = rng.capture(devices=False)
        for index in indices:
            rng.seed_cpu(rng.mix(0, 0, index, 2))
        rng.restore(before)
        return len(indices)

    from torch.utils.data import DataLoader

    return DataLoader(data, size, collate_fn=collate)


def _least(resume: Callable[[], float]) -> float:
    return min(resume() for _ in range(RUNS))


def _data() -> object:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.arange(BATCH * (BATCHES + 1000)))


def _ours() -> float:
    from torch.utils.data import DataLoader

    from spotkeeper.train.core.gang import SoloGang
    from spotkeeper.train.data.feed import DataPosition, open_feed

    loader = DataLoader(_data(), BATCH, shuffle=True)
    began = time.monotonic()
    position = DataPosition(0, BATCHES * BATCH, BATCH, 0, BATCHES)
    feed = open_feed(loader, position, None, SoloGang(), 0, None)
    next(iter(feed.batches(1)))
    return time.monotonic() - began


def _stateful() -> float:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(_data(), BATCH, shuffle=True)
    batches = iter(loader)
    for _ in range(BATCHES):
        next(batches)
    state = loader.state_dict()
    fresh = StatefulDataLoader(_data(), BATCH, shuffle=True)
    began = time.monotonic()
    fresh.load_state_dict(state)
    next(iter(fresh))
    return time.monotonic() - began


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
