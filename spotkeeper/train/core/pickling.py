"""Pickles of state, written and read with one allowlist of types, so that loading a pickle runs no foreign code.

A pickle names functions that the unpickler calls. So anyone who can write a checkpoint, or send data as a rank, could
run code as the job. A name outside the allowlist is therefore an error: a load refuses the pickle, and the first save
refuses a state that could not be loaded again. A pickle may set attributes of instances that it makes, but never of
classes and functions, which other code uses too. NumPy values are made by checked constructors (``arrays.py``). A
script adds its own types with a function of torch, before ``attach()``::

    torch.serialization.add_safe_globals([MyState])

Tensors are stored outside the pickles (``checkpoint/image.py``).
"""

from __future__ import annotations

import enum
import functools
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from spotkeeper.train.core.errors import PartError

_BUILTINS = "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"
_NUMPY = "bool_ bool str_ bytes_ datetime64 timedelta64 complex64 complex128 clongdouble longdouble"
_NUMPY += " float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
# Allowed names by module. Each is a function or class that does nothing but make a value from its arguments.
_NAMES: dict[str, str] = {
    "builtins": _BUILTINS + " Ellipsis NotImplemented",
    "collections": "OrderedDict defaultdict Counter deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID",
    "pathlib": "Path PosixPath PurePath PurePosixPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath",  # Python 3.13
    "types": "SimpleNamespace",
    "argparse": "Namespace",
    "random": "Random",
    "numpy": _NUMPY,
    "torch": "Size device",
    "torch.serialization": "_get_layout",
    "torch.distributed.tensor.placement_types": "Shard Replicate Partial _StridedShard",
    "torch.distributed._tensor.placement_types": "Shard Replicate Partial _StridedShard",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "spotkeeper.train.core.arrays": "array scalar dtype objects bit_generator generator random_state seed_sequence",
    "spotkeeper.train.core.pickling": "bound",
    "spotkeeper.train.core.tensors": "TensorSlot",
    "spotkeeper.train.core.shards": "Chunk TensorShard",
    "spotkeeper.train.checkpoint.sharded": "_SaveIntent",
}
_KNOWN = {(module, name) for module, words in _NAMES.items() for name in words.split()}


_SHARED = (type, enum.Enum, torch.Tensor)  # no pickle creates these objects; other code uses them, so none changes them


class StateTypeError(PartError):
    """The state has a type that is not on the allowlist. The message names the type and the remedy."""


def dumps(value: object, tensor: Callable[[torch.Tensor], object] | None = None) -> bytes:
    """Pickle a value. For each tensor, ``tensor`` returns a placeholder to pickle instead.

    Raises:
        StateTypeError: the value has a type that :func:`loads` would refuse.
    """
    out = io.BytesIO()
    (_Pickler(out) if tensor is None else _TensorPickler(out, tensor)).dump(value)
    return out.getvalue()


def loads(data: bytes | memoryview, where: str, tensor: Callable[[Any], torch.Tensor] | None = None) -> Any:
    """Load a pickle with the allowlist.

    Args:
        where: the file or the sender, for messages.
        tensor: returns the tensor for a placeholder that the ``tensor`` argument of :func:`dumps` returned.

    Raises:
        StateTypeError: a type is not on the allowlist.
        pickle.UnpicklingError: the data is not a pickle.
    """
    return _Unpickler(data, where, tensor).load()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self._plain: set[type] = set()  # types known to need no special treatment

    def reducer_override(self, obj: Any) -> Any:
        """Reduce NumPy values with ``arrays.py``; refuse functions and classes that are not on the allowlist."""
        kind = type(obj)
        if kind in self._plain:
            return NotImplemented
        if issubclass(kind, type) or (callable(obj) and hasattr(obj, "__qualname__")):
            module, name = getattr(obj, "__module__", None) or "", obj.__qualname__
            # Python 3.11 pickles an enum's member as a call getattr(class, name); the class is pickled and checked too.
            if obj is not getattr and not _allowed(module, name):
                raise StateTypeError(_refusal("cannot save", module, name, "Omit it from state_dict(), or allow it"))
        elif _is_bound(kind) and _allowed(kind.__module__, kind.__qualname__):
            return bound, (kind, obj.__getstate__())
        elif "numpy" in sys.modules and (parts := _array_parts(obj)) is not None:
            return parts
        elif not callable(obj):
            self._plain.add(kind)
        return NotImplemented


class _TensorPickler(_Pickler):
    """Only where tensors are: ``persistent_id`` is called for every number and every text, 0.2 us each."""

    def __init__(self, out: io.BytesIO, tensor: Callable[[torch.Tensor], object]) -> None:
        super().__init__(out)
        self._tensor = tensor

    def persistent_id(self, obj: Any) -> object:
        return self._tensor(obj) if isinstance(obj, torch.Tensor) else None


