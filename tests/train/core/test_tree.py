"""A state taken apart and put together, and the layout of one image used for the next."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spotkeeper.train.checkpoint.image import Image, RunState, thaw
from spotkeeper.train.core.parts import Attached
from spotkeeper.train.core.tree import LayoutCache, flatten, unflatten


def rebuilt(state: Any) -> Any:
    flat = flatten(state)
    return unflatten(flat.structure, iter(flat.tensors), iter(flat.values))


@pytest.mark.parametrize(
    "state",
    [
        None,
        3,
        [],
        {"a": [1, (2.5, "x")], 7: {}},
        OrderedDict(b=1, a=OrderedDict()),
        {True: 1},
        {("a", 1): [2]},
        defaultdict(list, a=[1]),
        Counter("aab"),
        ([],) * 2,
    ],
    ids=str,
)
def test_a_state_is_put_together_as_it_was(state: Any) -> None:
    back = rebuilt(state)
    assert back == state and type(back) is type(state) and repr(back) == repr(state)


def test_attributes_of_a_modules_state_stay() -> None:
    back = rebuilt(nn.BatchNorm1d(2).state_dict())
    assert back._metadata == {"": {"version": 2}}


def test_a_container_that_occurs_twice_still_does() -> None:
    shared = [1]
    back = rebuilt({"a": shared, "b": shared})
    assert back["a"] is back["b"]
    loop: list[Any] = []
    loop.append(loop)
    assert rebuilt(loop)[0] is loop


class Training:
    """A model whose optimizer has stepped once, and the images of it that share a cache."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        self.optimizer = torch.optim.AdamW(self.model[0].parameters())
        self.extra: dict[str, Any] = {"view": torch.arange(6.0).view(2, 3)}
        self.cache = LayoutCache()
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()

    def state(self) -> RunState:
        model, rest = Attached.of(self.model, self.optimizer, None, {}).take_common()
        optimizers = rest.pop("optimizers")
        return RunState(model, rest | {"extra": self.extra}, (), optimizers)

    def image(self) -> tuple[RunState, RunState]:
        """A state, and what an image of it holds."""
        state = self.state()
        image = Image(state, cache=self.cache)
        memory = memoryview(bytearray(image.size))
        image.copy_to(memory)
        return state, thaw(memory, image.stretches)

    @property
    def cached(self) -> bool:
        """Whether the next image finds its layout."""
        state = self.state()
        return self.cache.find([flatten(each) for each in (state.model, state.rest, state.optimizers)]) is not None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.cpu(), other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def right(training: Training) -> bool:
    state, back = training.image()
    return all(same(getattr(state, name), getattr(back, name)) for name in ("model", "rest", "optimizers"))


def resize(training: Training) -> None:
    training.model[1] = nn.Linear(4, 5)


def add_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": list(training.model[1].parameters()), "lr": 0.5})


def second_moments(training: Training) -> None:
    add_group(training)
    assert right(training)
    training.step()  # the added parameters' state appears


def rename(training: Training) -> None:
    training.model = nn.Sequential(OrderedDict(first=training.model[0], last=training.model[1]))


def reorder(training: Training) -> None:
    training.extra = {"new": 1, **training.extra}


def reallocate(training: Training) -> None:
    training.model[0].weight.data = training.model[0].weight.data.clone() + 1.0


def reinterpret(training: Training) -> None:
    training.extra["view"] = training.extra["view"].view(torch.int32)


def transpose(training: Training) -> None:
    training.extra["view"] = training.extra["view"].view(3, 2)


def restride(training: Training) -> None:
    training.extra["view"] = torch.arange(6.0).as_strided((2, 3), (1, 2))


def negate(training: Training) -> None:
    pair = torch.ones(3, dtype=torch.complex64)
    training.extra["view"] = pair.imag
    assert right(training)
    training.extra["view"] = pair.conj().imag


def tie(training: Training) -> None:
    training.model[1].bias = nn.Parameter(training.extra["view"].view(-1)[:3])


def forget(training: Training) -> None:
    training.optimizer.state.clear()


CHANGES = [resize, add_group, second_moments, rename, reorder, reallocate, reinterpret, transpose, restride, negate]
CHANGES += [tie, forget]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_of_structure_is_seen(change: Callable[[Training], None]) -> None:
    training = Training()
    assert right(training)
    training.step()
    assert training.cached and right(training)
    change(training)
    assert not training.cached and right(training)
    assert right(training)


def new_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.125


def new_value(training: Training) -> None:
    training.extra["more"] = None
    assert right(training)
    training.extra["more"] = Counter(a=3)


def boxed(training: Training) -> None:
    """A tensor inside a value has no place in the layout."""
    training.extra["box"] = defaultdict(list, a=[torch.ones(2)])
    assert right(training)
    training.extra["box"] = defaultdict(list, a=[torch.zeros(5), training.extra["view"]])


@pytest.mark.parametrize("change", [new_rate, new_value, boxed], ids=lambda change: change.__name__)
def test_values_change_no_layout(change: Callable[[Training], None]) -> None:
    training = Training()
    assert right(training)
    change(training)
    assert training.cached and right(training)


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_what_cannot_be_saved_is_still_refused(tensor: Tensor) -> None:
    training = Training()
    assert right(training)
    training.extra["view"] = tensor
    with pytest.raises(TypeError, match="cannot save a"):
        training.image()
