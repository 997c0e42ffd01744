"""The parts of the stack's page."""

from __future__ import annotations

from spotkeeper.report.html.markup import Markup, badge, el, fact, join, table
from spotkeeper.report.market import reservation_line
from spotkeeper.report.stack import PoolView, PoolZone, StackView
from spotkeeper.report.text.words import percent, usd


def figures(view: StackView) -> Markup:
    most = "limited only by the pools" if view.max_machines is None else f"at most {view.max_machines}"
    limit = "no limit" if view.max_usd_hour is None else f"of at most {usd(view.max_usd_hour)} (limits.usd_per_hour)"
    return el(
        "div",
        fact("Cost per hour now", usd(view.usd_hour), "machines of jobs, and static ones"),
        fact("At list prices", usd(view.listed_usd_hour), limit),
        fact("Dynamic machines", str(view.machines), most),
        fact("Jobs", str(view.jobs), f"{view.training} training"),
        fact("On hold", str(len(view.held))),
        fact("Cloud", {"gcp": "Google Cloud", "aws": "AWS"}.get(view.cloud, view.cloud), view.region),
        class_="facts",
    )


def held(view: StackView) -> Markup:
    rows = [
        (
            el("a", job.name, href=f"/jobs/{job.job}"),
            job.reason,
            "" if job.usd_per_day is None else f"{usd(job.usd_per_day)} a day for its disks",
        )
        for job in view.held
    ]
    return table(("Job", "Why", "Costs"), rows, "Jobs on hold", (2,), "No job is on hold.")


def pools(view: StackView) -> Markup:
    return join(_pool(pool) for pool in view.pools)


def _pool(pool: PoolView) -> Markup:
    share = pool.used / pool.max_machines if pool.max_machines else 0.0
    meter = el(
        "div",
        el("div", style=f"width:{100 * min(1.0, share):.0f}%"),
        class_="bar",
        style="max-width:320px",
        role="meter",
        aria_valuenow=pool.used,
        aria_valuemin=0,
        aria_valuemax=pool.max_machines,
        aria_label=f"{pool.name}: machines in use",
    )
    dear = f", {pool.used_on_demand} of at most {pool.max_on_demand} on demand" if pool.kind == "spot" else ""
    paid = f", {pool.used_reserved} of {pool.reserved} reserved" if pool.reserved or pool.used_reserved else ""
    return el(
        "section",
        el("h2", pool.name, " ", badge(pool.kind, pool.kind), " ", el("span", pool.machine_type, class_="dim small")),
        meter,
        el("p", f"{pool.used} of {pool.max_machines} machines in use{dear}{paid}", class_="dim small"),
        _zones(pool),
        *(el("p", reservation_line(one), class_="dim small") for one in pool.reservations),
        class_="card",
    )


def _zones(pool: PoolView) -> Markup:
    if pool.kind != "spot":
        always = [(zone.zone, _price(zone.on_demand)) for zone in pool.zones]
        return table(("Zone", "Price an hour"), always, f"Zones of {pool.name}", (1,))
    rows = [_zone(zone) for zone in pool.zones]
    head = (
        "Zone",
        "Machines",
        "Spot an hour",
        "On demand",
        "Of on-demand",
        "Requests served",
        "Interruptions",
        "Per 100 h",
    )
    return table(
        head,
        rows,
        f"Zones of {pool.name}: prices now; requests and interruptions in the last 90 days",
        tuple(range(1, 8)),
    )


def _zone(zone: PoolZone) -> tuple[str, ...]:
    share = zone.spot / zone.on_demand if zone.spot is not None and zone.on_demand else None
    served = "-" if zone.availability is None else f"{percent(zone.availability)} of {zone.served + zone.refused}"
    rate = f"{100 * zone.interruptions / zone.hours:.1f}" if zone.hours >= 1 else "-"
    spot = _price(zone.spot) + ("" if zone.reported or zone.spot is None else " (list)")
    return (
        zone.zone,
        str(zone.machines),
        spot,
        _price(zone.on_demand),
        "-" if share is None else percent(share),
        served,
        str(zone.interruptions) if zone.served else "-",
        rate,
    )


def _price(amount: float | None) -> str:
    return "-" if amount is None else usd(amount)
