"""Pulumi's engine through its Automation API: how a test runs it, and what the engine tells of a deployment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pulumi.automation import CommandResult, EngineEvent, OpType, PulumiCommand

_NOTHING_DONE = (OpType.SAME, OpType.READ, OpType.REFRESH)
_ACCOUNTS = ("PULUMI_", "AWS_")
_PROVIDERS = "pulumi:providers:"  # one of the defaults keeps all of the stack file, and is nothing in any cloud


class Command(PulumiCommand):
    """The `pulumi` command as any user has it: with none of this one's accounts and settings.

    The API adds to its process's environment, and takes nothing away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.command = "env"

    def run(self, args: list[str], cwd: str, additional_env: Mapping[str, str], *heard: Any) -> CommandResult:
        ours = [name for name in os.environ if name.startswith(_ACCOUNTS) and name not in additional_env]
        without = [f"--unset={name}" for name in ours]
        return super().run([*without, "pulumi", "--non-interactive", *args], cwd, additional_env, *heard)


class Step(NamedTuple):
    op: OpType
    type: str
    name: str


class Told:
    """A deployment, as the engine tells of it. ``hear``: called with each of its diagnostics while it goes on."""

    def __init__(self, hear: Callable[[str], object] = lambda said: None) -> None:
        self._hear = hear
        self.events: list[EngineEvent] = []

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        if said := event.diagnostic_event:
            self._hear(said.message)

    @property
    def said(self) -> str:
        return "".join(said.message for event in self.events if (said := event.diagnostic_event))

    @property
    def steps(self) -> list[Step]:
        """What has been done, in the order in which it was."""
        done = (event.res_outputs_event for event in self.events)
        steps = (each.metadata for each in done if each and not each.planning)
        return [Step(step.op, step.type, step.urn.rsplit("::", 1)[-1]) for step in steps]

    def changed(self) -> list[Step]:
        done = [step for step in self.steps if step.op not in _NOTHING_DONE]
        return [step for step in done if not step.type.startswith(_PROVIDERS)]

    def deleted(self) -> list[str]:
        return [step.name for step in self.steps if step.op is OpType.DELETE]
