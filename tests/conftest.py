"""What closes a run of all tests, however many processes they ran in."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.security.tally import TALLY


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
