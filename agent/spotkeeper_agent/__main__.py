"""``python -m spotkeeper_agent``: runs the agent in the foreground. Its settings come from metadata, not arguments."""

from __future__ import annotations

from spotkeeper_agent.host.memory import use_one_arena  # before all other imports

# isort: split
import os
import signal
import sys
import threading
import time
import traceback

from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud import here
from spotkeeper_agent.cloud.metadata import RETRY_FLOOR_S, RETRY_S, Metadata, MetadataError
from spotkeeper_agent.cloud.notice import Instance
from spotkeeper_agent.core import settings
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import SettingsError
from spotkeeper_agent.host.systemd import has_units

SOFTWARE_ERROR = 70  # EX_SOFTWARE
CONFIG_ERROR = 78  # EX_CONFIG; systemd does not restart the unit after it


def main(argv: list[str]) -> int:
    if argv:
        print(f"unknown arguments {argv}: the agent takes none", file=sys.stderr)
        return 64
    use_one_arena()
    if has_units():
        os.umask(0o022)  # whatever the unit sets: jobs may write only files that the agent gives them
    log = Log()
    try:
        clock = settings.clock()
        log = Log(clock.now)
        metadata = here(clock)
        ours = settings.read(_instance(metadata, log), settings.root_from_env())
    except SettingsError as error:
        log("agent.settings", error=str(error))
        return CONFIG_ERROR
    from spotkeeper_agent.agent.agent import Agent

    # The shutdown script signals this process and waits for it.
    beneath.replace(ours.run, "agent.pid", f"{os.getpid()}\n".encode())
    log("agent.start", name=ours.name, uid=ours.uid, boot=ours.boot, zone=ours.zone)
    agent = Agent(ours, metadata, clock, log)
    threading.excepthook = lambda died: _exit_on_lost_thread(log, died)
    signal.signal(signal.SIGTERM, lambda *_: agent.terminate())
    signal.signal(signal.SIGINT, lambda *_: agent.terminate())
    code = agent.run()
    agent.succeed()  # does not return if a newer agent takes over
    return code


def _exit_on_lost_thread(log: Log, died: threading.ExceptHookArgs) -> None:
    """End the agent when one of its threads dies, so that systemd restarts it; the job continues."""
    trace = "".join(traceback.format_exception(died.exc_type, died.exc_value, died.exc_traceback))
    log("agent.thread.died", thread=died.thread.name if died.thread else "", trace=trace[-2000:])
    os._exit(SOFTWARE_ERROR)


def _instance(metadata: Metadata, log: Log) -> Instance:
    """Query the metadata server until it answers, because it can start after the agent."""
    clock = settings.clock()
    while True:
        try:
            return metadata.instance()
        except MetadataError as error:
            log.once(str(error), "metadata.trouble", error=str(error))
            time.sleep(max(RETRY_FLOOR_S, clock.real_s(RETRY_S)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
