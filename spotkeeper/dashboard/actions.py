"""Actions on a job, such as a pause. `spotkeeper dashboard` gives the pages the functions to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract.record import Record


@dataclass(frozen=True)
class Action:
    """One action. ``run`` gets the job's record and the value that the user entered, and returns what it did.

    ``consequence``: the sentence of the confirmation; ``asks``: the name of the value to enter, "" for none.
    """

    name: str
    consequence: str
    run: Callable[[Record, str], str]
    asks: str = ""
    danger: bool = False
    offered: Callable[[Record], bool] = lambda record: not record.over


@dataclass(frozen=True)
class Commands:
    """What `spotkeeper dashboard` passes to the pages. ``read_only``: the server refuses every action."""

    actions: Mapping[str, Action] = field(default_factory=dict)
    checkpoints: Callable[[Record], Sequence[tuple[str, ...]]] = lambda _: ()
    read_only: bool = False

    def run(self, name: str, record: Record, value: str = "") -> str:
        """Carry out an action; return a sentence about it.

        Raises:
            CliError: the dashboard is read-only, has no such action, or the command refused it.
        """
        if self.read_only:
            raise CliError("this dashboard is read-only", Exit.REFUSED)
        if name not in self.actions:
            raise CliError(f"{name}: no such action", Exit.USAGE)
        return self.actions[name].run(record, value)
