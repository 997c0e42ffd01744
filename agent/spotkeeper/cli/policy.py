"""``spotkeeper policy``: the rule that chooses machines, on standard input and output, for whoever judges it.

One JSON object a line (``spec.policy``). A line that makes no sense ends nothing: where it was a tick, the answer is
what is safe anywhere (go on, else on-demand), and what was wrong goes to standard error. A start that makes no sense
leaves no case: its ticks are not answered from what is known of the one before.
"""

from __future__ import annotations

import re
import sys
from typing import BinaryIO, TextIO, cast

import msgspec

from spotkeeper.reconcile.select_play import Player
from spotkeeper.spec import codec
from spotkeeper.spec.policy import KEEP, ON_DEMAND, PROTOCOL, Answer, Bye, End, Hello, Message, Ready, Start, Tick

NAME = "spotkeeper"
MESSAGE = cast(type[Message], Message)  # a union of structs, which msgspec takes for a type
SAFE = Answer((KEEP, ON_DEMAND))
KIND = re.compile(rb'"type"\s*:\s*"(\w+)"')  # of a line that is no message; what it says first counts


def serve(lines: BinaryIO, answers: BinaryIO, errors: TextIO = sys.stderr) -> None:
    """Answer until ``bye``, or the end of the input."""
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
    """What does not fit the case shows as whatever was looked up, or reckoned, in vain."""
    if isinstance(error, AttributeError):
        return "no case has begun"
    return str(error) if isinstance(error, msgspec.DecodeError) else f"does not fit its case ({error})"


def _done(kind: bytes) -> str:
    if kind == b"tick":
        return "so the answer is to keep what runs, else on-demand"
    return "so its case is left out" if kind == b"start" else "so it is left out"


def _shown(line: bytes) -> str:
    return repr(line[:120])[1:] + ("..." if len(line) > 120 else "")


def _answer(player: Player, message: Message, errors: TextIO) -> Ready | Answer | None:
    match message:
        case Hello():
            if message.protocol != PROTOCOL:
                print(f"spotkeeper policy: protocol {message.protocol}: I speak {PROTOCOL}", file=errors, flush=True)
            return Ready(NAME)
        case Start():
            player.start(message)
        case Tick():
            return player.tick(message)
        case End():
            player.end(message)
    return None