_PythonUnpickler: Any = pickle._Unpickler  # the type stubs lack its stack and methods


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Python's unpickler with checks. (The C unpickler has no hook to check the object that a BUILD opcode changes.)

    torch's ``weights_only`` unpickler reads only protocol 2, and cannot read sets and some other types.
    """

    def __init__(self, data: bytes | memoryview, where: str, tensor: Callable[[Any], torch.Tensor] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._where, self._tensor = where, tensor
        self._built: set[type] = set()  # types known to be on the allowlist

    def load_build(self) -> None:
        """Set an instance's state. Refuse a class that is not on the allowlist, and slots that the class lacks."""
        state, kind = self.stack[-1], type(self.stack[-2])
        known = kind in self._built or _allowed(kind.__module__, kind.__qualname__)
        if not known or _is_bound(kind) or issubclass(kind, _SHARED):
            raise pickle.UnpicklingError(f"{self._where} must not change a {kind.__module__}.{kind.__qualname__}")
        self._built.add(kind)
        slots = state[1] if isinstance(state, tuple) and len(state) == 2 else None
        if slots and not hasattr(kind, "__setstate__"):
            for name in slots:
                if not isinstance(getattr(kind, name, None), types.MemberDescriptorType):
                    raise pickle.UnpicklingError(f"{self._where}: class {kind.__qualname__} has no slot {name!r:.80}")
        super().load_build()

    def load_newobj(self) -> None:
        if _is_bound(self.stack[-2]):  # the instance would be uninitialized memory
            raise pickle.UnpicklingError(f"{self._where} makes a {self.stack[-2].__qualname__} without its constructor")
        super().load_newobj()

    def load_newobj_ex(self) -> None:
        if _is_bound(self.stack[-3]):
            raise pickle.UnpicklingError(f"{self._where} makes a {self.stack[-3].__qualname__} without its constructor")
        super().load_newobj_ex()

    dispatch = _PythonUnpickler.dispatch | {
        pickle.BUILD[0]: load_build,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
    }

    def persistent_load(self, pid: Any) -> torch.Tensor:
        if self._tensor is None:
            raise pickle.UnpicklingError(f"{self._where}: a tensor is not allowed here")
        return self._tensor(pid)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (added := _added().get((module, name))) is not None:
            return added
        if not _allowed(module, name):
            what, remedy = f"{self._where}: cannot load", "If you trust its author, allow it"
            raise StateTypeError(_refusal(what, module, name, remedy))
        return super().find_class(module, name)


def bound(kind: type, words: dict[str, Any]) -> Any:
    """Make an instance of a C++ class of torch (a DTensor's placement) by a call of the class's constructor."""
    if not _is_bound(kind):
        raise pickle.UnpicklingError(f"{kind!r:.80} is not a class of torch")
    return kind(**words)


def _is_bound(kind: Any) -> bool:
    return isinstance(kind, type) and _is_pybind11(kind)


@functools.lru_cache(1024)
def _is_pybind11(kind: type) -> bool:
    """Whether pybind11 made the class. ``__new__`` of such a class leaves the instance uninitialized."""
    return any(base.__name__ == "pybind11_object" for base in kind.__mro__)


def _array_parts(obj: Any) -> tuple[Any, ...] | None:
    from spotkeeper.train.core import arrays  # here, so that a script without NumPy does not import it

    try:
        return arrays.reduce(obj)
    except ValueError as error:
        raise StateTypeError(str(error)) from None


def _allowed(module: str, name: str) -> bool:
    if (module.replace("numpy.core.", "numpy._core."), name) in _KNOWN or (module, name) in _added():
        return True
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def _added() -> dict[tuple[str, str], Any]:
    """Return the types that the script and torch have added to the allowlist, by their names in pickles."""
    found = {}
    for entry in torch.serialization.get_safe_globals():
        if isinstance(entry, tuple):  # a class and its name in pickles
            module, _, name = entry[1].rpartition(".")
            found[module, name] = entry[0]
        else:
            found[entry.__module__, entry.__qualname__] = entry
    return found


def _member(kind: Any, name: str) -> Any:
    """Return an enum's member. A pickle gets this function in place of ``getattr``, so it reads no other attribute."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"the pickle gets the attribute {name!r:.80}, which is not a member of an enum")


def _refusal(what: str, module: str, name: str, remedy: str) -> str:
    add = f"call torch.serialization.add_safe_globals([{name.rpartition('.')[2]}]) before attach()"
    return f"{what} {module}.{name}: a checkpoint contains only tensors and plain values. {remedy}: {add}"
