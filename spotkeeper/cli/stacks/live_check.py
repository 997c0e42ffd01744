"""``live-check``: checks a stack in its real cloud, beginning with the mistakes that are cheapest to find.

It submits a temporary job of one spot machine, which the function launches and replaces as for any job, and deletes
everything at the end. It also runs the commands of docs/first-live-hour.md that come with a pattern of the expected
output, and lists the commands that a person must judge.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from msgspec import Struct

from spotkeeper.cli.jobs import drill
from spotkeeper.cli.jobs.preempt import TEMPLATE, check, preempt
from spotkeeper.cli.output import agree, emit, note
from spotkeeper.cli.stack import open_stack
from spotkeeper.cli.stacks import live
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.log_lines import NodeLines
from spotkeeper.client.target import Target, notify
from spotkeeper.contract.job import JobSpec, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.names import vm_name
from spotkeeper.contract.record import Phase, Record, SlotState
from spotkeeper.contract.stack import Model, PoolState, StackState
from spotkeeper.reconcile.store.store import Store

PROBE = Path(__file__).with_name("live_probe.py")
EVERY_S = 1.0  # real
LEAST_S = 90.0  # shortest time limit, real seconds at any speed of the cloud's clock
MACHINE_S, TRAIN_S, GONE_S = 1200.0, 600.0, 900.0  # virtual: limits for hello, first checkpoint, and all deletions
COMMAND_S = 60.0  # time limit for a command of the page
HOURS = 0.5  # duration of the temporary job, from which the highest possible cost follows


class CheckResult(str, Enum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"
    BY_HAND = "by hand"


class Row(Struct, frozen=True):
    """The result of one check. ``remedy``: what to do, or the command to type; ``took_s``: real seconds."""

    check: str
    state: CheckResult
    found: str
    remedy: str = ""
    took_s: float = 0.0


class CheckFailedError(Exception):
    """Raised if a check failed, with the reason and the remedy."""

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(found)
        self.remedy = remedy


class CheckSkippedError(Exception):
    """Raised if a check does not apply to this stack, with the reason."""


@dataclass
class Probe:
    """The stack that ``live-check`` checks, and the temporary job that it submits there."""

    target: Target
    store: Store
    state: StackState
    pool: PoolState
    name: str = field(default_factory=lambda: f"live-check-{secrets.token_hex(2)}")
    job: str = ""

    def record(self) -> Record:
        held = self.store.read_record(self.job)
        if held is None:
            raise CheckFailedError(f"the record of {self.name} is gone")
        return held.value

    def until(self, what: str, limit_s: float, read: Callable[[Record], str | None]) -> str:
        """Call ``read`` until it returns a text, and return that text. ``limit_s``: virtual seconds.

        Raises:
            CheckFailedError: the limit has passed, or the job ended or went on hold.
        """
        end = time.monotonic() + max(LEAST_S, limit_s / self.target.clock.scale)
        while time.monotonic() < end:
            record = self.record()
            if (found := read(record)) is not None:
                return found
            if record.phase is not Phase.RUN:
                raise CheckFailedError(f"the job is {record.phase.value}: {record.reason}", self._refusals())
            time.sleep(EVERY_S)
        raise CheckFailedError(f"no {what} within {limit_s / 60:.0f} minutes", self._refusals())

    def _refusals(self) -> str:
        """Return an error's remedy: the cloud's last refusal, since it is the likely cause; else commands to try."""
        said = [entry.detail for entry in self.store.list_ledger(self.job) if entry.event is Event.REFUSED]
        commands = f"spotkeeper logs {self.name}; spotkeeper status {self.name}"
        return f"the cloud refused: {said[-1]}" if said else commands

    def most_usd(self) -> float:
        """The highest possible cost in USD, which is also the job's `max_usd`."""
        return round(max(0.5, self.pool.dearest(Model.ON_DEMAND) * HOURS * 2), 2)

    def machine(self) -> str:
        slot = self.record().nodes[0].cur
        return vm_name(self.state.stack, self.job, 0, slot.attempt) if slot else ""


def run(stack: str | None, *, yes: bool, listed: bool, as_json: bool) -> None:
    """Run all checks, print a table, and clean up. ``listed``: only print the checks.

    Raises:
        CliError: no such stack, the cost was declined, or a check failed.
        StoreError: the bucket failed.
    """
    if listed:
        found = live.of_stack(stack)
        emit(found, as_json, "\n".join(live.text(found)).rstrip("\n"))
        return
    target, store = open_stack(stack)
    state = target.state(store)
    probe = Probe(target, store, state, _pool(state))
    if not yes:
        _agree(probe)
    with _cleaned_up():
        rows = list(_noted(_rows(probe), quiet=as_json))
    emit(rows, as_json, _table(rows))
    failed = [row.check for row in rows if row.state is CheckResult.FAILED]
    if failed:
        raise CliError(f"{len(failed)} of {len(rows)} checks failed: {', '.join(failed)}", Exit.FAILED)


