"""What closes a run of all tests, however many processes they ran in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.security.tally import TALLY

# Where the longest files are: begun first, they do not run alone at the end, when other processes have no file left.
LONG = ("lifecycle", "machine", "vm", "model", "sim", "train", "scale", "security")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes hands over what it has counted."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tally"] = TALLY.told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TALLY.add(getattr(node, "workeroutput", {}).get("tally"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.classes or TALLY.bodies.sent:
        from tests.security.table import TABLE

        terminalreporter.write_line(TALLY.line())
        terminalreporter.write_line(TALLY.write(len(TABLE)))


@pytest.fixture(autouse=True)
def _every_logger_speaks() -> None:
    """Libraries that set logging up, and tests of ours, may silence loggers for all that run after them here."""
    logging.disable(logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "spotkeeper" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            if name != "spotkeeper":
                logger.setLevel(logging.NOTSET)
