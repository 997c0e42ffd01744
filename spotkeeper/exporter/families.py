"""Metric families of one reading of a stack. Pure.

Every name begins with ``spotkeeper_``. Times are seconds of the stack's clock, sizes bytes, money US dollars. Labels
``job`` and ``instance`` belong to Prometheus, so a training job has ``job_name`` and ``job_id``. The number of series
is bounded: states, causes and models are fixed sets, the stack file lists pools and zones, and ended jobs are dropped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from spotkeeper.contract.job import PRIORITIES
from spotkeeper.contract.record import Hold, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.exporter.reading import JobReading, StackReading
from spotkeeper.report.job.recovery import Recovery
from spotkeeper.report.job.view import NodeState

JOB = ("job_name", "job_id")
STATES = ("starting", "training", "regrouping", "queued", "hold", "ending", "done")
CAUSES = ("notice", "loss", "crash", "move", "swap", "resize", "grow", "reboot", "planned end", "hang", "straggler")
MOST_TEXT = 64  # characters of a label's value


def families(reading: StackReading) -> Iterator[Metric]:
    """Yield all families of a reading."""
    yield from _stack(reading)
    yield from _pools(reading)
    yield from _queue(reading)
    yield from _jobs(reading.jobs)
    yield from _training(reading)
    yield from _money(reading)
    yield from _recoveries(reading.jobs)
    yield from _hosts(reading.jobs)


def state_of(one: JobReading) -> str:
    """Return the state of a job, one of ``STATES``."""
    record = one.record
    if record.phase in (Phase.END, Phase.DONE):
        return "done" if record.phase is Phase.DONE else "ending"
    if one.queued:
        return "queued"
    if record.phase is Phase.HOLD:
        return "hold"
    if not record.gen:
        return "starting"
    return "regrouping" if record.stop else "training"


def plain(text: str) -> str:
    """Return a free text, such as a job's name, as a label's value: printable, at most ``MOST_TEXT`` characters."""
    return "".join(char if char.isprintable() else " " for char in text)[:MOST_TEXT]


def _key(one: JobReading) -> list[str]:
    return [plain(one.record.name), one.record.job]


def _gauge(name: str, text: str, labels: Iterable[str] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"spotkeeper_{name}", text, labels=list(labels))


# -- the stack


def _stack(reading: StackReading) -> Iterator[Metric]:
    found = Counter(state_of(one) for one in reading.jobs)
    jobs = _gauge("jobs", "Jobs by state; a finished job is counted for one more hour.", ["state"])
    for state in STATES:
        jobs.add_metric([state], found[state])
    yield jobs
    reasons = Counter(one.record.hold for one in reading.jobs if state_of(one) == "hold")
    held = _gauge(
        "jobs_on_hold",
        "Jobs on hold by reason. Those held for cloud or capacity are retried, trials at a rung wait for the others of "
        "their search, and the rest wait for a resume.",
        ["reason"],
    )
    for why in Hold:
        if why is not Hold.QUEUE:  # the state is "queued"
            held.add_metric([why.value], reasons[why])
    yield held
    yield GaugeMetricFamily("spotkeeper_jobs_unreadable", "Jobs whose record cannot be read.", value=reading.unreadable)
    left_out = "Jobs without series of their own, because the stack has too many."
    yield GaugeMetricFamily("spotkeeper_jobs_left_out", left_out, value=reading.left_out)
    failing = "1 if no tick has succeeded for so long that `spotkeeper status` warns, else 0."
    yield GaugeMetricFamily("spotkeeper_ticks_failing", failing, value=float(bool(reading.site.no_tick)))
    at = "When the bucket was last read, unix time."
    yield GaugeMetricFamily("spotkeeper_exporter_last_read_timestamp_seconds", at, value=reading.at)
    took = "Duration of the last read of the bucket."
    yield GaugeMetricFamily("spotkeeper_exporter_last_read_seconds", took, value=reading.took_s)
    cost = "What the exporter's reads of the bucket cost at the present pace, US dollars an hour."
    yield GaugeMetricFamily("spotkeeper_exporter_read_cost_usd_per_hour", cost, value=reading.spending.usd)


def _pools(reading: StackReading) -> Iterator[Metric]:
    used = _gauge("pool_machines", "Machines that jobs have or wait for, by pool.", ["pool", "model"])
    most = _gauge("pool_machines_max", "The limit on the pool's machines.", ["pool"])
    price = _gauge("machine_price_usd_per_hour", "Price of a machine, US dollars an hour.", ["pool", "zone", "model"])
    for pool in reading.view.pools:
        if pool.kind == "static":
            used.add_metric([pool.name, Model.STATIC.value], pool.used)
        else:
            used.add_metric([pool.name, Model.SPOT.value], pool.used - pool.used_on_demand - pool.used_reserved)
            used.add_metric([pool.name, Model.ON_DEMAND.value], pool.used_on_demand)
            if pool.reserved or pool.used_reserved:
                used.add_metric([pool.name, Model.RESERVED.value], pool.used_reserved)
        most.add_metric([pool.name], pool.max_machines)
        for zone in pool.zones:
            for model, usd in ((Model.ON_DEMAND, zone.on_demand), (Model.SPOT, zone.spot)):
                if usd is not None:
                    price.add_metric([pool.name, zone.zone, model.value], usd)
    yield from (used, most, price)


def _queue(reading: StackReading) -> Iterator[Metric]:
    waiting = _gauge("queue_waiting", "Jobs that wait for machines, by team and priority.", ["team", "priority"])
    waits = [claim for claim in reading.claims if claim.waiting]
    found = Counter((claim.team, PRIORITIES[claim.priority]) for claim in waits)
    machines = _gauge("team_machines", "Machines that are reserved for the team's jobs.", ["team"])
    entitled = _gauge("team_entitled", "The team's part of all machines, by shares and what the teams want.", ["team"])
    use = _gauge("team_use_usd", "What the team's machines have cost at list prices, halved every 24 hours.", ["team"])
    month = _gauge("team_month_usd", "What they have cost in this calendar month (UTC), US dollars.", ["team"])
    for team in reading.teams:
        name = plain(team.name)
        for priority in PRIORITIES:
            waiting.add_metric([name, priority], found[team.name, priority])
        machines.add_metric([name], team.machines)
        entitled.add_metric([name], team.entitled)
        use.add_metric([name], team.use_usd)
        month.add_metric([name], team.month_usd)
    yield from (waiting, machines, entitled, use, month)
    oldest = max((reading.now - claim.waits for claim in waits if claim.waits is not None), default=0.0)
    told = "How long the job that has waited longest has waited; 0 if none waits."
    yield GaugeMetricFamily("spotkeeper_queue_oldest_wait_seconds", told, value=max(0.0, oldest))
    taken = "How often the queue has taken machines from a job, since a day before the exporter's start."
    yield CounterMetricFamily("spotkeeper_recalls", taken, value=reading.recalls)


# -- jobs


def _jobs(jobs: tuple[JobReading, ...]) -> Iterator[Metric]:
    info = _gauge(
        "job_info", "1 for each job; its labels say who submitted it and where it runs.", [*JOB, "user", "zone"]
    )
    state = _gauge("job_state", "1 for the job's present state.", [*JOB, "state"])
    hold = _gauge("job_on_hold", "1 for a job on hold, by reason.", [*JOB, "reason"])
    wanted = _gauge("job_nodes", "Nodes that the job should have.", JOB)
    machines = _gauge("job_machines", "Machines of the job by state.", [*JOB, "zone", "model", "state"])
    for one in jobs:
        key, record = _key(one), one.record
        info.add_metric([*key, plain(one.view.user), record.zone or ""], 1.0)
        state.add_metric([*key, state_of(one)], 1.0)
        if state_of(one) == "hold" and record.hold is not None:
            hold.add_metric([*key, record.hold.value], 1.0)
        wanted.add_metric(key, record.wanted())
        nodes = (node for node in one.view.nodes if node.state is not NodeState.WAITING and node.model is not None)
        found = Counter((node.zone, node.model.value if node.model else "", node.state.value) for node in nodes)
        for labels, count in sorted(found.items()):
            machines.add_metric([*key, *labels], count)
    yield from (info, state, hold, wanted, machines)


def _training(reading: StackReading) -> Iterator[Metric]:
    step = _gauge("job_step", "Optimizer steps done; it falls when steps are repeated after a loss.", JOB)
    total = _gauge("job_steps_planned", "Optimizer steps of the whole run, as far as known.", JOB)
    loss = _gauge("job_loss", "The loss that the script reported last.", JOB)
    pace = _gauge("job_samples_per_second", "Samples of all ranks per second of real time, while the job trains.", JOB)
    left = _gauge("job_remaining_seconds", "Training time left, from remaining steps and their measured time.", JOB)
    idle = _gauge("job_seconds_without_step", "Time since the last step, if that is unusually long.", JOB)
    age = _gauge("job_checkpoint_age_seconds", "Time since the newest durable checkpoint was reported.", JOB)
    copy = _gauge("job_checkpoint_copy_age_seconds", "Time since the newest complete copy in the bucket was made.", JOB)
    every = _gauge("job_image_steps", "Steps between images of the state in savers' memory, while the job trains.", JOB)
    cost = _gauge("job_image_cost_ratio", "Share of the training time that these images cost.", JOB)
    for one in reading.jobs:
        key, view, told = _key(one), one.view, one.progress
        over = view.over()
        committed = None if told is None or told.commit_at is None else max(0.0, reading.now - told.commit_at)
        copied = max((mirrored.at for mirrored in one.record.mirror), default=None)
        for family, value in (
            (step, view.step),
            (total, view.total_steps),
            (loss, view.loss),
            (pace, view.samples_per_s),
            (left, view.left_s),
            (idle, view.no_new_step_s),
            (age, None if over else committed),
            (copy, None if over or copied is None else max(0.0, reading.now - copied)),
            (every, view.image_steps),
            (cost, view.image_share),
        ):
            if value is not None:
                family.add_metric(key, float(value))
    yield from (step, total, loss, pace, left, idle, age, copy, every, cost)


def _money(reading: StackReading) -> Iterator[Metric]:
    spent = _gauge("job_spent_usd", "What the job has cost, machines and egress, US dollars.", JOB)
    moved = _gauge("job_egress_usd", "What its transfers between regions have cost, US dollars.", JOB)
    demand = _gauge("job_on_demand_usd", "What the same machine-hours would have cost on-demand, US dollars.", JOB)
    rate = _gauge("job_usd_per_hour", "What the job's dynamic machines cost now, US dollars an hour.", JOB)
    for one in reading.jobs:
        key, money = _key(one), one.view.money
        spent.add_metric(key, money.spent)
        moved.add_metric(key, money.egress)
        demand.add_metric(key, money.on_demand_only)
        rate.add_metric(key, one.usd_hour)
    yield from (spent, moved, demand, rate)
    view = reading.view
    total = "What all machines cost now, static ones included, US dollars an hour."
    yield GaugeMetricFamily("spotkeeper_usd_per_hour", total, value=view.usd_hour)
    listed = "What dynamic machines cost at list prices, which the stack's limit counts, US dollars an hour."
    yield GaugeMetricFamily("spotkeeper_listed_usd_per_hour", listed, value=view.listed_usd_hour)
    if view.max_usd_hour is not None:
        limit = "The stack's limit on the cost of dynamic machines at list prices, US dollars an hour."
        yield GaugeMetricFamily("spotkeeper_max_usd_per_hour", limit, value=view.max_usd_hour)


def _recoveries(jobs: tuple[JobReading, ...]) -> Iterator[Metric]:
    lost = CounterMetricFamily(
        "spotkeeper_job_preemptions",
        "Spot machines that the cloud took, with and without a notice.",
        labels=[*JOB, "notice"],
    )
    took = SummaryMetricFamily(
        "spotkeeper_job_recovery_seconds",
        "Time without training in ended recoveries, by cause: from the stop to the first step.",
        labels=[*JOB, "cause"],
    )
    again = CounterMetricFamily("spotkeeper_job_repeated_steps", "Steps done twice, as far as known.", labels=list(JOB))
    crashes = CounterMetricFamily("spotkeeper_job_crashes", "Failures of the job's own code.", labels=list(JOB))
    for one in jobs:
        key, view = _key(one), one.view
        lost.add_metric([*key, "yes"], view.preemptions.announced)
        lost.add_metric([*key, "no"], view.preemptions.unannounced)
        idle: dict[str, list[float]] = defaultdict(list)
        for recovery in view.recoveries:
            if recovery.seconds is not None:
                idle[cause_of(recovery)].append(recovery.stopped_s + (recovery.start_s or 0.0))
        for cause, seconds in sorted(idle.items()):
            took.add_metric([*key, cause], len(seconds), sum(seconds))
        again.add_metric(key, sum(recovery.steps_again or 0 for recovery in view.recoveries))
        crashes.add_metric(key, view.crashes)
    yield from (lost, took, again, crashes)


def _hosts(jobs: tuple[JobReading, ...]) -> Iterator[Metric]:
    node = [*JOB, "node"]
    hosts = {
        "cpu": _gauge("node_cpu_usage_ratio", "Share of the machine's CPU time that was not idle, 0 to 1.", node),
        "memory_bytes": _gauge("node_memory_bytes", "The machine's memory.", node),
        "memory_used_bytes": _gauge("node_memory_used_bytes", "The machine's memory in use.", node),
        "disk_bytes": _gauge("node_disk_bytes", "Size of the node's data disk.", node),
        "disk_used_bytes": _gauge("node_disk_used_bytes", "Used space of the node's data disk.", node),
    }
    device = [*node, "device"]
    devices = {
        "busy": _gauge("device_usage_ratio", "Share of time in which the accelerator was busy, 0 to 1.", device),
        "memory_bytes": _gauge("device_memory_bytes", "The accelerator's memory.", device),
        "memory_used_bytes": _gauge("device_memory_used_bytes", "The accelerator's memory in use.", device),
        "temperature_c": _gauge("device_temperature_celsius", "The accelerator's temperature.", device),
        "power_w": _gauge("device_power_watts", "The accelerator's power draw.", device),
        "ecc_errors": _gauge("device_ecc_errors", "Uncorrected memory errors since the driver was loaded.", device),
    }
    for one in jobs:
        for number, usage in one.usage:
            key = [*_key(one), str(number)]
            for name, family in hosts.items():
                if (value := getattr(usage, name)) is not None:
                    family.add_metric(key, float(value))
            for each in usage.devices:
                for name, family in devices.items():
                    if (value := getattr(each, name)) is not None:
                        family.add_metric([*key, str(each.index)], float(value))
    yield from hosts.values()
    yield from devices.values()


def cause_of(recovery: Recovery) -> str:
    """Return the cause of a recovery as one of ``CAUSES``, or "other"."""
    return next((cause for cause in CAUSES if recovery.cause.startswith(cause)), "other")
