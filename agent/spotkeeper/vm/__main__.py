"""``python -m spotkeeper.vm``: the agent, in the foreground. It takes no arguments: metadata says all."""

from __future__ import annotations

from spotkeeper.vm import light  # noqa: F401 - first of all

# isort: split
import os
import signal
import sys
import threading
import time
import traceback

from spotkeeper.vm import settings
from spotkeeper.vm.log import Log
from spotkeeper.vm.memory import frugal
from spotkeeper.vm.metadata import RETRY_FLOOR_S, RETRY_S, Instance, Metadata, MetadataError, here
from spotkeeper.vm.settings import SettingsError

SOFTWARE_ERROR = 70  # EX_SOFTWARE
CONFIG_ERROR = 78  # EX_CONFIG; the unit does not restart after it


def main(argv: list[str]) -> int:
    if argv:
        print(f"{argv}: unknown; the agent takes no arguments", file=sys.stderr)
        return 64
    frugal()
    log = Log()
    try:
        clock = settings.clock()
        log = Log(clock.now)
        metadata = here(clock)
        ours = settings.read(_instance(metadata, log), settings.root_from_env())
    except SettingsError as error:
        log("agent.settings", error=str(error))
        return CONFIG_ERROR
    from spotkeeper.vm.agent import Agent

    # The shutdown script asks this process to stop, and waits for it.
    (ours.run / "agent.pid").write_text(f"{os.getpid()}\n")
    log("agent.start", name=ours.name, uid=ours.uid, boot=ours.boot, zone=ours.zone)
    agent = Agent(ours, metadata, clock, log)
    threading.excepthook = lambda died: _fall(log, died)
    signal.signal(signal.SIGTERM, lambda *_: agent.terminate())
    signal.signal(signal.SIGINT, lambda *_: agent.terminate())
    code = agent.run()
    agent.succeed()  # does not return where another agent is to follow
    return code


def _fall(log: Log, died: threading.ExceptHookArgs) -> None:
    """An agent that has lost a thread would look alive and be deaf: end it, and be started anew. The job goes on."""
    trace = "".join(traceback.format_exception(died.exc_type, died.exc_value, died.exc_traceback))
    log("agent.thread.died", thread=died.thread.name if died.thread else "", trace=trace[-2000:])
    os._exit(SOFTWARE_ERROR)


def _instance(metadata: Metadata, log: Log) -> Instance:
    """The metadata server may come up after us: ask until it answers."""
    clock = settings.clock()
    while True:
        try:
            return metadata.instance()
        except MetadataError as error:
            log.once(str(error), "metadata.trouble", error=str(error))
            time.sleep(max(RETRY_FLOOR_S, clock.real_s(RETRY_S)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
