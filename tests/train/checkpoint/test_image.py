"""State to bytes and back: every kind of tensor, tied ones once, and what cannot be saved."""

from __future__ import annotations

import collections
import ctypes
import errno
import io
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spotkeeper.train.checkpoint import durable
from spotkeeper.train.checkpoint.durable import PAGE, CopyOnWrite, allocate, private_memory
from spotkeeper.train.checkpoint.image import Image, RunState, Skeleton, lay_out, pack, thaw, unpack
from spotkeeper.train.core.shards import Chunk
from spotkeeper.train.core.tree import LayoutCache, flatten

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

TENSORS = {
    "float32": torch.randn(3, 5),
    "bfloat16": torch.randn(7).bfloat16(),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "complex64": torch.randn(2, 2, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(6).view(2, 3),
    "uint8": torch.arange(256).to(torch.uint8),
    "scalar": torch.tensor(3.25, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(4, 6).t(),
    "strided": torch.randn(20)[::3],
    "expanded": torch.randn(1, 3).expand(5, 3),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
}

KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])
populates = pytest.mark.skipif(KERNEL < (5, 14), reason="MADV_POPULATE_WRITE is new in Linux 5.14")


def round_trip(state: RunState) -> RunState:
    image = Image(state)
    memory = memoryview(bytearray(b"\xee" * image.size))
    image.copy_to(memory)
    return thaw(memory, image.stretches)


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_round_trips(name: str) -> None:
    tensor = TENSORS[name]
    back = round_trip(RunState({"a": tensor}, [tensor], ()))
    for found in (back.model["a"], back.rest[0]):  # type: ignore[index]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        plain = (found.float(), tensor.float()) if name == "float8" else (found, tensor)
        assert torch.equal(*plain)


