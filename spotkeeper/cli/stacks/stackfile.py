"""Finds, reads and checks stack files (``check``); makes JSON Schemas of the files that users write (``schema``)."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from spotkeeper.cli.output import emit, note
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import STACK as LOCAL_STACK
from spotkeeper.contract.notification import is_reference
from spotkeeper.contract.parse.problem import Problem, SpecError, located, nearest
from spotkeeper.contract.parse.typed import read_text
from spotkeeper.contract.stack import LOCAL_PROJECT

if TYPE_CHECKING:
    from infra.settings.model import Channel, Settings
    from infra.settings.pool import Pool, Reservation

CHECKOUT = Path(__file__).resolve().parents[3]
STAND_IN = "http://127.0.0.1:80"  # placeholder for a one-machine cloud's address, which is known only while it runs
STACK = "stack"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SETTING = re.compile(r'^config\["(?:spotkeeper:)?([^"]+)"\]')


@dataclass(frozen=True)
class StackFile:
    """A stack's name, its flat configuration as Pulumi's engine passes it, and the settings made from it."""

    name: str
    config: dict[str, str]
    settings: Settings


def read_stack_file(file: Path | None, stack: str | None, other: str) -> StackFile:
    """Read and check a stack file.

    Args:
        file: its path; None: the file of ``stack``.
        stack, other: as for :func:`stack_path`.

    Raises:
        SpecError: the stack file is invalid; the problems have line numbers.
        CliError: no such stack, or the package ``infra`` is missing.
    """
    try:
        from infra.settings.read import clashes, from_config
    except ImportError:
        raise no_checkout() from None
    path = file or stack_path(stack, other)
    lines = _lines(path)
    name = path.name.removeprefix("Pulumi.").removesuffix(".yaml")
    config = configuration(path)
    try:
        found = from_config(config, name)
        if told := clashes(found, path.parent):
            raise SpecError(told)
    except SpecError as error:
        raise located(error, path.name, lines) from None
    return StackFile(name, config, found)


def check_for_local(path: Path) -> None:
    """Check a stack file as the one-machine cloud's stack ``local``; SpecError with lines in this file."""
    from infra.settings.read import from_config
    from spotkeeper.local.deploy.config import read_config

    try:
        from_config(read_config(path, STAND_IN), LOCAL_STACK)
    except SpecError as error:
        raise located(error, path.name, _lines(path)) from None


def configuration(path: Path) -> dict[str, str]:
    """Read a stack file's flat configuration. With the project ``local`` it is for a one-machine cloud."""
    from spotkeeper.local.deploy.config import read_config

    config = read_config(path)
    return read_config(path, STAND_IN) if config.get("gcp:project") == LOCAL_PROJECT else config


def no_checkout() -> CliError:
    return CliError("the package `infra` is missing here", Exit.MISSING, "run it in a checkout")


def stack_path(stack: str | None, other: str) -> Path:
    """Return the path of a stack's file, in the working folder, else in the checkout.

    Args:
        stack: a name, or the path of a stack file; None: SPOTKEEPER_STACK, else the local stack.
        other: a command line such as ``spotkeeper check FILE``. The error for an unknown stack suggests it.

    Raises:
        CliError: no stack of this name.
    """
    stack = stack or os.environ.get("SPOTKEEPER_STACK", "") or "local"
    if stack.endswith((".yaml", ".yml")):
        return Path(stack)
    if (here := Path(f"Pulumi.{stack}.yaml")).is_file():
        return here
    folder = CHECKOUT / "infra" / "stacks"
    names = sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in folder.glob("Pulumi.*.yaml"))
    if stack in names:
        return folder / f"Pulumi.{stack}.yaml"
    near = nearest(stack, names)
    hint = f" (did you mean {near}?)" if near else f" (there are {', '.join(names)})"
    raise CliError(f"no stack {stack} in {folder}{hint}", Exit.MISSING, f"name its file: {other}")


def _lines(path: Path) -> dict[str, int]:
    """The line number of every setting, by the setting's name in messages.

    Raises:
        SpecError: the file is missing, is not YAML, or has no mapping ``config:``.
    """
    from spotkeeper.contract.parse.yamltext import read

    document, lines = read(read_text(path), path.name)
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        raise SpecError([Problem("config", "missing, must be a mapping with the stack's settings", source=path.name)])
    found = {_SETTING.sub(r"\1", key): line for key, line in lines.items()}
    for key in ("image", "kms_key", "network.vpc"):  # a missing entry for another region is a problem of what it lacks
        if (line := found.get(key, found.get("regions"))) is not None:
            found.setdefault(f"{key}s", line)
    return found


