"""Pages show what `status` and `report` print, to the cent, and nothing that a job wrote becomes markup."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import msgspec
import pytest

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import Model
from spotkeeper.report.html import job, jobs, svg
from spotkeeper.report.html.markup import Markup, el, escape, table
from spotkeeper.report.html.page import job_file
from spotkeeper.report.html.style import DARK, LIGHT
from spotkeeper.report.job.lines import matches
from spotkeeper.report.job.metrics import MetricColumns
from spotkeeper.report.job.timeline import timeline
from spotkeeper.report.job.view import JobView, NodeState, NodeView, Site, job_view
from spotkeeper.report.money.account import account
from spotkeeper.report.money.money import over_time
from spotkeeper.report.text.words import usd
from tests.contract.samples import STACK
from tests.report.ledgers import HOUR, NOTICED, a_record, entry

NOW = 2 * HOUR + 31
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x1b[31m\u202e"


class Tags(HTMLParser):
    """All elements of a document with their attributes, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def parsed(document: str) -> Tags:
    tags = Tags()
    tags.feed(document)
    return tags


def a_view(**over: object) -> JobView:
    view = job_view(a_record(phase=Phase.DONE), None, NOTICED, STACK, NOW)
    return msgspec.structs.replace(view, **over)


def test_text_and_attributes_are_escaped() -> None:
    said = el("a", EVIL, title=EVIL, href="/x", aria_label="two", hidden=True, id=None)
    (tag, attributes), *more = parsed(said).found
    assert (tag, more) == ("a", [])
    clean = EVIL.replace("\x1b", "").replace("\u202e", "")
    assert attributes == {"title": clean, "href": "/x", "aria-label": "two", "hidden": None}
    assert html.unescape(escape(EVIL)) == clean and escape(Markup("<b>")) == "<b>"


def cells(made: str) -> list[dict[str, str | None]]:
    return [attributes for tag, attributes in parsed(made).found if tag == "td"]


def test_a_table_names_each_cell_for_narrow_screens_and_itself_for_screen_readers() -> None:
    made = table(("a", "b"), [("1", None)], "What it is", (1,))
    assert cells(made)[0]["data-label"] == "a" and cells(made)[1]["class"] == "none right"
    assert "What it is" in parsed(made).text and [t for t, _ in parsed(made).found].count("th") == 2
    long = cells(table(("a", "b"), [("sk-prod-abcdefgh-n0000-a1", el("b", "short"))], "Long"))
    assert [cell.get("class") for cell in long] == ["long", None], "a line of its own on a narrow screen"
    assert cells(table(("a",), [("-",)], "No value"))[0]["class"] == "none", "not shown there"
    log = cells(table(("when", "what"), [("1", "2")], "Log", log=True))
    assert [cell.get("class") for cell in log] == [None, "long"]
    assert table(("a",), [], "x", empty="Nothing.") == '<p class="dim">Nothing.</p>'


@pytest.mark.parametrize("pools", [("workers", "workers"), ("workers", "floor")])
def test_only_the_age_of_a_machine_is_aligned_like_a_number(pools: tuple[str, str]) -> None:
    """With and without the column of pools."""
    nodes = tuple(NodeView(node=at, state=NodeState.TRAINING, age_s=60.0, pool=pool) for at, pool in enumerate(pools))
    shown = job.machines(a_view(nodes=nodes))
    assert re.findall(r'<th scope="col" class="right">([^<]*)', shown) == ["Age"]
    assert re.findall(r'<td data-label="([^"]*)" class="right"', shown) == ["Age", "Age"]


def test_numbers_of_nodes_are_names_and_aligned_like_words() -> None:
    shown = job.recoveries(account(a_view(), NOTICED, NOW))
    left = re.findall(r'<th scope="col">([^<]*)', shown)
    assert left == ["Cause", "Announced", "Nodes", "Replaced by"] and "Took</th>" in shown


def test_nothing_that_a_job_wrote_becomes_markup() -> None:
    node = NodeView(0, NodeState.TRAINING, zone=EVIL, pool=EVIL, model=Model.SPOT, vm=EVIL, lag=EVIL)
    lines = a_view().events
    view = a_view(
        name=EVIL,
        user=EVIL,
        reason=EVIL,
        nodes=(node,),
        warnings=(EVIL,),
        failed=(EVIL,),
        crash_log=(EVIL,),
        phase=Phase.RUN,
        outcome=None,
        events=tuple(msgspec.structs.replace(line, text=EVIL, detail=EVIL) for line in lines),
    )
    ledger = (*NOTICED, entry(Event.LOSS, NOW - 1, 0, 2, cause=EVIL))
    document = job_file(view, account(view, ledger, NOW), ledger, STACK, NOW, job_yaml=EVIL)
    for made in (parsed(document), parsed(jobs.row(view, [(1, 2.0, 3.0)] * 4))):
        names = {tag for tag, _ in made.found}
        assert not names & {"script", "img", "iframe", "object", "link", "form"}
        assert not [name for _, attributes in made.found for name in attributes if name.startswith("on")]
        assert "\x1b" not in made.text and "\u202e" not in made.text


def test_events_have_the_time_by_which_logs_can_be_read() -> None:
    text = parsed(job.events(a_view(), created=1795530038.0)).text
    assert "Time (UTC)" in text and "11-24 14:20:38" in text