@contextlib.contextmanager
def _cleaned_up() -> Iterator[None]:
    """Make a closed terminal or a SIGTERM clean up as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pool(state: StackState) -> PoolState:
    pools = [pool for pool in state.pools if pool.kind == "spot" and pool.max_machines]
    if not pools:
        raise CliError("the stack has no spot pool, so there is nothing to check", Exit.USAGE)
    return min(pools, key=lambda pool: pool.dearest(Model.ON_DEMAND))


def _agree(probe: Probe) -> None:
    what = (
        f"{probe.state.stack}: this launches one spot machine of {probe.pool.name} ({probe.pool.machine_type}), "
        f"preempts it once, and deletes everything; it costs at most ${probe.most_usd():.2f}"
    )
    agree(what, "Spend it?", f"spotkeeper live-check --stack {probe.state.stack} --yes")


def _rows(probe: Probe) -> Iterator[Row]:
    yield _row("the function answers", lambda: _health(probe))
    yield _row("strangers are refused", lambda: _stranger(probe))
    try:
        submitted = _row("a job is accepted", lambda: _submit(probe))
        yield submitted
        if submitted.state is CheckResult.OK:
            yield from _paid(probe)
    finally:
        probe.job = probe.job or probe.store.read_name(probe.name) or ""  # the submission may have been interrupted
        if probe.job:
            yield _row("everything is deleted", lambda: _delete(probe))


def _paid(probe: Probe) -> Iterator[Row]:
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("a spot machine is launched", lambda: _launched(probe)),
        ("its disk is attached and the job trains", lambda: _trains(probe)),
        ("the job cannot get the machine's token", lambda: _fenced(probe)),
        ("a checkpoint is durable", lambda: _saves(probe)),
        ("a preemption costs no step", lambda: _drill(probe)),
    )
    for number, (name, run) in enumerate(checks):
        row = _row(name, run)
        yield row
        if row.state is CheckResult.FAILED and number < 2:  # all later checks need a machine that trains
            yield from (Row(left, CheckResult.SKIPPED, f"skipped, needs: {name}") for left, _ in checks[number + 1 :])
            return
    yield from _of_the_page(probe)


def _row(name: str, run: Callable[[], str]) -> Row:
    began = time.monotonic()
    try:
        state, found, remedy = CheckResult.OK, run(), ""
    except CheckSkippedError as error:
        state, found, remedy = CheckResult.SKIPPED, str(error), ""
    except (CheckFailedError, CliError) as error:
        state, found, remedy = CheckResult.FAILED, str(error), error.remedy
    return Row(name, state, found, remedy, round(time.monotonic() - began, 1))


def _request(probe: Probe, method: str, path: str) -> int:
    import requests

    url = f"{probe.target.function_url or probe.state.function_url}".rstrip("/") + path
    try:
        return requests.request(method, url, timeout=30.0, json={} if method == "POST" else None).status_code
    except requests.RequestException as error:
        remedy = "see the function's log; after `pulumi up`, its rights and first start may take minutes"
        raise CheckFailedError(f"{url}: {type(error).__name__}", remedy) from None


def _health(probe: Probe) -> str:
    status = _request(probe, "GET", "/v1/health")
    if status not in (200, 401, 403):  # 401 and 403 come from the platform's own check of tokens
        raise CheckFailedError(f"got status {status}", "see the function's log")
    return f"status {status}"


def _stranger(probe: Probe) -> str:
    status = _request(probe, "POST", "/v1/tick")
    if status not in (401, 403):
        raise CheckFailedError(
            f"a tick without a token got status {status}", "remove public invokers from the function"
        )
    return f"status {status} for a tick without a token"


def _submit(probe: Probe) -> str:
    from spotkeeper.client.pack import pack
    from spotkeeper.client.submit import submit_file

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe.py").write_text(PROBE.read_text("utf-8"))
        source = pack(Path(folder))
    spec = JobSpec(
        name=probe.name,
        command=("probe.py",),
        source=".",
        pools=(probe.pool.name,),
        policy="spot",
        static="never",
        max_usd=probe.most_usd(),
        hold_days=0.0,
    )
    done, heard = submit_file(probe.target, Path(probe.name), spec, source)
    probe.job = done.job
    if not heard:
        raise CheckFailedError(
            "the function rejects requests from this shell", "log in, or be added to `submitters` in the stack file"
        )
    return f"{probe.name} ({done.job})"


def _launched(probe: Probe) -> str:
    def read(record: Record) -> str | None:
        slot = record.nodes[0].cur
        if slot is None or slot.state is SlotState.INTENT:
            return None
        return f"{slot.model.value} in {slot.zone}, {probe.machine()}"

    return probe.until("machine that said hello", MACHINE_S, read)


def _trains(probe: Probe) -> str:
    def read(record: Record) -> str | None:
        progress = probe.store.read_progress(probe.job)
        return f"step {progress.step}" if record.gen and progress is not None and progress.step else None

    return probe.until("step", TRAIN_S, read)


def _fenced(probe: Probe) -> str:
    if probe.target.local is not None:
        raise CheckSkippedError("does not apply to the local cloud, whose machines are your own processes")
    told = json.loads(probe.until("`live-check:` line in the job's log", TRAIN_S, lambda _: _said(probe)))
    if "given" in told["tokens"]:
        remedy = 'the image lacks what spotkeeper-fence needs (docs/security.md, "The units on a machine")'
        raise CheckFailedError("a job was given the machine's token", remedy)
    return f"{'; '.join(dict.fromkeys(told['tokens']))}; torch {told['torch']}, {told['devices']} devices"


def _said(probe: Probe) -> str | None:
    lines = NodeLines(probe.store, probe.job, 0, probe.record().gen).read()
    found = (re.search(r"live-check: (\{.*\})", line.text) for line in lines)
    return next((each[1] for each in found if each), None)


def _saves(probe: Probe) -> str:
    def read(_: Record) -> str | None:
        progress = probe.store.read_progress(probe.job)
        return None if progress is None or progress.commit_step is None else f"step {progress.commit_step}"

    return probe.until("checkpoint", TRAIN_S, read)


def _drill(probe: Probe) -> str:
    try:
        check(probe.target, probe.state, announced=True)
    except CliError:
        raise CheckSkippedError(f'{TEMPLATE} is not set (docs/day-two.md, "Drills")') from None
    victim = drill.choose(probe.store, probe.state, probe.record(), None, announced=True, now=probe.target.clock.now())
    targets = drill.targets_of(probe.store, probe.record(), probe.target)
    preempt(probe.target, probe.state, victim)
    read = lambda: drill.read(probe.target, probe.store, victim)  # noqa: E731
    view = drill.follow(read, victim, targets, drill.shown(as_json=True))
    if not view.passed:
        from spotkeeper.report.drill import misses

        raise CheckFailedError("; ".join(misses(view)), f"spotkeeper report {probe.name}")
    return f"{victim.vm} was replaced; the next step came after {view.elapsed_s:.0f} s"


def _delete(probe: Probe) -> str:
    """Cancel the job, and wait until the cloud has confirmed each deletion to the function."""
    machine = probe.machine()
    cancel = lookup.new_request(RequestKind.CANCEL, probe.target.clock.now(), "live-check")
    with contextlib.suppress(CliError):  # it may be over already
        lookup.send_request(probe.store, probe.record(), cancel)
    notify(probe.target, probe.store, probe.job)
    end = time.monotonic() + max(LEAST_S, GONE_S / probe.target.clock.scale)
    while probe.record().phase is not Phase.DONE:
        if time.monotonic() > end:
            remedy = f"delete {machine} and its disk by hand in the cloud console, since they cost money until then"
            raise CheckFailedError(f"{machine or probe.name} still exists", remedy)
        time.sleep(EVERY_S)
    return "machine and disk are gone"


def _of_the_page(probe: Probe) -> Iterator[Row]:
    """Run the commands of :data:`live.PAGE` that have a pattern for their output; list the others, for a person."""
    if probe.target.local is not None:
        return
    words = {"JOB": probe.name, "VM": probe.machine(), "ZONE": probe.record().zone or ""}
    for one in live.of_stack(probe.state.stack):
        command = re.sub(r"(?<![A-Z_])(JOB|VM|ZONE)(?![A-Z_])", lambda word: words[word[0]], one.command)
        if one.match:
            yield _row(one.what, lambda command=command, one=one: _answer(command, one))  # type: ignore[misc]
        else:
            yield Row(one.what, CheckResult.BY_HAND, f"expect: {one.expect}", command)


def _answer(command: str, one: live.LiveCheck) -> str:
    try:
        done = subprocess.run(  # noqa: S602 - the page's own commands, which are for a shell
            command, shell=True, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CheckFailedError(f"no answer within {COMMAND_S:.0f} s", command) from None
    said = (done.stdout.strip() or done.stderr.strip())[-200:]
    if not re.search(one.match, done.stdout.strip(), re.MULTILINE):
        raise CheckFailedError(f"{said or 'nothing'}; expected: {one.expect}", command)
    return said


def _noted(rows: Iterator[Row], *, quiet: bool) -> Iterator[Row]:
    for row in rows:
        if not quiet:
            note(f"{row.state.value:8} {row.check}")
        yield row


def _table(rows: list[Row]) -> str:
    width = max(len(row.check) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.check:{width}}  {row.state.value:8} {row.took_s:6.1f} s  {row.found}")
        if row.remedy:
            lines.append(f"{'':{width}}  {'do:' if row.state is CheckResult.FAILED else 'type:':8} {row.remedy}")
    return "\n".join(lines)
