"""Tests a stack's channel: the function sends it a message, as it sends notifications."""

from __future__ import annotations

from msgspec import DecodeError, Struct

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import BODY, Target, call_of_function
from spotkeeper.contract import codec
from spotkeeper.contract.notification import ChannelState
from spotkeeper.contract.parse.problem import nearest
from spotkeeper.reconcile.store.store import Store

TIMEOUTS_S = (5.0, 30.0)  # to connect, and to answer


class _Answer(Struct, frozen=True):
    sent: bool
    why: str = ""


def send_test(target: Target, store: Store, name: str) -> tuple[ChannelState, str]:
    """Have the function send a test message. Returns the channel, and why the message was not sent, or "".

    Raises:
        CliError: no such channel, or the function was not reached or refused the caller.
    """
    import requests

    stack = target.state(store)
    channel = next((each for each in stack.channels if each.name == name), None)
    if channel is None:
        names = [each.name for each in stack.channels]
        near = nearest(name, names)
        known = f"did you mean {near}?" if near else f"it has {', '.join(names) or 'none'}"
        raise CliError(f"the stack {stack.stack} has no channel {name} ({known})", Exit.MISSING)
    url, headers = call_of_function(target, stack, f"/v1/channels/{name}/test")
    if not headers:
        raise CliError("the function cannot be called: its address or your login is missing", Exit.FAILED)
    try:
        answer = requests.post(url, headers=headers, data=BODY, timeout=TIMEOUTS_S)
    except requests.RequestException as error:
        raise CliError(f"the function was not reached: {type(error).__name__}", Exit.FAILED) from None
    if answer.status_code == 404:
        raise CliError(f"the function does not know the channel {name} yet", Exit.FAILED, target.up())
    try:
        found = codec.decode(answer.content, _Answer) if answer.ok else None
    except DecodeError:
        found = None
    if found is None:
        raise CliError(f"the function answers HTTP {answer.status_code}", Exit.FAILED, "see docs/troubleshooting.md")
    return channel, "" if found.sent else found.why or "no reason given"
