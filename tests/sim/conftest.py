"""Logs are off: the function dies thousands of times here, and each time a traceback would be formatted."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _silent(_every_logger_speaks: None) -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