def test_the_owner_and_the_clock_are_two_statements() -> None:
    view = a_view(user="ada", site=Site(scale=20.0))
    text = parsed(job.figures(view, account(view, NOTICED, NOW))).text
    assert "by ada; on the cloud's clock, 20x" in text


def test_the_file_fetches_nothing_and_runs_nothing() -> None:
    view = a_view()
    document = job_file(view, account(view, NOTICED, NOW), NOTICED, STACK, NOW, job_yaml="name: first\n")
    made = parsed(document)
    addresses = [attributes[name] for _, attributes in made.found for name in ("src", "href") if name in attributes]
    assert addresses == [] and "url(http" not in document and "@import" not in document
    policy = next(a["content"] for tag, a in made.found if tag == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert len(document) < 200_000


def test_the_file_draws_the_metrics() -> None:
    view = a_view()
    curve = MetricColumns([1, 2, 3], [0.0, 1.0, 2.0], [2.0, float("nan"), 1.0])
    drawn = job_file(view, account(view, NOTICED, NOW), NOTICED, STACK, NOW, metrics={"eval/loss": curve})
    assert "Eval/loss" in parsed(drawn).text and ">step</text>" in drawn and "nan" not in drawn.lower()
    few = {"once": MetricColumns([1], [0.0], [2.0]), "never": MetricColumns([1, 2], [0.0, 1.0], [float("inf"), 1.0])}
    drawn = job_file(view, account(view, NOTICED, NOW), NOTICED, STACK, NOW, metrics={"eval/loss": curve} | few)
    assert "Too few values for a chart: once, never." in parsed(drawn).text
    assert "Not enough points" not in drawn and "<h2>Once</h2>" not in drawn


def test_amounts_are_those_of_status_and_report() -> None:
    view = a_view()
    found = account(view, NOTICED, NOW)
    figures = parsed(job.figures(view, found)).text
    assert usd(view.money.spent) in figures and usd(view.money.on_demand_only) in figures
    assert usd(view.money.saved) in figures
    row = parsed(jobs.row(view)).text
    assert usd(view.money.spent) in row
    machines = parsed(job.all_machines(found)).text
    assert all(usd(line.usd) in machines for line in found.attempts)
    assert abs(sum(line.usd for line in found.attempts) - view.money.spent) < 1e-9
    assert abs(over_time(NOTICED, STACK, NOW)[-1][1] - view.money.spent) < 1e-9


def test_small_charts_are_drawn_over_steps() -> None:
    """A dashboard that nobody looked at for an hour has many points of the begin and few later ones."""
    samples = ((20, 4.0, None), (30, 3.0, None), (120, 2.0, None))
    assert 'points="0.0,2.0 10.0,12.0 100.0,22.0"' in jobs.row(a_view(loss=2.0), samples)


@pytest.mark.parametrize(
    ("words", "found"),
    [("", True), ("FIRST spot", True), ("us-central1-a ada", True), ("first aws", False), ("x", False)],
)
def test_a_search_matches_every_word(words: str, found: bool) -> None:
    assert matches(a_view(user="ada"), words) is found


def test_a_timeline_draws_every_bar_and_mark() -> None:
    view = timeline(NOTICED, NOW)
    drawn = svg.timeline(view)
    assert drawn.count("<rect") >= len(view.bars)
    for bar in view.bars:
        assert html.escape(svg.bar_text(bar)) in drawn
    assert "notice" in drawn and "promoted" in drawn


def test_lines_have_round_marks() -> None:
    drawn = parsed(svg.lines("Money", [("spent", "spot", [(0.0, 0.0), (3600.0, 318.8)])], unit="$", on_time=True))
    assert re.findall(r"\$[\d.,]+", drawn.text) == ["$0", "$100", "$200", "$300", "$400"]
    assert "Not enough points" in svg.lines("x", [("x", "spot", [(0.0, 1.0)])])
    assert "Not enough points" in svg.lines("x", [("x", "spot", [(0.0, float("nan")), (1.0, float("inf"))])])


def _luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "dim", "link", "good", "warn", "bad"])
def test_text_has_enough_contrast(theme: dict[str, str], name: str) -> None:
    for ground in (theme["card"], theme["ground"]):
        light, dark = sorted((_luminance(theme[name]), _luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize(
    "values", [(-1.7e308, 1.7e308), (0.0, 5e-324), (1.7e308, 1.7e308), (5e-324, 5e-324), (-1e299, 1e299)]
)
def test_values_at_the_ends_of_floats_are_drawn_or_left_out(values: tuple[float, float]) -> None:
    drawn = svg.lines("x", [("x", "spot", [(0.0, values[0]), (1.0, values[1]), (2.0, 1.0)])])
    assert "<polyline" in drawn and "nan" not in drawn and "inf" not in drawn
    svg.lines("x", [("x", "spot", [(0.0, values[0]), (1.0, values[1])])])


def test_a_replacement_that_takes_over_in_the_second_of_a_loss_does_not_cover_it() -> None:
    ledger = (*NOTICED, *(entry(event, NOW - 1, 0, 2) for event in (Event.LOSS, Event.PROMOTED)))
    drawn = str(svg.timeline(timeline(ledger, NOW)))
    ((x, top),) = re.findall(r'd="M([\d.]+) ([\d.]+)L[^"]*" stroke="var\(--bad\)"', drawn)
    (middle,) = re.findall(rf'cx="{float(x) + 5:g}" cy="([\d.]+)"', drawn)
    assert float(top) + 10 < float(middle), "the cross ends above the circle's middle"
