"""What a mutant is, how it is loaded, and the small worlds that kill most of them.

It is a text patch of shipped code, given to a process of its own by an import hook; no file is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import NamedTuple

from tests.model.story import Story

DECIDE = "spotkeeper.reconcile.decide."
# Code that several mutants change.
SUPERFLUOUS = "    return attempt <= draft.nodes[index].top\n"
OVER = "    return answered and not draft.queries.vms.get((grant.node, grant.attempt))\n"


class Patch(NamedTuple):
    """``old`` occurs exactly once in the module's source."""

    module: str
    old: str
    new: str


class Mutant(NamedTuple):
    name: str
    patches: tuple[Patch, ...]
    story: Story
    breaks: str = ""


def calls(old: str, new: str) -> tuple[Patch, ...]:
    return (Patch(DECIDE + "calls", old, new),)


def in_(room: str, old: str, new: str) -> tuple[Patch, ...]:
    return (Patch(DECIDE + room, old, new),)


def beside(room: str, old: str, new: str) -> tuple[Patch, ...]:
    """Of what decides nothing by itself."""
    return (Patch(f"spotkeeper.{room}", old, new),)


def world(name: str, faults: str = "", request: str = "", **more: object) -> Story:
    """A story with just the faults (by name, as often as there are names) and the request that a mutant needs."""
    kinds = faults.split()
    base = {"rounds": 1, "deaths": 0, "split": False, "faults": len(kinds), "requests": 1 if request else 0}
    given = {"kinds": frozenset(kinds), "request_kinds": frozenset(request.split()), **base, **more}
    return Story(name, **given)  # type: ignore[arg-type]


CALM = world("one node, all well")
NOTICE = world("a notice, perhaps withdrawn", "noticed")
KILL = world("a machine is taken", "killed")
SWAP = world("a swap", request="swap")
MOVE = world("a zone move, perhaps taken back", request="move")
MOVE_NO_ROOM = world("a zone move without room for two machines", request="move", cap=1)
CANCEL = world("a job is cancelled", request="cancel")
STALE_CANCEL = world("a job is cancelled, two rounds", request="cancel", rounds=2, zones=("a",))
STATIC = world("a static machine, a job is cancelled", request="cancel", static=True)
STATIC_TWICE = world("a static machine reboots while another round stalls", "reboots", "cancel", static=True, rounds=2)
TWO_JOBS = world("two jobs, room for one", jobs=2, cap=1, zones=("a",), rounds=2, deaths=0)
TWO_STATIC = world("two jobs, one static machine", jobs=2, cap=1, zones=("a",), rounds=2, static=True)
TWO_RANKS = world("two nodes", nodes=2, cap=5, zones=("a",))
TWO_FINISH = world("two nodes finish", request="finish", nodes=2, cap=5, zones=("a",))


# -- loading


class _Loader(SourceFileLoader):
    patches: tuple[Patch, ...] = ()

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        for patch in self.patches:
            if source.count(patch.old) != 1:
                raise SystemExit(
                    f"{patch.module}: this text occurs {source.count(patch.old)} times, not once:\n{patch.old}"
                )
            source = source.replace(patch.old, patch.new)
        return compile(source, self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Gives patched modules their patched source; everything else is found as ever."""

    def __init__(self, patches: tuple[Patch, ...]) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        mine = tuple(patch for patch in self.patches if patch.module == name)
        if not mine:
            return None
        sys.meta_path.remove(self)
        try:
            found = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if found is None or found.origin is None:
            raise SystemExit(f"no module {name} to make a mutant of")
        loader = _Loader(name, found.origin)
        loader.patches = mine
        return importlib.util.spec_from_file_location(name, found.origin, loader=loader)


def infect(mutant: Mutant) -> None:
    """Load the mutant in this process, instead of what has been loaded of the project so far."""
    for name in [n for n in sys.modules if n == "spotkeeper" or n.startswith(("spotkeeper.", "tests.model"))]:
        if name != __name__:  # its class Mutant is in use
            del sys.modules[name]
    sys.meta_path.insert(0, Finder(mutant.patches))
