"""Stands for parts of torch that no test script needs. Every interpreter with this folder on its path runs it first."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRATIONS = "torch._meta_registrations"  # what operators do to tensors without data
NATIVE = "torch._native"  # kernels in Triton and CUTLASS; it imports CUDA's bindings
MODULES = ("torch._dynamo", "torch.export", REGISTRATIONS, NATIVE)


class StandIn(ModuleType):
    """Has every attribute; a call returns its first argument, as decorators do."""

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)

    def __call__(self, function: object = None, *_: object, **__: object) -> object:
        return function


class StandIns(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == REGISTRATIONS:
            importlib.import_module("torch._prims.rng_prims")  # torch.Generator needs it, and has it from there


sys.meta_path.insert(0, StandIns())
