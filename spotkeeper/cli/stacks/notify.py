"""``notify test``: sends a test message to one of the stack's channels."""

from __future__ import annotations

from msgspec import Struct

from spotkeeper.cli.output import emit
from spotkeeper.client import find_target
from spotkeeper.client.channels import send_test
from spotkeeper.client.errors import CliError, Exit


class ChannelTest(Struct, frozen=True):
    """The result of a test; ``why``: why the message was not sent."""

    channel: str
    kind: str
    sent: bool
    why: str = ""


def test(name: str, stack: str | None, *, as_json: bool) -> None:
    """Send the message and print how that went.

    Raises:
        CliError: the message was not sent; or as :func:`send_test`.
    """
    target = find_target(stack)
    channel, why = send_test(target, target.store(), name)
    result = ChannelTest(channel.name, channel.kind, not why, why)
    if not why or as_json:
        emit(result, as_json, f"sent a test message to {channel.name} ({channel.kind}): look for it there")
    if why:
        raise CliError(f"channel {channel.name}: {why}", Exit.FAILED, "docs/notifications.md explains the reasons")
