"""``python -m spotkeeper.vm``: the agent, in the foreground. It takes no arguments: metadata says all."""

from __future__ import annotations

import os
import signal
import sys
import time

from spotkeeper.vm import settings
from spotkeeper.vm.log import Log
from spotkeeper.vm.memory import frugal
from spotkeeper.vm.metadata import RETRY_FLOOR_S, RETRY_S, Instance, Metadata, MetadataError
from spotkeeper.vm.settings import SettingsError

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
        metadata = Metadata(clock)
        ours = settings.read(_instance(metadata, log), settings.root_from_env())
    except SettingsError as error:
        log("agent.settings", error=str(error))
        return CONFIG_ERROR
    from spotkeeper.vm.agent import Agent

    # The shutdown script asks this process to stop, and waits for it.
    (ours.run / "agent.pid").write_text(f"{os.getpid()}\n")
    log("agent.start", name=ours.name, uid=ours.uid, boot=ours.boot, zone=ours.zone)
    agent = Agent(ours, metadata, clock, log)
    signal.signal(signal.SIGTERM, lambda *_: agent.terminate())
    signal.signal(signal.SIGINT, lambda *_: agent.terminate())
    return agent.run()


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
