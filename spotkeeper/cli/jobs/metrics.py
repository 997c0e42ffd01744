"""``metrics``: prints the metrics that a job's script reports, or writes them for TensorBoard."""

from __future__ import annotations

import secrets
from pathlib import Path

from spotkeeper.cli.output import emit, note, say
from spotkeeper.cli.stack import open_stack
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.metrics import MetricsReader
from spotkeeper.contract.record import Record

EVENTS = "events.out.tfevents.0000000000.spotkeeper"  # TensorBoard looks for ``tfevents`` in names


def run(job: str, stack: str | None, tensorboard: Path | None, *, as_csv: bool, as_json: bool) -> None:
    """Print a job's metrics; with ``tensorboard``, write an event file into a folder there that has the job's name.

    Raises:
        CliError: no such job; no metrics yet; both CSV and JSON; or the folder cannot be written.
    """
    from spotkeeper.report.job.metrics import job_metrics
    from spotkeeper.report.job.tensorboard import event_file
    from spotkeeper.report.text.metrics import metrics_csv, metrics_table

    if as_csv and as_json:
        raise CliError("--csv and --json exclude each other", Exit.USAGE)
    _, store = open_stack(stack)
    record = lookup.find_job(store, job)
    reader = MetricsReader(store, record.job)
    found = reader.read()
    for gen, why in sorted(reader.invalid.items()):
        note(f"the metrics of generation {gen} are left out: {why}")
    metrics = job_metrics(record.job, record.name, found)
    if not metrics.metrics:
        raise _none(record)
    if tensorboard is not None:
        file = _write(tensorboard / record.name, event_file(metrics.metrics))
        note(f"{file}: {len(metrics.metrics)} metrics; show them: tensorboard --logdir {tensorboard}")
    if as_csv:
        say(metrics_csv(metrics), end="")
    elif as_json or tensorboard is None:
        emit(metrics, as_json, metrics_table(metrics))


def _none(record: Record) -> CliError:
    if record.over:
        return CliError(f"{record.name} ({record.job}) has reported no metrics", Exit.MISSING)
    return CliError(
        f"{record.name} ({record.job}) has no metrics yet",
        Exit.MISSING,
        'they appear a minute after the script calls run.report(loss=...): docs/metrics.md, "Report"',
    )


def _write(folder: Path, content: bytes) -> Path:
    """Write the event file as a whole; it replaces an older one of this job."""
    file = folder / EVENTS
    temporary = folder / f".{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(file)
    except OSError as error:
        raise CliError(f"--tensorboard: {folder} cannot be written: {error.strerror or error}", Exit.USAGE) from None
    return file
