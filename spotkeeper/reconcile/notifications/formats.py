"""The JSON that a channel of each kind receives. Pure.

Texts contain reasons that users wrote, such as who paused a job. So each kind gets them where its service interprets
nothing (Slack's ``plain_text``, Teams' ``TextRun``), or escaped; none of them can mention people or show a link.

Sources: https://api.slack.com/reference/block-kit, https://adaptivecards.io/explorer/TextRun.html,
https://discord.com/developers/docs/resources/webhook
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone

import msgspec

from spotkeeper.contract.notification import ChannelKind, Notification
from spotkeeper.reconcile.notifications.message import cost, subject

Json = dict[str, object]
VERSION = 1  # of the JSON for `webhook`; fields may be added without a new number
_DISCORD = re.compile(r"([\\*_~`|>#\[\]()<:@-])")
_DISCORD_LONGEST = 2000  # characters of a message
_NO_EMBEDS = 4  # Discord's flag against previews of links


def body(kind: ChannelKind, notification: Notification) -> bytes:
    """Return the request's body."""
    return msgspec.json.encode(_KINDS[kind](notification))


def _slack(notification: Notification) -> Json:
    line = f"{subject(notification)} {notification.text}"
    blocks: list[Json] = [{"type": "section", "text": _plain(line)}]
    if notification.todo:
        blocks.append({"type": "section", "text": _plain(notification.todo)})
    blocks.append({"type": "context", "elements": [_plain(_small(notification))]})
    escaped = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": escaped, "blocks": blocks, "unfurl_links": False, "unfurl_media": False}


def _plain(text: str) -> Json:
    return {"type": "plain_text", "text": text, "emoji": False}


def _teams(notification: Notification) -> Json:
    cards: list[Json] = [
        _run(f"{subject(notification)} {notification.text}", weight="Bolder"),
        *([_run(notification.todo)] if notification.todo else []),
        _run(_small(notification), size="Small", isSubtle=True),
    ]
    card: Json = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": cards,
        "msteams": {"width": "Full"},
    }
    adaptive = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": adaptive, "contentUrl": None, "content": card}]}


def _run(text: str, **style: object) -> Json:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}


def _discord(notification: Notification) -> Json:
    lines = [f"**{_escaped(subject(notification))}** {_escaped(notification.text)}"]
    lines += [_escaped(notification.todo)] if notification.todo else []
    content = "\n".join([*lines, _escaped(_small(notification))])
    return {
        "content": content[:_DISCORD_LONGEST],
        "allowed_mentions": {"parse": []},
        "flags": _NO_EMBEDS,
        "username": "Spotkeeper",
    }


def _escaped(text: str) -> str:
    return _DISCORD.sub(r"\\\1", text)


def _webhook(notification: Notification) -> Json:
    found = notification
    return {
        "version": VERSION,
        "id": found.id,
        "event": found.events[0].value if found.events else "test",
        "at": f"{_moment(found.at):%Y-%m-%dT%H:%M:%SZ}",
        "stack": found.stack,
        "job": {"id": found.job, "name": found.name} if found.job else None,
        "text": f"{subject(found)} {found.text}",
        "todo": found.todo,
        "cost": {"spent_usd": found.spent_usd, "usd_per_hour": found.usd_per_hour},
    }


def _small(notification: Notification) -> str:
    """Return the last line: cost, stack, time, and the id by which people recognise a duplicate."""
    at = f"{_moment(notification.at):%Y-%m-%d %H:%M UTC}"
    return " ".join(filter(None, (cost(notification), f"Stack {notification.stack}, {at}, event {notification.id}")))


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.utc)


_KINDS: dict[ChannelKind, Callable[[Notification], Json]] = {
    "slack": _slack,
    "teams": _teams,
    "discord": _discord,
    "webhook": _webhook,
}
