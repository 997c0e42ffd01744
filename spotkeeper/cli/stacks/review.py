"""``review``: writes the pull request comment on a `pulumi preview`; fails if the change loses data or breaks a rule.

It reads files and prints; it calls no cloud, runs no engine, and works with any repository host. It checks the rules of
`infra/policy` itself, except those that the configuration file there turns off. Pulumi's engine could check them too,
but its JSON says only that a rule is broken, not which one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.cli.output import emit, note
from spotkeeper.cli.stacks.stackfile import CHECKOUT, configuration, no_checkout, stack_path
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract import codec
from spotkeeper.contract.parse.problem import SpecError, nearest
from spotkeeper.contract.redact import redact
from spotkeeper.report.money.cost import BootDisk, StackCost, stack_cost
from spotkeeper.report.review.preview import UNKNOWN, Preview, PreviewError, declared, read
from spotkeeper.report.review.review import COMMENT_BYTES, LABEL, Broken, Review, Verdict, judge, markdown

if TYPE_CHECKING:
    from infra.policy.resource import DeclaredResource
    from infra.policy.rules import Rule
    from infra.settings.model import Settings

CONFIG = CHECKOUT / "infra" / "policy" / "config.json"
ALL_RULES = "all"  # Pulumi's word for every rule of a pack
STDIN = Path("-")
PREVIEW = "pulumi preview --json --show-sames > preview.json"
OTHER = "spotkeeper review --stack-file FILE"
JOBS = 3  # most forecasts in a review, since each takes seconds


@dataclass(frozen=True)
class Comment:
    """The file for the pull request comment, if any, and the number of stacks whose reviews go into the comment."""

    file: Path | None = None
    stacks: int = 1


def run(
    preview: Path,
    file: Path | None,
    stack: str | None,
    base: Path | None,
    *,
    agreed: bool,
    quiet: bool,
    as_json: bool,
    comment: Comment = Comment(),
) -> None:
    """Print the review, then fail unless its verdict allows the change. ``quiet``: fail on any change.

    Raises:
        CliError: data would be lost without consent, a rule of ``infra/policy`` is broken, the preview failed, or the
            stack file is invalid (the review shows each of these); or a file cannot be read.
    """
    path = file or stack_path(stack, OTHER)
    name = stack or path.name.removeprefix("Pulumi.").removesuffix(".yaml")
    text = _text(preview)
    found, broken = _judged(preview, text, name)
    settings: Settings | None = None
    cost: StackCost | None = None
    try:
        settings = _settings(path, name)
        cost = cost_of(settings)
        _apart(settings, path.parent)
    except SpecError as error:  # the comment shows the problem to the author of the stack file
        found = replace(found, errors=(redact(str(error)), *found.errors))
    made = Review(name, judge(found, agreed, broken), found, cost, _before(base, name), broken)
    _say(made, settings, comment, as_json=as_json)
    if made.verdict is Verdict.REFUSED:
        names = ", ".join(change.name for change in found.lost())
        remedy = f"keep the data, or allow the loss with --allow-data-loss (on a pull request: the label {LABEL})"
        raise CliError(f"data would be lost: {names}", Exit.REFUSED, remedy)
    if made.verdict is Verdict.BROKEN:
        names = ", ".join(sorted({one.rule for one in broken if one.stops}))
        remedy = f"fix the declaration; to turn a rule off, edit {CONFIG.name} in infra/policy"
        raise CliError(f"rules are broken: {names}", Exit.REFUSED, remedy)
    if made.verdict is Verdict.FAILED:
        raise CliError("the preview failed or the stack file is invalid: see above", Exit.FAILED)
    if quiet and found.changes:
        names = ", ".join(change.name for change in found.changes)
        remedy = "pulumi up to revert manual changes, or add them to the program"
        raise CliError(f"the cloud differs from the declaration: {names}", Exit.REFUSED, remedy)


def _say(made: Review, settings: Settings | None, comment: Comment, *, as_json: bool) -> None:
    """Print the whole review, and write it to the comment's file, shortened to fit."""
    jobs = () if as_json and comment.file is None else tuple(_forecasts(settings))
    if comment.file is not None:
        try:
            comment.file.write_text(markdown(made, jobs, COMMENT_BYTES // comment.stacks))
        except OSError as error:
            why = f"{comment.file}: {error.strerror}"
            raise CliError(why, Exit.USAGE, "--comment FILE in an existing folder") from None
    emit(made, as_json, "" if as_json else markdown(made, jobs).rstrip("\n"))


def _forecasts(settings: Settings | None) -> Iterator[str]:
    """Forecasts of the stack's own job files, at the prices of this stack file."""
    files = [] if settings is None else [CHECKOUT / job for job in settings.jobs if _inside(job)]
    if settings is None or not files:
        return
    from spotkeeper.cli.jobs.forecast import comments
    from spotkeeper.cli.jobs.ground import declared

    yield from comments(files[:JOBS], declared(settings))
    if len(files) > JOBS:
        yield f"... and {len(files) - JOBS} more."


def _inside(job: str) -> bool:
    """Whether a path from an unreviewed branch stays within the checkout, even if it leads through symbolic links."""
    return (CHECKOUT / job).resolve().is_relative_to(CHECKOUT)


def _text(preview: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if preview == STDIN else preview.read_bytes()
    except OSError as error:
        raise CliError(f"{preview}: {error.strerror}", Exit.USAGE, PREVIEW) from None


def _judged(preview: Path, text: bytes, stack: str) -> tuple[Preview, tuple[Broken, ...]]:
    """Return the changes of a preview, and the rules that they break."""
    try:
        return read(text), broken_rules(text, stack)
    except PreviewError as error:
        raise CliError(f"{preview}: {error}", Exit.USAGE, PREVIEW) from None


def _settings(path: Path, name: str) -> Settings:
    """Read the settings of a stack file for the stack ``name``, whatever the file is called.

    Raises:
        SpecError: the file is invalid.
        CliError: the package ``infra`` is missing.
    """
    try:
        from infra.settings.read import from_config
    except ImportError:
        raise no_checkout() from None
    return from_config(configuration(path), name)


def _apart(settings: Settings, folder: Path) -> None:
    """Raise SpecError if another stack file of the folder declares permissions that overlap with this stack's."""
    from infra.settings.read import clashes

    if told := clashes(settings, folder):
        raise SpecError(told)


def _before(base: Path | None, name: str) -> StackCost | None:
    """Return the cost on the base branch; None if its stack file is missing or invalid (perhaps in an older format)."""
    if base is None or not base.is_file() or not base.read_bytes().strip():
        return None
    try:
        return cost_of(_settings(base, name))
    except SpecError as error:
        note(f"{base} is not valid, so the cost before the change is not shown:\n{redact(str(error))}")
        return None


def cost_of(settings: Settings) -> StackCost:
    """Return the cost of a stack at the prices of its file and of the price list."""
    from infra.catalog import DISK_PRICES
    from infra.settings.model import pool_state

    boots = {
        pool.name: BootDisk(pool.boot_disk.size_gb, DISK_PRICES.get(pool.boot_disk.type)) for pool in settings.pools
    }
    states = [pool_state(settings, pool) for pool in settings.pools]
    limits = settings.limits
    return stack_cost(states, boots, limits.machines, limits.usd_per_hour, settings.team_states())


# -- the rules of infra/policy


class Enforcement(Enum):
    """Pulumi's enforcement levels. ``remediate`` has the effect of ``mandatory``, since no rule repairs anything."""

    ADVISORY = "advisory"
    MANDATORY = "mandatory"
    REMEDIATE = "remediate"
    DISABLED = "disabled"


class _Configured(Struct, frozen=True, forbid_unknown_fields=True):
    """The longer form of an entry in the configuration file."""

    enforcementLevel: Enforcement  # noqa: N815  # Pulumi's name


class _NotYetError(Exception):
    """Raised if a rule reads a value that is known only after `up`; only the policy pack, at `up`, can check it."""


def broken_rules(preview: bytes, stack: str, config: Path = CONFIG) -> tuple[Broken, ...]:
    """Return the rules that the preview of a stack breaks, mandatory rules first.

    Rules over the whole stack are checked only if the preview lists all of it (`--show-sames`).

    Raises:
        CliError: the file that turns rules off is invalid, or the package ``infra`` is missing.
        PreviewError: the text is not a preview.
    """
    try:
        from infra.policy.resource import DeclaredResource
        from infra.policy.rules import RULES
    except ImportError:
        raise no_checkout() from None
    found, whole = declared(preview)
    seen = tuple(
        DeclaredResource(one.type, one.name, _Map(one.inputs), stack, one.protect, one.retain) for one in found
    )
    levels = _levels(config, RULES)
    told = [one for rule in RULES for one in _of(rule, seen, whole, levels)]
    return tuple(sorted(told, key=lambda one: not one.stops))


def _of(
    rule: Rule, every: Sequence[DeclaredResource], whole: bool, levels: Mapping[str, Enforcement]
) -> Iterator[Broken]:
    usual = Enforcement.MANDATORY if rule.mandatory else Enforcement.ADVISORY
    unread = (_NotYetError, JSONDecodeError)  # a secret is not JSON
    level = levels.get(rule.name, levels.get(ALL_RULES, usual))
    if level is not Enforcement.DISABLED:
        for one in every:
            yield from (_said(rule, one, message, level) for message in rule.of_one(one, *unread))
    level = levels.get(rule.together, levels.get(rule.name, levels.get(ALL_RULES, usual)))
    if level is not Enforcement.DISABLED and whole:
        yield from (_said(rule, one, message, level) for one, message in rule.of_all(every, *unread))


def _said(rule: Rule, one: DeclaredResource, message: str, level: Enforcement) -> Broken:
    return Broken(rule.name, one.type, one.name, redact(message), level is not Enforcement.ADVISORY)


def _levels(config: Path, rules: Sequence[Rule]) -> dict[str, Enforcement]:
    """Read the enforcement level of each configured rule.

    Raises:
        CliError: the file is invalid, or names an unknown rule (a misspelt rule would silently stay on).
    """
    if not config.is_file():
        return {}
    try:
        written = codec.decode(config.read_bytes(), dict[str, Enforcement | _Configured])
    except (msgspec.DecodeError, OSError) as error:
        remedy = '{"no-public-address": "disabled"}, or "advisory", or "mandatory"'
        raise CliError(f"{config.name} of infra/policy: {error}", Exit.USAGE, remedy) from None
    known = {ALL_RULES, *(rule.name for rule in rules), *(rule.together for rule in rules)}
    for name in written:
        if name not in known:
            near = nearest(name, known)
            hint = f" (did you mean {near}?)" if near else ""
            message = f"{config.name} of infra/policy: {name}: no such rule{hint}"
            raise CliError(message, Exit.USAGE, 'docs/security.md, "Policy rules"')
    return {name: each if isinstance(each, Enforcement) else each.enforcementLevel for name, each in written.items()}


# -- inputs that are known only in part


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
