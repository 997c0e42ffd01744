"""``policy``: lets another program evaluate the policy that chooses machines, over standard input and output.

It reads and writes one JSON object per line (``contract.policy``). An invalid line goes to standard error and does not
end the command. An invalid ``tick`` gets the answer that is always safe: keep the machines that run; if none run, start
on-demand ones. A tick outside a case is invalid. An invalid ``start`` ends the current case, so that ticks of the new
case are not answered as ticks of the old one.
"""

from __future__ import annotations

import re
import sys
from typing import BinaryIO, TextIO, cast

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.policy import (
    KEEP,
    ON_DEMAND,
    PROTOCOL,
    Bye,
    End,
    Message,
    PolicyAnswer,
    PolicyHello,
    Ready,
    Start,
    Tick,
)
from spotkeeper.reconcile.select.player import Player

NAME = "spotkeeper"
MESSAGE = cast(type[Message], Message)  # a union of structs, which msgspec accepts as a type
SAFE = PolicyAnswer((KEEP, ON_DEMAND))
KIND = re.compile(rb'"type"\s*:\s*"(\w+)"')  # finds the type of an invalid line


def serve(lines: BinaryIO, answers: BinaryIO, errors: TextIO = sys.stderr) -> None:
    """Answer messages until ``bye`` or the end of the input."""
    player = Player()
    for number, line in enumerate(iter(lines.readline, b""), 1):
        if not line.strip():
            continue
        try:
            message = codec.decode(line, MESSAGE, strict=False)
            if isinstance(message, Bye):
                return
            answer = _answer(player, message, errors)
        except (msgspec.DecodeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
            kind = found[1] if (found := KIND.search(line)) else b""
            player = Player() if kind == b"start" else player
            answer = Ready(NAME) if kind == b"hello" else SAFE if kind == b"tick" else None
            print(f"spotkeeper policy: line {number}: {_wrong(error)}, {_done(kind)}: {_shown(line)}", file=errors)
            errors.flush()
        if answer is not None:
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()


def _wrong(error: Exception) -> str:
    if isinstance(error, AttributeError):
        return "no case has begun, send a valid `start` first"
    return str(error) if isinstance(error, msgspec.DecodeError) else f"does not fit this case's `start` ({error})"


def _done(kind: bytes) -> str:
    if kind == b"tick":
        return "so the answer is: keep what runs, else on-demand"
    return "so this case is skipped" if kind == b"start" else "so this line is skipped"


def _shown(line: bytes) -> str:
    return repr(line[:120])[1:] + ("..." if len(line) > 120 else "")


def _answer(player: Player, message: Message, errors: TextIO) -> Ready | PolicyAnswer | None:
    match message:
        case PolicyHello():
            if message.protocol != PROTOCOL:
                print(
                    f"spotkeeper policy: protocol {message.protocol} is not supported, want {PROTOCOL}",
                    file=errors,
                    flush=True,
                )
            return Ready(NAME)
        case Start():
            player.start(message)
        case Tick():
            return player.tick(message)
        case End():
            player.end(message)
    return None
