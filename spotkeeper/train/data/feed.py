"""The batches of a loop, starting at the run's place in its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader

from spotkeeper.train.core import rng, signals
from spotkeeper.train.core.division import Division
from spotkeeper.train.core.errors import DataError, say
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.microbatch import MicroBatch, MicroPlan
from spotkeeper.train.core.parts import Stateful
from spotkeeper.train.data.sampler import is_map_style, rebuild


class DataPosition(NamedTuple):
    """The place of all ranks in their data.

    In map-style data it is given by ``consumed``, in other data by ``epoch`` and ``number``.
    """

    loop: int = 0  # number of the ``steps()`` call; earlier loops are over
    consumed: int = 0  # samples in this loop, by all ranks
    batch: int = 0  # samples of one global batch; 0 until known
    epoch: int = 0
    number: int = 0  # batches done in this epoch

    def next(self) -> DataPosition:
        return DataPosition(self.loop, self.consumed + self.batch, self.batch, self.epoch, self.number + 1)


class Feed(Protocol):
    """The batches of one loop, and the run's place in them."""

    position: DataPosition  # after the last finished global batch
    micro_batch: MicroBatch  # the one yielded last
    epoch_batches: int | None  # global batches per epoch, if known
    division: Division | None  # None: the data has no indices to divide

    def batches(self, epochs: int | None) -> Iterator[Any]:
        """Yield batches, starting at the position. The caller calls ``done`` after each global batch."""

    def after(self) -> DataPosition:
        """Return the position after the current global batch."""

    def done(self) -> None:
        """Advance the position past the current global batch."""

    def local(self) -> dict[str, Any]:
        """Return this rank's own part of the position: the state of its loader."""


def open_feed(
    loader: Iterable[Any],
    position: DataPosition,
    local: dict[str, Any] | None,
    gang: Gang,
    seed: int,
    plan: MicroPlan | None = None,
) -> Feed:
    """Open the data of a loop at ``position``.

    Args:
        local: this rank's ``Feed.local`` from the checkpoint, if the number of ranks is unchanged; otherwise None.
        plan: how batches are cut, if the number of ranks may change.

    Raises:
        DataError: the position cannot be found again in this loader.
    """
    if is_map_style(loader):
        assert isinstance(loader, DataLoader)
        return _MapFeed(loader, position, gang, seed, plan)
    if plan is not None:
        raise DataError(
            f"{type(loader).__name__} has no indices to divide among a changing number of ranks; use a map-style "
            "data set, or submit the job under another name with a fixed number of nodes and no global_batch"
        )
    return _IterableFeed(loader, position, local, gang)


class _MapFeed:
    """A DataLoader over map-style data, rebuilt over the run's sampler."""

    def __init__(
        self, loader: DataLoader[Any], position: DataPosition, gang: Gang, seed: int, plan: MicroPlan | None
    ) -> None:
        seed = rng.mix(seed, position.loop)
        batch = position.batch or None
        self._loader, self._sampler, order = rebuild(loader, seed, batch, gang.rank, gang.world, plan)
        self.division: Division | None = self._sampler.division
        self.micro_batch = self._sampler.division.of(0)[0]
        self.epoch_batches: int | None = order.batches
        epoch, number = divmod(position.consumed // order.batch, order.batches)
        self.position = position._replace(batch=order.batch, epoch=epoch, number=number)

    def batches(self, epochs: int | None) -> Iterator[Any]:
        while epochs is None or self.position.epoch < epochs:
            self._sampler.epoch, self._sampler.start = self.position.epoch, self.position.number
            micro_batches = self._sampler.micro_batches()
            for batch in self._loader:
                self.micro_batch = next(micro_batches)
                yield batch

    def after(self) -> DataPosition:
        then = self.position.next()
        return then._replace(epoch=then.epoch + 1, number=0) if then.number == self.epoch_batches else then

    def done(self) -> None:
        self.position = self.after()

    def local(self) -> dict[str, Any]:
        return {}


class _IterableFeed:
    """Any loader without map-style data, resumed by its own state if it has one, otherwise by skipping batches."""

    division: Division | None = None

    def __init__(self, loader: Iterable[Any], position: DataPosition, local: dict[str, Any] | None, gang: Gang) -> None:
        if isinstance(loader, Iterator):
            raise DataError(
                f"{type(loader).__name__} can be iterated only once, so a place in it cannot be found again; "
                "give run.steps() the loader itself"
            )
        self._loader = loader
        size = getattr(loader, "batch_size", None) or 1
        self.epoch_batches = len(loader) if isinstance(loader, Sized) and not isinstance(loader, DataLoader) else None
        self.position = position._replace(batch=size * gang.world)
        self.micro_batch = MicroBatch(gang.rank, range(gang.rank * size, (gang.rank + 1) * size), size, last=True)
        self._resume: dict[str, Any] | None = None
        self._before: dict[str, Any] = {}
        if not position.number:
            return
        if local is None:
            raise DataError(
                "the number of ranks has changed, but this loader has no indices to divide anew; use a map-style data "
                "set, or keep the number of ranks"
            )
        self._resume = local

    def batches(self, epochs: int | None) -> Iterator[Any]:
        while epochs is None or self.position.epoch < epochs:
            yield from self._epoch()
            self.position = self.position._replace(epoch=self.position.epoch + 1, number=0)

    def _epoch(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is None:
            self._before = rng.capture(devices=False)
            return self._begin()
        self._before = resume["before"]
        own = self._own_state()
        now = rng.capture(devices=False)
        if own is not None and resume["own"] is not None:
            own.load_state_dict(resume["own"])
            iterator = self._begin()
            rng.restore(now)  # ``iter`` draws a seed; an uninterrupted run drew it when the epoch began
            return iterator
        say(f"skipping {self.position.number} batches: neither the loader nor its data has a state to resume from")
        rng.restore(self._before)  # the loader draws its order again
        iterator = self._begin()
        for _ in islice(iterator, self.position.number):
            pass
        rng.restore(now)
        return iterator

    def _begin(self) -> Iterator[Any]:
        with signals.shielded_start(self._loader):
            return iter(self._loader)

    def after(self) -> DataPosition:
        return self.position.next()

    def done(self) -> None:
        self.position = self.after()

    def local(self) -> dict[str, Any]:
        own = self._own_state()
        state = None if own is None else own.state_dict()
        return {"before": self._before, "own": state if _has_place(state) else None}

    def _own_state(self) -> Stateful | None:
        """Return the loader or its data set, whichever has a state; None if neither has.

        With loader workers the data set does not count, because only the workers' copies of the data set advance.
        """
        if isinstance(self._loader, Stateful):
            return self._loader
        dataset = getattr(self._loader, "dataset", None)
        return dataset if isinstance(dataset, Stateful) and not getattr(self._loader, "num_workers", 0) else None


def _has_place(state: Any) -> bool:
    """Whether a loader's state names a place in its data.

    False for a ``StatefulDataLoader`` over data without a state: it counts skipped batches twice, so from its second
    resume on it continues at a wrong place.
    """
    found = list(_of_data(state))
    return not found or any(each is not None for each in found)


def _of_data(state: Any) -> Iterator[Any]:
    if isinstance(state, dict):
        for name, value in state.items():
            if name in ("dataset_state", "dataset_iter_state"):
                yield value
            else:
                yield from _of_data(value)
