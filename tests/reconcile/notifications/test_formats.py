"""What each kind of channel receives; texts from users are shown and never interpreted."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest

from spotkeeper.contract.notification import ChannelKind, Notification
from spotkeeper.reconcile.notifications.formats import body
from tests.reconcile.notifications.samples import notification

EVIL = "<!channel> @everyone [x](https://evil.test) **b** `c` <https://evil.test|y> &amp; _d_ # e https://evil.test"
KINDS: tuple[ChannelKind, ...] = get_args(ChannelKind)
EVENT = "event abcd2345.hold.v1"
COST = "Cost so far: about $12.35; its machines cost $3.21/h now."


def made(kind: ChannelKind, of: Notification) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body(kind, of))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_happened_its_cost_what_to_do_and_the_id(kind: ChannelKind) -> None:
    said = body(kind, notification()).decode().replace("\\\\", "")
    for text in ("is on hold", "digits", "spotkeeper resume digits", "abcd2345.hold.v1", "12.3", "demo"):
        assert text in said


def test_slack_interprets_nothing() -> None:
    found = made("slack", notification(text=f"is on hold: {EVIL}."))
    assert [block["type"] for block in found["blocks"]] == ["section", "section", "context"]
    assert {block["text"]["type"] for block in found["blocks"][:2]} == {"plain_text"}
    assert {part["type"] for part in found["blocks"][2]["elements"]} == {"plain_text"}
    assert found["blocks"][0]["text"]["text"] == f"Job digits is on hold: {EVIL}."
    assert found["blocks"][2]["elements"][0]["text"].startswith(COST)
    assert "<" not in found["text"] and ">" not in found["text"]
    assert "&lt;!channel&gt;" in found["text"] and "&amp;amp;" in found["text"]
    assert found["unfurl_links"] is False


def test_slacks_texts_fit() -> None:
    found = made("slack", notification(text="x" * 600, todo="y" * 600))
    assert all(len(block["text"]["text"]) <= 3000 for block in found["blocks"][:2])
    assert len(found["blocks"][2]["elements"][0]["text"]) <= 2000


def test_teams_interprets_nothing() -> None:
    found = made("teams", notification(text=f"is on hold: {EVIL}."))
    (attachment,) = found["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    card = attachment["content"]
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    assert {part["type"] for part in card["body"]} == {"RichTextBlock"}, "a TextBlock would interpret Markdown"
    runs = [run for part in card["body"] for run in part["inlines"]]
    assert {run["type"] for run in runs} == {"TextRun"}
    assert runs[0]["text"] == f"Job digits is on hold: {EVIL}."
    assert runs[-1]["text"].startswith(COST) and runs[-1]["text"].endswith(EVENT)


def test_discord_mentions_nobody_and_formats_nothing() -> None:
    found = made("discord", notification(text=f"is on hold: {EVIL}."))
    assert found["allowed_mentions"] == {"parse": []}
    assert found["flags"] == 4, "no previews of links"
    line = found["content"].splitlines()[0]
    assert line.startswith("**Job digits** is on hold\\: \\<!channel\\> \\@everyone \\[x\\]\\(https\\://evil.test\\)")
    assert not re.search(r"(?<!\\)[_`|~\[\]()<>@#]", found["content"].replace("**Job digits**", ""))


def test_discords_content_fits() -> None:
    assert len(made("discord", notification(text="*" * 600, todo="_" * 600))["content"]) <= 2000


def test_the_webhooks_schema_is_the_documented_one() -> None:
    assert made("webhook", notification()) == {
        "version": 1,
        "id": "abcd2345.hold.v1",
        "event": "hold",
        "at": "2026-11-24T09:14:05Z",
        "stack": "demo",
        "job": {"id": "abcd2345", "name": "digits"},
        "text": "Job digits is on hold.",
        "todo": "To continue: spotkeeper resume digits",
        "cost": {"spent_usd": 12.3456, "usd_per_hour": 3.21},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_test_message_has_no_job(kind: ChannelKind) -> None:
    test = Notification("test.0123", (), 1_795_511_645.0, "demo", "", "", "can send to the channel ml-team.")
    found = made(kind, test)
    assert "can send to the channel" in json.dumps(found)
    if kind == "webhook":
        assert (found["event"], found["job"]) == ("test", None)
        assert found["cost"] == {"spent_usd": None, "usd_per_hour": None}
