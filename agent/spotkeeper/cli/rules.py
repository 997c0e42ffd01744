"""What the rules of ``infra/policy`` find in a foreseen stack, by the inputs that `pulumi preview --json` tells.

They are the rules of `--policy-pack infra/policy`, and the file that turns some of them off is the same. The pack alone
would not do for the comment on a pull request: the engine's JSON says that a rule is broken, and not which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import msgspec
from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.show import CHECKOUT, no_checkout
from spotkeeper.report.preview import UNKNOWN, declared
from spotkeeper.report.review import Broken
from spotkeeper.spec import codec
from spotkeeper.spec.problem import nearest
from spotkeeper.spec.redact import redact

if TYPE_CHECKING:
    from infra.policy.rules import Rule
    from infra.policy.seen import Seen

CONFIG = CHECKOUT / "infra" / "policy" / "config.json"
ALL = "all"  # Pulumi's own word for every rule of a pack


class Level(Enum):
    """As Pulumi's policies have it; ``remediate`` is ``mandatory`` for a rule that mends nothing, as ours are."""

    ADVISORY = "advisory"
    MANDATORY = "mandatory"
    REMEDIATE = "remediate"
    DISABLED = "disabled"


class _Configured(Struct, frozen=True, forbid_unknown_fields=True):
    """The longer form."""

    enforcementLevel: Level  # noqa: N815  # Pulumi's name


class _NotYetError(Exception):
    """A value that is known only after `up` was read: the check says nothing, and `up` is judged by the pack."""


def broken(preview: bytes, stack: str, config: Path = CONFIG) -> tuple[Broken, ...]:
    """What is wrong with a stack of this name, those that stop it first.

    Rules over the whole stack are asked only where the preview tells of all of it (`--show-sames`).

    Raises:
        CliError: the file that turns rules off makes no sense; no checkout is at hand.
        PreviewError: it is no preview.
    """
    try:
        from infra.policy.rules import RULES
        from infra.policy.seen import Seen
    except ImportError:
        raise no_checkout() from None
    found, whole = declared(preview)
    seen = tuple(Seen(one.type, one.name, _Map(one.inputs), stack, one.protect, one.retain) for one in found)
    levels = _levels(config, RULES)
    told = [one for rule in RULES for one in _of(rule, seen, whole, levels)]
    return tuple(sorted(told, key=lambda one: not one.stops))


def _of(rule: Rule, every: Sequence[Seen], whole: bool, levels: Mapping[str, Level]) -> Iterator[Broken]:
    usual = Level.MANDATORY if rule.mandatory else Level.ADVISORY
    unread = (_NotYetError, JSONDecodeError)  # a document that is a secret is no JSON
    level = levels.get(rule.name, levels.get(ALL, usual))
    if level is not Level.DISABLED:
        for one in every:
            yield from (_said(rule, one, message, level) for message in rule.of_one(one, *unread))
    level = levels.get(rule.together, levels.get(rule.name, levels.get(ALL, usual)))
    if level is not Level.DISABLED and whole:
        yield from (_said(rule, one, message, level) for one, message in rule.of_all(every, *unread))


def _said(rule: Rule, one: Seen, message: str, level: Level) -> Broken:
    return Broken(rule.name, one.type, one.name, redact(message), level is not Level.ADVISORY)


def _levels(config: Path, rules: Sequence[Rule]) -> dict[str, Level]:
    """
    Raises:
        CliError: it is no such file, or names a rule that there is not: somebody would believe it to be off.
    """
    if not config.is_file():
        return {}
    try:
        written = codec.decode(config.read_bytes(), dict[str, Level | _Configured])
    except (msgspec.DecodeError, OSError) as error:
        remedy = '{"no-public-address": "disabled"}, or advisory, or mandatory'
        raise CliError(f"{config.name} of infra/policy: {error}", Exit.USAGE, remedy) from None
    known = {ALL, *(rule.name for rule in rules), *(rule.together for rule in rules)}
    for name in written:
        if name not in known:
            near = nearest(name, known)
            hint = f" (did you mean {near}?)" if near else ""
            raise CliError(f"{config.name} of infra/policy: {name}: no such rule{hint}", Exit.USAGE, "docs/operate.md")
    return {name: each if isinstance(each, Level) else each.enforcementLevel for name, each in written.items()}


# --- inputs of which some are not known yet ----------------------------------------------


def _known(value: object) -> object:
    if value == UNKNOWN:
        raise _NotYetError
    if isinstance(value, dict):
        return _Map(value)
    return _List(value) if isinstance(value, list) else value


class _Map(Mapping[str, object]):
    def __init__(self, inner: dict[str, Any]) -> None:
        self._inner = inner

    def __getitem__(self, key: str) -> object:
        return _known(self._inner[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class _List(Sequence[object]):
    def __init__(self, inner: list[Any]) -> None:
        self._inner = inner

    @overload
    def __getitem__(self, at: int) -> object: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[object]: ...
    def __getitem__(self, at: int | slice) -> object:
        found = self._inner[at]
        return _List(cast("list[Any]", found)) if isinstance(at, slice) else _known(found)

    def __len__(self) -> int:
        return len(self._inner)
