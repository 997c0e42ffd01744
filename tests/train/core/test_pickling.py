"""What a checkpoint's pickles may name, and that naming anything else runs nothing."""

from __future__ import annotations

import collections
import datetime
import enum
import hashlib
import os
import pickle
import random
import struct
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import image as checkpoint
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.image import Image, RunState
from spotkeeper.train.checkpoint.manifest import FileSum, Manifest, RankPlace
from spotkeeper.train.checkpoint.restore import restore
from spotkeeper.train.core import arrays, pickling, rng
from spotkeeper.train.core.errors import ScriptError
from spotkeeper.train.core.gang import SoloGang
from spotkeeper.train.core.pickling import StateTypeError
from tests.train.forks import run_script


class Kind(enum.Enum):
    BEST = "best"


@dataclass
class Mine:
    """A state type of a script's own."""

    step: int
    kind: Kind = Kind.BEST


@pytest.fixture
def added() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([Mine, Kind])
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


class Evil:
    """Whoever unpickles it runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize(
    "value",
    [
        {"step": 3, "betas": (0.9, 0.999), "lr": 1e-3, "none": None, "flags": {True, False}},
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=3),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        Path("a/b"),
        types.SimpleNamespace(a=1),
        (torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")),
        (np.float32(1.5), np.dtype("f4"), np.datetime64("2026-01-01")),
        random.getstate(),
    ],
)
def test_plain_values_round_trip(value: object) -> None:
    assert pickling.loads(pickling.dumps(value), "here") == value


def test_arrays_and_generators_round_trip() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    table, words, one, two = pickling.loads(
        pickling.dumps(
            (array, np.array(["a", None], dtype=object), np.random.RandomState(7), np.random.default_rng(7))
        ),
        "here",
    )
    assert (table == array).all() and table.dtype == array.dtype and list(words) == ["a", None]
    assert one.rand() == np.random.RandomState(7).rand() and two.random() == np.random.default_rng(7).random()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3).T,
        np.arange(24).reshape(2, 3, 4)[:, ::2],
        np.array(3.5),
        np.zeros((0, 3), np.uint16),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array(["2026-01-01"], "M8[D]"),
        np.array([5], "m8[ms]"),
        np.array([1 + 2j]),
        np.array([1.5], np.longdouble),
        np.array([True, False]),
        np.zeros(2, "V8"),
        np.array([(1, [2.0, 3.0])], [("a", "u1"), ("b", "f8", (2,))]),
        np.array([(1, 2.0)], np.dtype([("a", "u1"), ("b", "f8")], align=True)),
        np.array([[[1], None], ["a", {"b": 2}]], dtype=object),
    ],
    ids=lambda array: str(array.dtype),
)
def test_every_kind_of_array_round_trips(array: Any) -> None:
    read = pickling.loads(pickling.dumps(array), "here")
    assert read.dtype == array.dtype and read.shape == array.shape
    assert repr(read.tolist()) == repr(array.tolist())
    assert read.flags.writeable and pickling.loads(pickling.dumps(array.dtype), "here") == array.dtype
    if not array.dtype.hasobject and array.size:
        one = array.flat[0]
        again = pickling.loads(pickling.dumps(one), "here")
        assert type(again) is type(one) and repr(again.tolist()) == repr(one.tolist())


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_every_numpy_generator_continues(kind: str) -> None:
    bits = getattr(np.random, kind)(7)
    made = (np.random.Generator(bits), np.random.RandomState(getattr(np.random, kind)(8)), np.random.SeedSequence(9))
    made[0].normal(size=5), made[0].integers(9, dtype="u4"), made[1].normal(size=5), made[2].spawn(2)
    one, two, seeds = pickling.loads(pickling.dumps(made), "here")
    assert one.normal(size=700).tolist() == made[0].normal(size=700).tolist()
    assert two.normal(size=700).tolist() == made[1].normal(size=700).tolist()
    assert seeds.spawn(1)[0].generate_state(4).tolist() == made[2].spawn(1)[0].generate_state(4).tolist()
    assert one.spawn(1)[0].random() == made[0].spawn(1)[0].random()


def test_a_generator_s_position_outside_its_buffer_is_refused() -> None:
    """NumPy takes any, and reads what lies there."""
    for bits, inner in ((np.random.MT19937(1), True), (np.random.Philox(1), False)):
        state: Any = dict(bits.state)
        (state["state"] if inner else state)["pos" if inner else "buffer_pos"] = -(10**6)
        with pytest.raises(ValueError, match="pos is -1000000, not 0"):
            pickling.loads(pickling.dumps(By(arrays.bit_generator, state, None)), "here")
        if inner:
            with pytest.raises(ValueError, match="pos is -1000000, not 0"):
                rng.restore(rng.capture() | {"numpy": state | {"has_gauss": 0, "gauss": 0.0}})


def test_numpy_data_without_a_plain_description_is_refused_when_it_is_saved() -> None:
    for value in (
        np.zeros(1, [("a", "O")]),
        np.zeros(1, np.dtype({"names": ["a"], "formats": ["u1"], "titles": ["t"]})),
    ):
        with pytest.raises(StateTypeError, match=r"NumPy data of dtype .* cannot be saved"):
            pickling.dumps(value)


def test_placements_round_trip_and_need_their_values() -> None:
    """Of some torch versions they are C++ objects, and a new one looks into memory that nothing has filled."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    placed = (Shard(1), Replicate(), Partial("avg"))
    assert pickling.loads(pickling.dumps(placed), "here") == placed
    if not hasattr(Partial, "__dataclass_fields__"):
        with pytest.raises(pickle.UnpicklingError, match="makes a Partial without its constructor"):
            pickling.loads(pickle.dumps(Partial("avg"), 5), "here")