# -- JSON Schema


def schema_of(document: str) -> str:
    """Return the JSON Schema of ``job``, ``sweep``, ``stack`` or ``state`` (``stack/pools.json``, which Pulumi writes).

    ``# yaml-language-server: $schema=job.schema.json`` at the top of a job file makes an editor complete and check it.
    The schema has types and ranges; only ``spotkeeper submit`` checks combinations of fields.

    Raises:
        CliError: no such document, or (``stack``) the package ``infra`` is missing.
    """
    known = ["job", "sweep", STACK, "state"]
    if document not in known:
        near = nearest(document, known)
        hint = f" (did you mean {near}?)" if near else ""
        raise CliError(f"{document}: must be {', '.join(known[:-1])} or {known[-1]}{hint}", Exit.USAGE)
    made = {"job": job_schema, "sweep": sweep_schema, STACK: stack_schema, "state": state_schema}[document]()
    return json.dumps(made, indent=2, ensure_ascii=False)


def job_schema() -> dict[str, Any]:
    return {"$schema": DRAFT, "title": "Spotkeeper job", **_job_types()}


def _job_types() -> dict[str, Any]:
    """Return the schema of a job without what only `sweep` fills in."""
    from spotkeeper.contract.job import JobSpec

    made = _by_hand(_described(JobSpec))
    del made["$defs"]["JobSpec"]["properties"]["trial"], made["$defs"]["Trial"]
    return made


def sweep_schema() -> dict[str, Any]:
    """Return the schema of a search's file. Its `job` is a path or a job, whose `name` may be missing."""
    from spotkeeper.contract.sweepfile import SweepFile

    made = _by_hand(_described(SweepFile))
    made["$defs"] |= _job_types()["$defs"]
    made["$defs"]["JobSpec"]["required"].remove("name")
    about = made["$defs"]["SweepFile"]["properties"]["job"]
    about["anyOf"] = [{"type": "string"}, {"$ref": "#/$defs/JobSpec"}]
    return {"$schema": DRAFT, "title": "Spotkeeper search", **made}


def state_schema() -> dict[str, Any]:
    from spotkeeper.contract.stack import StackState

    return {"$schema": DRAFT, "title": "Spotkeeper state", **_described(StackState)}


def _cloud(name: str) -> dict[str, Any]:
    return {"properties": {"spotkeeper:cloud": {"const": name}}, "required": ["spotkeeper:cloud"]}


def stack_schema() -> dict[str, Any]:
    """Return the schema of a stack file: the fields of ``infra.settings.model.Settings``, as Pulumi names them.

    Raises:
        CliError: the package ``infra`` is missing.
    """
    try:
        from infra.settings.model import Settings
        from infra.settings.read import NAMESPACE
    except ImportError:
        raise no_checkout() from None
    made = _by_hand(_described(Settings))
    types = made["$defs"]
    settings = types.pop(Settings.__name__)
    ours = {f"{NAMESPACE}:{name}": body for name, body in settings["properties"].items()}
    required = [f"{NAMESPACE}:{name}" for name in settings["required"]]
    for name in ("stack", "project"):  # they come from the file's name and from `gcp:project`
        del ours[f"{NAMESPACE}:{name}"]
        required.remove(f"{NAMESPACE}:{name}")
    required.remove(f"{NAMESPACE}:region")
    config = {
        "type": "object",
        "description": "the stack's settings; keys of other namespaces belong to Pulumi's providers",
        "properties": {"gcp:project": {"type": "string", "description": "gcp: the project's id"}, **ours},
        "required": required,
        "oneOf": [{"required": [f"{NAMESPACE}:region"]}, {"required": [f"{NAMESPACE}:regions"]}],
        "allOf": [
            {"if": _cloud("gcp"), "then": {"required": ["gcp:project"]}},
            {"if": _cloud("aws"), "then": {"required": [f"{NAMESPACE}:account"]}},
        ],
        "patternProperties": {f"^(?!{NAMESPACE}:)": {}},
        "additionalProperties": False,
    }
    return {
        "$schema": DRAFT,
        "title": "Spotkeeper stack file (Pulumi.<stack>.yaml)",
        "type": "object",
        "properties": {"config": config},
        "required": ["config"],
        "$defs": types,
    }


