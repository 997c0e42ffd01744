"""Tables on narrow terminals: columns go, names and numbers stay whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from spotkeeper.cli.local.localcloud import tables
from spotkeeper.contract.generation import Progress
from spotkeeper.local.core.views import DiskView, ReservationView, Status, VmView, ZoneView
from spotkeeper.local.spot_market.bill import Bill
from spotkeeper.report.job.view import JobView, job_view
from spotkeeper.report.text.render import job_table, live, status
from spotkeeper.report.text.words import usd
from tests.contract.samples import STACK
from tests.report.ledgers import (
    HOUR,
    NOTICED,
    A,
    a_record,
    report,
)


@pytest.mark.parametrize("width", [56, 60, 76, 110])
@pytest.mark.parametrize("show", [status, live])
def test_narrow_tables_drop_columns_and_cut_no_word(show: Callable[[JobView], RenderableType], width: int) -> None:
    view = job_view(a_record(), None, NOTICED, STACK, 600.0)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(show(view))
    text = capture.get()
    assert "notice, 1m40s left" in text and "1 (master)" in text and "…" not in text
    inner = width - 4 * (show is live)  # its box
    shown = (
        "sk-prod-abcdefgh-n0000-a1" in text,
        "model  " in text,
        "zone  " in text,
        " age" in text.partition("no room")[0],
    )
    assert shown == (inner >= 57, inner >= 66, inner >= 79, inner >= 89)
    assert ("no room here for" in text) == (not all(shown)), "what is left out is named, and where it is"
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [60, 80, 110])
def test_names_are_never_cut(width: int) -> None:
    name = "sk-local-abcdefgh-n0000-a11"
    vm = VmView(name, "1", A, "spot", "a3-highgpu-1g", "RUNNING", "127.173.0.4", {}, "", 2.5, notice_until=1.0)
    disk = DiskView(name, A, 50, "READY", (name,), {})
    zone = ZoneView(A, 8, 2, 0, overridden=True, partitioned=False, spot_price_share=0.23)
    held = ReservationView("res-one", A, "a3-highgpu-1g", 1, 2)
    found = Status(0.0, 20.0, "", (vm,), (disk,), (zone,), (), Bill(1.0, 2.0, 3.0, 4.0), {}, (held,))
    view = job_view(a_record(), None, NOTICED, STACK, 9 * HOUR)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(tables(found))
        console.print(report(view))
    text = capture.get()
    assert text.count(name) == 3 and "running, notice" in text and "8 (set)" in text and "…" not in text
    assert f"spot in {A}" in text and "stood still" in text
    assert f"reservation res-one in {A}: 1 of 2" in text
    assert (" a3-highgpu-1g  " in text, "  nodes  " in text) == (width >= 110, width >= 80)
    assert ("no room here for " in text) == (width < 110), "what a narrow terminal leaves out is named, and who has it"
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [40, 80, 110, 160, 300])
def test_long_reasons_cut_neither_names_nor_numbers(width: int) -> None:
    reason = "waiting for static machine rack-7: only its disk has the newest checkpoint (generation 3, step 1200) " * 2
    progress = Progress(gen=3, step=123456, at=1.0, loss=2.1130)
    waits = job_view(a_record(reason=reason.strip(), name="a-job-with-a-name"), progress, NOTICED, STACK, 600.0)
    other = job_view(a_record(job="hgfedcba", name="other"), progress, NOTICED, STACK, 600.0)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(job_table([waits, other]), crop=False)
    text = capture.get()
    head, *lines = text.splitlines()
    for title in ("job", "name", "state", "nodes", "gen", "step", "spent"):
        assert title in head.split()
    for view, line in zip((waits, other), lines, strict=False):
        for word in (view.job, view.name, "training", "2/4", "3", "123456", usd(view.money.spent)):
            assert word in line.split()
    assert waits.reason in " ".join(text.split()), "and nothing of the reason is lost"
    assert ("no room here for owner, loss" in text) == ("loss" not in head.split()), "a column that goes is named"
    assert "…" not in text
    if width >= 80:
        assert max(len(line) for line in text.splitlines()) <= width