def test_sharded_state_is_framed_as_files_of_torch() -> None:
    tensors = {name: TENSORS[name] for name in ("float32", "int64", "scalar", "transposed")}
    image = Image(RunState(tensors, None, (b"one",)), rank=0)
    memory = memoryview(bytearray(b"\xee" * image.size))
    image.copy_to(memory)
    for chunk in image.chunks(tensors):
        file = io.BytesIO(memory[chunk.start : chunk.start + chunk.length])
        assert torch.equal(torch.load(file, weights_only=True), tensors[chunk.path[0]])
    part = image.stretches[1]
    skeleton = Skeleton.read(memory[part.offset : part.offset + part.bytes], "here")
    assert (skeleton.shards, skeleton.plain, skeleton.local) == ([], [0, 1, 2, 3], (b"one",))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_the_layout_of_sharded_state_serves_the_next_image(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # half a second, in each process of tests

    def sharded(part: torch.Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(part, mesh, [placement], run_check=False)

    weight, moment, count = torch.randn(4, 3), torch.randn(4, 3), torch.zeros(2)
    first, box = sharded(weight, Shard(0)), collections.Counter()
    model: dict[str, Any] = {"a": first, "count": count, "tied": first}
    state = RunState(model, {"m": sharded(moment, Shard(0)), "box": box}, (b"one",))

    def written(cache: LayoutCache | None = None) -> tuple[Skeleton, bytes, list[Chunk]]:
        image = Image(state, rank=0, cache=cache)
        memory = memoryview(bytearray(image.size))
        image.copy_to(memory)
        data, part = (memory[each.offset : each.offset + each.bytes] for each in image.stretches)
        return Skeleton.read(part, "here"), bytes(data), image.chunks(model)

    def cached() -> bool:
        return cache.find([flatten(each) for each in (state.model, state.rest, None)]) is not None

    cache = LayoutCache()
    assert written(cache) == written()
    weight += 1.0
    box["beside"] = sharded(torch.ones(2), Shard(0))  # type: ignore[assignment]
    box["plain"] = torch.ones(3)  # type: ignore[assignment]
    assert cached() and written(cache) == written()
    assert [shard.number for shard in written(cache)[0].shards] == [0, 1, 2, 3]
    model["a"] = model["tied"] = sharded(weight, Replicate())  # the same bytes
    assert not cached() and written(cache) == written()
    model["a"] = model["tied"] = sharded(weight.clone(), Replicate())
    assert not cached() and written(cache) == written()
    assert cached()


def test_values_other_than_tensors_round_trip() -> None:
    rest = {"lr": 1e-3, "betas": (0.9, 0.99), "order": collections.OrderedDict(b=1, a=2), "none": None}
    back = round_trip(RunState(None, rest, (b"one", b"", b"three")))
    assert (back.model, back.rest, back.local) == (None, rest, (b"one", b"", b"three"))


def test_tied_tensors_are_written_once() -> None:
    weight = torch.nn.Parameter(torch.randn(100, 100))
    once = Image(RunState({"a": weight}, None, ())).size
    twice = Image(RunState({"a": weight, "b": weight, "c": weight.detach()}, None, ())).size
    other = Image(RunState({"a": weight, "b": weight.t()}, None, ())).size
    assert twice == once < other


def test_tensors_that_only_share_memory_are_stored_twice() -> None:
    base = torch.arange(10.0)
    back: Any = round_trip(RunState({"head": base[:5], "tail": base[5:], "all": base}, None, ())).model
    assert [part.tolist() for part in back.values()] == [base[:5].tolist(), base[5:].tolist(), base.tolist()]


def test_only_the_models_tensors_are_views_of_the_image() -> None:
    """An optimizer keeps the tensors it loads; the memory is staged into again."""
    image = Image(RunState({"a": torch.ones(4)}, {"m": torch.ones(4)}, ()))
    memory = memoryview(bytearray(image.size))
    image.copy_to(memory)
    back: Any = thaw(memory, image.stretches)
    memory[:] = bytes(len(memory))
    assert back.rest["m"].tolist() == [1.0] * 4
    assert back.model["a"].tolist() == [0.0] * 4, "the model's are copied by load_state_dict"


def test_optimizers_keep_memory_that_is_only_ours_without_a_copy() -> None:
    shared, moment, count = torch.randn(40_000), torch.randn(40_000), torch.tensor(3.0)
    image = Image(RunState({"a": shared, "b": -shared}, {"e": shared}, (), [moment, shared, moment, count]))
    memory = private_memory(image.size)
    image.copy_to(memory)
    back: Any = thaw(memory, image.stretches, ours=True)
    first, copied, again, small = back.optimizers
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    inside = [0 <= each.data_ptr() - start < image.size for each in (first, copied, again, small, back.rest["e"])]
    assert inside == [True, False, False, False, False], "a copy of what something else has, and of small ones"
    assert (first.storage_offset(), first.untyped_storage().nbytes()) == (0, 160_000), "torch.save writes no more"
    assert torch.equal(back.model["a"], shared) and torch.equal(back.model["b"], -shared)
    back.model.clear()
    for found, tensor in ((copied, shared), (first, moment), (again, moment), (back.rest["e"], shared), (small, count)):
        assert torch.equal(found, tensor)
    assert not any(memory[PAGE : 160_000 // PAGE * PAGE]), "the model's pages are free"
    optimizer = torch.optim.SGD([torch.zeros(40_000, requires_grad=True)], momentum=0.9)
    state = optimizer.state_dict() | {"state": {0: {"momentum_buffer": first}}}
    at, only = first.data_ptr(), first.clone()
    optimizer.load_state_dict(state)
    del back, first, state, found, tensor
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"].data_ptr() == at
    assert torch.equal(torch.frombuffer(memory, dtype=torch.float32, offset=at - start, count=40_000), only)
    optimizer.state.clear()
    assert not any(memory[at - start + PAGE : at - start + 150_000]), "so are an optimizer's, once it is gone"


@populates
def test_what_is_kept_of_a_savers_memory_is_owned_before_the_memory_changes() -> None:
    kept, written, dropped = (torch.randn(40_000) for _ in range(3))
    image = Image(RunState({"a": torch.randn(40_000)}, {}, (), [kept, written, dropped]))
    file = os.memfd_create("image")
    try:
        os.ftruncate(file, image.size)
        with mmap.mmap(file, image.size) as theirs:
            image.copy_to(view := memoryview(theirs))
            view.release()
            ours = CopyOnWrite(file, image.size)
            assert ours.ownable
            back: Any = thaw(memoryview(ours), image.stretches, ours=True)
            back.model.clear()
            back.optimizers.pop()
            first, second = back.optimizers
            assert first.data_ptr() != 0 and not second.sub_(second).any(), "an optimizer's step"
            ours.own()
            theirs[:] = b"\xee" * image.size
            assert torch.equal(first, kept), "whole pages, and those that are shared with its neighbours"
            assert not second.any() and theirs[:] == b"\xee" * image.size, "what it writes stays in this process"
            touched = sum(ours[at : at + PAGE] != b"\xee" * PAGE for at in range(0, image.size, PAGE))
            assert touched <= 2 * (160_000 // PAGE + 2), "neither the model's pages nor dropped ones were copied"
    finally:
        os.close(file)


@populates
def test_without_memory_the_pages_of_a_saver_are_not_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    file = os.memfd_create("image")
    try:
        os.ftruncate(file, PAGE)
        ours = CopyOnWrite(file, PAGE)
        ours.use(used := memoryview(ours), 0)
        monkeypatch.setattr(durable, "_libc", lambda: SimpleNamespace(madvise=refused))
        with pytest.raises(OSError, match="Cannot allocate memory"):
            ours.own()
        used.release()
    finally:
        os.close(file)


@populates
def test_memory_is_allocated_before_its_first_use() -> None:
    memory = private_memory(8000 * PAGE + 1)
    allocate(memory)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, len(memory), PAGE):
        memory[at] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 800


def test_optimizers_get_copies_of_a_savers_memory() -> None:
    image = Image(RunState(None, {}, (), [torch.ones(40_000)]))
    memory = memoryview(bytearray(image.size))
    image.copy_to(memory)
    back: Any = thaw(memory, image.stretches)
    memory[:] = bytes(len(memory))
    assert torch.equal(back.optimizers[0], torch.ones(40_000))


def test_a_model_loads_another_models_state() -> None:
    model, other = (torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    model(torch.randn(8, 3))
    back: Any = round_trip(RunState(model.state_dict(), None, ())).model
    assert back._metadata == model.state_dict()._metadata
    other.load_state_dict(back)
    assert [part.tolist() for part in other.state_dict().values()] == [p.tolist() for p in model.state_dict().values()]


def test_small_parts_are_sent_as_bytes() -> None:
    part: Any = {"rng": torch.get_rng_state(), "buffers": {"mean": torch.randn(3)}, "scaler": None, "n": 3}
    back = unpack(pack(part))
    assert back["n"] == 3 and back["scaler"] is None
    assert torch.equal(back["rng"], part["rng"])
    assert torch.equal(back["buffers"]["mean"], part["buffers"]["mean"])


@pytest.mark.parametrize("state", [0, 1, PAGE - 1, PAGE, PAGE + 1])
def test_files_begin_on_page_boundaries(state: int) -> None:
    first, second = lay_out(state, 10)
    assert first.offset == 0 and second.offset % PAGE == 0
    assert second.offset >= state


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_tensors_that_cannot_be_saved_are_refused(make: Callable[[], torch.Tensor], kind: str) -> None:
    with pytest.raises(TypeError, match=rf"cannot save a {kind} tensor of shape \(3"):
        Image(RunState({"a": make()}, None, ()))
