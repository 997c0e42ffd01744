"""Back to where the data was, 30,000 batches into an epoch: ours against torchdata's ``StatefulDataLoader``.

From a saved position to the first batch in hand. Ours is one integer, and the permutation follows from
the seed and the epoch; the other loader goes through all batches again, of which it need not make the
samples. Both read the same data set of tensors in memory, without workers, so data costs nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BATCHES, BATCH, RUNS = 30_000, 4, 3
GOAL_S = 0.1


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    ours, theirs = _least(_ours), None
    try:
        theirs = _least(_stateful)
        against = f"StatefulDataLoader: {theirs:.2f} s, {theirs / ours:.0f} times as long"
    except ImportError as error:
        against = f"StatefulDataLoader is not here ({error}); pip install torchdata"
    return [
        {
            "name": "sampler.resume_s",
            "value": round(ours, 4),
            "unit": "s",
            "goal": f"<= {GOAL_S}",
            "holds": ours <= GOAL_S,
            "against": f"{against}; {BATCHES} batches of {BATCH}, least of {RUNS}",
        }
    ]


def _least(resume: Callable[[], float]) -> float:
    return min(resume() for _ in range(RUNS))


def _data() -> object:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.arange(BATCH * (BATCHES + 1000)))


def _ours() -> float:
    from spotkeeper.train.feed import Position, open_feed
    from spotkeeper.train.gang import Solo
    from torch.utils.data import DataLoader

    loader = DataLoader(_data(), BATCH, shuffle=True)
    began = time.monotonic()
    position = Position(0, BATCHES * BATCH, BATCH, 0, BATCHES)
    feed = open_feed(loader, position, None, Solo(), 0, None)
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
    sys.path.insert(0, str(REPOSITORY / "agent"))
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
