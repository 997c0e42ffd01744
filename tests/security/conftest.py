"""One site for all cases, and the count that closes the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.site import Site
from tests.security.table import TABLE
from tests.security.tally import TALLY


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.classes or TALLY.bodies.sent:
        terminalreporter.write_line(TALLY.line())
        terminalreporter.write_line(TALLY.write(len(TABLE)))
