"""``review``: a `pulumi preview` and a stack file as the comment on a pull request, and the guard over data and rules.

Reads files and prints; asks no cloud, runs no engine, knows nothing of who hosts the repository.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from spotkeeper.cli import rules
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import emit, note
from spotkeeper.cli.show import CHECKOUT, STAND_IN, no_checkout, stack_path
from spotkeeper.report.cost import BootDisk, StackCost, stack_cost
from spotkeeper.report.preview import Foreseen, PreviewError, read
from spotkeeper.report.review import COMMENT_BYTES, LABEL, Broken, Review, Verdict, judge, markdown
from spotkeeper.spec.problem import SpecError
from spotkeeper.spec.redact import redact

if TYPE_CHECKING:
    from infra.settings import Settings

STDIN = Path("-")
PREVIEW = "pulumi preview --json --show-sames > preview.json"
OTHER = "spotkeeper review --stack-file FILE"
JOBS = 3  # of a stack are forecast: each takes seconds


@dataclass(frozen=True)
class Comment:
    """``file``: where a pull request's comment is to go, or None. ``stacks``: so many share that one comment."""

    file: Path | None = None
    stacks: int = 1


def review(
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
    """Print the review; then fail where its verdict is that this may not go on. ``quiet``: nothing may change at all.

    Raises:
        CliError: data would be lost and nobody agreed, a rule of ``infra/policy`` is broken, the preview failed, the
            stack file is wrong (all of it is in what is printed), or a file cannot be read.
    """
    path = file or stack_path(stack, OTHER)
    name = stack or path.name.removeprefix("Pulumi.").removesuffix(".yaml")
    text = _text(preview)
    foreseen, broken = _judged(preview, text, name)
    settings: Settings | None = None
    cost: StackCost | None = None
    try:
        settings = _settings(path, name)
        cost = cost_of(settings)
        _apart(settings, path.parent)
    except SpecError as error:  # whoever wrote it reads this comment
        foreseen = replace(foreseen, errors=(redact(str(error)), *foreseen.errors))
    made = Review(name, judge(foreseen, agreed, broken), foreseen, cost, _before(base, name), broken)
    _say(made, settings, comment, as_json=as_json)
    if made.verdict is Verdict.REFUSED:
        names = ", ".join(change.name for change in foreseen.lost())
        remedy = f"keep it; or, if it is meant, --allow-data-loss (on a pull request: the label {LABEL})"
        raise CliError(f"data would be lost: {names}", Exit.REFUSED, remedy)
    if made.verdict is Verdict.BROKEN:
        names = ", ".join(sorted({one.rule for one in broken if one.stops}))
        remedy = f"mend what is declared; a rule that is not yours is turned off in {rules.CONFIG.name} of infra/policy"
        raise CliError(f"rules that no stack may break: {names}", Exit.REFUSED, remedy)
    if made.verdict is Verdict.FAILED:
        raise CliError("the preview failed, or the stack file is wrong; the reasons are above", Exit.FAILED)
    if quiet and foreseen.changes:
        names = ", ".join(change.name for change in foreseen.changes)
        remedy = "pulumi up undoes it; or write into the program what was done by hand"
        raise CliError(f"the cloud is not as it was declared: {names}", Exit.REFUSED, remedy)


def _say(made: Review, settings: Settings | None, comment: Comment, *, as_json: bool) -> None:
    """Whole on standard output, and as short as it must be where the comment goes."""
    jobs = () if as_json and comment.file is None else tuple(_forecasts(settings))
    if comment.file is not None:
        try:
            comment.file.write_text(markdown(made, jobs, COMMENT_BYTES // comment.stacks))
        except OSError as error:
            raise CliError(
                f"{comment.file}: {error.strerror}", Exit.USAGE, "--comment FILE in a folder that is there"
            ) from None
    emit(made, as_json, "" if as_json else markdown(made, jobs).rstrip("\n"))


def _forecasts(settings: Settings | None) -> Iterator[str]:
    """What the stack's own job files will cost, by the prices of this stack file."""
    files = [] if settings is None else [CHECKOUT / job for job in settings.jobs if _inside(job)]
    if settings is None or not files:
        return
    from spotkeeper.cli.forecast import comments, declared

    yield from comments(files[:JOBS], declared(settings))
    if len(files) > JOBS:
        yield f"... and {len(files) - JOBS} more."


def _inside(job: str) -> bool:
    """Whether a path from a branch that nobody has read yet stays within the checkout, links and all."""
    return (CHECKOUT / job).resolve().is_relative_to(CHECKOUT)


def _text(preview: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if preview == STDIN else preview.read_bytes()
    except OSError as error:
        raise CliError(f"{preview}: {error.strerror}", Exit.USAGE, PREVIEW) from None


def _judged(preview: Path, text: bytes, stack: str) -> tuple[Foreseen, tuple[Broken, ...]]:
    """What it foresees, and what the rules say of that."""
    try:
        return read(text), rules.broken(text, stack)
    except PreviewError as error:
        raise CliError(f"{preview}: {error}", Exit.USAGE, PREVIEW) from None


def _settings(path: Path, name: str) -> Settings:
    """A stack file under the stack's name, whatever the file is called.

    Raises:
        SpecError: it is wrong.
        CliError: no checkout is at hand.
    """
    try:
        from infra import settings
        from spotkeeper.local.deploy.config import read_config
    except ImportError:
        raise no_checkout() from None
    return settings.from_config(read_config(path, STAND_IN if name == "local" else None), name)


def _apart(settings: Settings, folder: Path) -> None:
    """
    Raises:
        SpecError: another stack file of the folder is of a stack that rights do not tell from this one.
    """
    from infra.settings import beside

    if told := beside.clashes(settings, folder):
        raise SpecError(told)


def _before(base: Path | None, name: str) -> StackCost | None:
    """A stack that the other branch does not have, or has in words of an older version, is compared with nothing."""
    if base is None or not base.is_file() or not base.read_bytes().strip():
        return None
    try:
        return cost_of(_settings(base, name))
    except SpecError as error:
        note(f"{base} makes no sense here, so nothing is compared with it:\n{redact(str(error))}")
        return None


def cost_of(settings: Settings) -> StackCost:
    """What a stack file allows, by its own prices and the catalog's."""
    from infra.catalog import DISK_PRICES
    from infra.settings.state import pool_state

    boots = {
        pool.name: BootDisk(pool.boot_disk.size_gb, DISK_PRICES.get(pool.boot_disk.type)) for pool in settings.pools
    }
    states = [pool_state(settings, pool) for pool in settings.pools]
    return stack_cost(states, boots, settings.limits.machines, settings.limits.usd_per_hour)
