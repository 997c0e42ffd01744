"""Without an agent, signals are how a run is asked to stop: a laptop's Ctrl-C, another scheduler's SIGTERM.

Only a wish is left in the control file, as an agent would; never a save in a handler.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType

from spotkeeper.train.control import Control, Want
from spotkeeper.train.writer import say


def stop_on_signals(control: Control) -> None:
    """Without an agent, SIGTERM and Ctrl-C save and stop; a second Ctrl-C interrupts."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and control.want is Want.SAVE_STOP:
            signal.default_int_handler(number, frame)
        if control.want is not Want.SAVE_STOP:
            say(f"{signal.Signals(number).name}: saving and stopping after this step")
            control.request(Want.SAVE_STOP)

    for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is default:
            with contextlib.suppress(ValueError):
                signal.signal(number, handle)