class By:
    """Whoever unpickles it calls a function."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


class Built(By):
    """And then sets its state."""

    def __init__(self, call: Any, args: tuple[Any, ...], state: Any) -> None:
        super().__init__(call, *args)
        self.state = state

    def __reduce__(self) -> Any:
        return self.call, self.args, self.state


def skeleton_of_pointers() -> bytes:
    """Items of dtype object, whose bytes the file brings: each is a pointer that list() follows."""
    call, args, state = np.dtype("O").__reduce__()[:3]
    kind = Built(call, args, (*state[:7], 0))
    return pickle.dumps(By(list, By(np.ndarray, (1,), kind, struct.pack("<Q", 0x4141414141414141))), 5)


def skeleton_beyond_the_item() -> bytes:
    """A field 4 KiB behind the eight bytes of its item."""
    call, args, state = np.dtype([("a", "u8")]).__reduce__()[:3]
    kind = Built(call, args, (*state[:4], {"a": (np.dtype("u8"), 4096)}, *state[5:]))
    return pickle.dumps(By(np.ndarray, (1,), kind, bytes(8)), 5)


def own_beyond_the_item() -> bytes:
    fields = {"fields": [("a", 4096, "<u8")], "itemsize": 8}
    return pickle.dumps(By(arrays.array, fields, (1,), "C", bytes(8)), 5)


def own_of_pointers() -> bytes:
    return pickle.dumps(By(list, By(arrays.array, "|O", (1,), "C", struct.pack("<Q", 0x4141414141414141))), 5)


def own_beyond_the_bytes() -> bytes:
    return pickle.dumps(By(list, By(arrays.array, "<u8", (1 << 20,), "C", bytes(8))), 5)


def state_set_on_an_array() -> bytes:
    state = (1, (4,), By(arrays.dtype, "|O"), False, [])
    return pickle.dumps(Built(arrays.array, ("<u8", (1,), "C", bytes(8)), state), 5)


def attributes_set_on(module: str, name: str, attribute: str) -> bytes:
    """GLOBAL, and BUILD with the state (None, {attribute: bool})."""
    return f"c{module}\n{name}\n(N(dS'{attribute}'\ncbuiltins\nbool\nstb.".encode()


@pytest.mark.parametrize(
    "text",
    [
        skeleton_of_pointers(),
        skeleton_beyond_the_item(),
        own_of_pointers(),
        own_beyond_the_item(),
        own_beyond_the_bytes(),
        state_set_on_an_array(),
        attributes_set_on("pathlib", "PosixPath", "exists"),
        attributes_set_on("torch.serialization", "_get_layout", "mark"),
        attributes_set_on("builtins", "NotImplemented", "x"),
    ],
    ids=["pointers", "offset", "own-pointers", "own-offset", "size", "array-state", "class", "function", "constant"],
)
def test_no_pickle_reaches_foreign_memory_or_shared_objects(tmp_path: Path, text: bytes) -> None:
    """In a process of its own: a segmentation fault must not end the tests."""
    (tmp_path / "skeleton.pkl").write_bytes(text)
    script = "\n".join(
        (
            "import pathlib, pickle, sys, torch",
            "from spotkeeper.train.core import pickling",
            "path = pathlib.Path(sys.argv[1])",
            "shared = lambda: (pathlib.PosixPath.exists, dict(vars(torch.serialization._get_layout)))",
            "data, before = path.read_bytes(), shared()",
            "try:",
            "    value = pickling.loads(data, 'skeleton.pkl')",
            "    print('read', value if 'dtype' not in dir(value) else value['a'])",
            "except (pickling.StateTypeError, pickle.UnpicklingError, ValueError, TypeError) as error:",
            "    print('refused:', error)",
            "assert before == shared()",
        )
    )
    (tmp_path / "read.py").write_text(script)
    ended = run_script(tmp_path, "read.py", "skeleton.pkl")
    assert (ended.returncode, ended.stdout[:8]) == (0, "refused:"), ended.stdout + ended.stderr


def test_unloadable_values_are_refused_at_the_save() -> None:
    """After a week nobody can help it; the message names the type and what to write."""
    for value, name in ((Mine(1), "Mine"), (Kind.BEST, "Kind"), (torch.nn.ReLU, "ReLU"), (os.system, "system")):
        with pytest.raises(StateTypeError, match=rf"cannot save .*{name}.*add_safe_globals\(\[{name}\]\)"):
            Image(RunState(None, {"parts": {"mine": value}}, ()))
    assert issubclass(StateTypeError, ScriptError), "no restart mends it"


def test_types_that_a_script_has_added_are_saved_and_read(added: None) -> None:
    part = {"mine": Mine(5), "weight": torch.arange(3)}
    read = checkpoint.unpack(checkpoint.pack(part))
    assert read["mine"] == Mine(5) and torch.equal(read["weight"], part["weight"])


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_names_a_function_runs_nothing(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(StateTypeError, match=r"skeleton.pkl: cannot load (posix|os)\.system.*If you trust its author"):
        pickling.loads(pickle.dumps(Evil(tmp_path / "ran"), protocol), "skeleton.pkl")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"cbuiltins\ngetattr\n(ccollections\nOrderedDict\nS'fromkeys'\ntR.",  # any attribute of anything
        b"ccollections\nOrderedDict.fromkeys\n.",
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.",
        b"cbuiltins\neval\n(S'1+1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"cspotkeeper.train.store\nshutil\n.",
    ],
)
def test_attributes_and_nested_names_do_not_evade_the_allowlist(text: bytes) -> None:
    with pytest.raises((StateTypeError, pickle.UnpicklingError)):
        pickling.loads(text, "here")


def test_a_forged_checkpoint_is_refused_with_its_file(tmp_path: Path) -> None:
    """The hashes are right: a process that can write a skeleton can also write its COMMIT."""
    image = Image(RunState({}, {}, (checkpoint.pack({}),)))
    memory = bytearray(image.size)
    image.copy_to(memoryview(memory))
    evil = pickle.dumps({"slots": [], "model": b"", "rest": b"", "local": (), "x": Evil(tmp_path / "ran")})
    commit, sums = Commit(1, 5), []
    home = tmp_path / str(commit)
    home.mkdir()
    for name, data in ((store.STATE, b""), (store.SKELETON, evil)):
        (home / name).write_bytes(data)
        sums.append(FileSum(name, len(data), hashlib.sha256(data).hexdigest()))
    store.publish(home, Manifest(commit, 1, (RankPlace(0, 0, 0, True),), tuple(sums), {}, 1.0))
    with pytest.raises(StateTypeError, match=rf"{home}/skeleton.pkl: cannot load posix.system"):
        restore(SoloGang(), tmp_path, None, None)
    assert not (tmp_path / "ran").exists()


def test_every_pickle_is_read_with_the_allowlist() -> None:
    """Neither checkpoints, nor what ranks, trainers and savers say to each other."""
    folder = Path(store.__file__).parents[2]
    found = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if any(
            word in path.read_text()
            for word in ("pickle.load", "Unpickler(", "gather_object", "shelve.open", "marshal.load")
        )
    ]
    assert found == ["train/core/pickling.py"]