def _described(of: type) -> dict[str, Any]:
    """Move each description to its field, where editors look for it. msgspec puts it at a type or a union branch."""
    import msgspec

    schema = msgspec.json.schema(of)
    types: dict[str, Any] = schema.get("$defs", {})
    for one in types.values():
        for field in one.get("properties", {}).values():
            for part in (field, *field.get("anyOf", ())):
                words = part.get("description") or types.get(part.get("$ref", "").rpartition("/")[2], {}).get(
                    "description"
                )
                if words and "description" not in field:
                    field["description"] = words
    return schema


def _by_hand(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from optional fields, since an empty value in a file that a user writes is a mistake."""
    for one in schema.get("$defs", {}).values():
        for field in one.get("properties", {}).values():
            kinds = [part for part in field.get("anyOf", ()) if part != {"type": "null"}]
            if len(kinds) == len(field.get("anyOf", ())):
                continue
            del field["anyOf"]
            field.update({**kinds[0], **field} if len(kinds) == 1 else {"anyOf": kinds})
            if field.get("default", ...) is None:
                del field["default"]
    return schema


# -- the command `check`

EXAMPLES = ("acme", "123456789012", "ami-0c0ffee0c0ffee000", "0123AB-4567CD-89EF01")  # values in the example files


class PlacedProblem(Struct, frozen=True):
    """One problem with its file and line, for an editor or a review."""

    file: str
    line: int | None
    path: str
    value: str | None  # as JSON, shortened
    message: str
    nearest: str | None


class CheckedPool(Struct, frozen=True):
    """A pool. Prices are USD an hour for all of its machines together, in its most expensive zone.

    ``usd_hour_spot``: all machines on spot. ``usd_hour_most``: as many on-demand as allowed, the others on spot.
    """

    name: str
    kind: str
    machine: str
    machines: int
    on_demand: int  # how many of them may be on-demand
    usd_hour_spot: float | None
    usd_hour_most: float
    reserved: tuple[str, ...] = ()  # each of its reservations, in words


class CheckedChannel(Struct, frozen=True):
    """A channel without its address, which may be a secret. ``secret``: the address is in the secret store."""

    name: str
    kind: str
    events: tuple[str, ...]
    secret: bool


class CheckedStack(Struct, frozen=True):
    """The result of a check, as the command prints it."""

    stack: str
    ok: bool
    problems: tuple[PlacedProblem, ...] = ()
    cloud: str = ""
    region: str = ""
    regions: tuple[str, ...] = ()  # the home region first
    pools: tuple[CheckedPool, ...] = ()
    max_machines: int | None = None  # of all spot pools together
    max_usd_hour: float | None = None
    channels: tuple[CheckedChannel, ...] = ()
    jobs: tuple[str, ...] = ()  # job files
    examples: tuple[str, ...] = ()  # keys that still have a value of the example files
    warnings: tuple[str, ...] = ()  # what is valid but can surprise


def run_check(stack: str | None, *, as_json: bool) -> None:
    """Check a stack, print the result, and fail if anything is invalid.

    Args:
        stack: a stack's name, or the path of its file; None: SPOTKEEPER_STACK, else the local stack.

    Raises:
        SpecError: all problems; with ``as_json``, they are printed and a :class:`CliError` is raised instead.
        CliError: no such stack, or the package ``infra`` is missing.
    """
    file = stack_path(stack, "spotkeeper check FILE")
    try:
        checked = check(file)
    except SpecError as error:
        if not as_json:
            raise
        name, count = file.name.removeprefix("Pulumi.").removesuffix(".yaml"), len(error.problems)
        emit(CheckedStack(name, False, tuple(map(_placed, error.problems))), True, "")
        raise CliError(f"{count} problem{'s' * (count != 1)}", Exit.USAGE) from None
    emit(checked, as_json, _text(checked))
    for line in checked.warnings:
        note(f"warning: {line}")


def check(file: Path) -> CheckedStack:
    """Check a stack file.

    Raises:
        SpecError: all problems of the stack file and of the job files that it names.
        CliError: the package ``infra`` is missing.
    """
    try:
        from infra.settings.read import read_jobs
    except ImportError:
        raise no_checkout() from None
    try:
        read = read_stack_file(file, None, "spotkeeper check FILE")
    except SpecError as error:
        raise SpecError([*error.problems, *_of_jobs(file)]) from None
    # As in `up`, deadlines are not compared with the clock: the file of an ended job may have a past one.
    found = read_jobs(read.settings, CHECKOUT, 0.0)
    return _checked(read, tuple(job.name for job in found))


def _of_jobs(file: Path) -> tuple[Problem, ...]:
    """The problems of the job files that an invalid stack file names, without the stack file's own problems."""
    from infra.settings.read import NAMESPACE, read_one
    from spotkeeper.local.deploy.config import read_config

    try:
        names = json.loads(read_config(file).get(f"{NAMESPACE}:jobs", "[]"))
    except (SpecError, ValueError):
        return ()  # the problem is reported already
    problems: list[Problem] = []
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts:
            problems += read_one(name, CHECKOUT, 0.0, None)[1]
    return tuple(problems)


def _placed(one: Problem) -> PlacedProblem:
    return PlacedProblem(one.source, one.line, one.path, one.value, one.message, one.hint)


def _checked(read: StackFile, jobs: tuple[str, ...]) -> CheckedStack:
    from infra.settings.both import idle_regions
    from infra.settings.reserved import over

    settings: Settings = read.settings
    pools = tuple(map(_pool, settings.pools))
    examples = tuple(key for key, text in sorted(read.config.items()) if any(word in text for word in EXAMPLES))
    channels = tuple(map(_channel, settings.channels))
    where, caps = (settings.region, settings.regions), (settings.limits.machines, settings.limits.usd_per_hour)
    surprising = (*over(settings, datetime.now(timezone.utc)), *idle_regions(settings))
    return CheckedStack(read.name, True, (), settings.cloud, *where, pools, *caps, channels, jobs, examples, surprising)


def _channel(channel: Channel) -> CheckedChannel:
    events = tuple(event.value for event in channel.events)
    return CheckedChannel(channel.name, channel.kind, events, is_reference(channel.address))


def _pool(pool: Pool) -> CheckedPool:
    prices = [price for zone in pool.zones if (price := pool.price(zone))]
    dear = max(price.on_demand for price in prices)
    spot = max((price.spot for price in prices if price.spot is not None), default=dear)
    bought = pool.on_demand_machines() if pool.kind == "spot" else pool.size
    return CheckedPool(
        name=pool.name,
        kind=pool.kind,
        machine=pool.machine.type,
        machines=pool.size,
        on_demand=bought,
        usd_hour_spot=round(pool.size * spot, 2) if pool.kind == "spot" else None,
        usd_hour_most=round(bought * dear + (pool.size - bought) * spot, 2),
        reserved=tuple(map(reserved_text, pool.reservations)),
    )


def reserved_text(one: Reservation) -> str:
    when = (f" from {one.starts}" if one.starts else "") + (f" to {one.ends}" if one.ends else "")
    return f"{one.count} reserved in {one.zone} as {one.name}{when}, paid for already: first"


def _text(checked: CheckedStack) -> str:
    left = len(checked.examples)
    examples = f", but {left} field{'s' * (left != 1)} still hold{'s' * (left == 1)} example values" if left else ""
    lines = [f"{checked.stack}: valid ({checked.cloud}, {' and '.join(checked.regions)}){examples}"]
    for pool in checked.pools:
        count = f"{pool.machines} x" if pool.kind == "static" else f"up to {pool.machines} x"
        price = f"${pool.usd_hour_most:.2f} an hour"
        if pool.usd_hour_spot is not None:
            price = f"${pool.usd_hour_spot:.2f} an hour as spot, at most ${pool.usd_hour_most:.2f}"
        lines.append(f"  {pool.name} ({pool.kind}): {count} {pool.machine}, {price}")
        lines += [f"    {told}" for told in pool.reserved]
    caps = [f"{checked.max_machines} machines"] if checked.max_machines is not None else []
    caps += [f"${checked.max_usd_hour:.2f} an hour"] if checked.max_usd_hour is not None else []
    lines += [f"  all spot pools together: at most {' and '.join(caps)} (limits)"] if caps else []
    for channel in checked.channels:
        where = "its address is a secret" if channel.secret else "its address is in the stack file"
        lines.append(f"  channel {channel.name} ({channel.kind}, {where}): {', '.join(channel.events) or 'no events'}")
    lines += [f"  job {name}" for name in checked.jobs]
    if checked.examples:
        lines.append(f"example values to replace: {', '.join(checked.examples)}")
    return "\n".join([*lines, "no cloud was called; pulumi preview and pulumi up check quotas, images and permissions"])
