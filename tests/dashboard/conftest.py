"""A stack in a bucket, without jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from spotkeeper.reconcile.store.store import Store, open_store
from tests.contract.samples import STACK

T = TypeVar("T")


def complete(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end, and leave the thread as it was: Pulumi's tests need a loop after it.

    A wait that never ends fails after two minutes, with the line that waits.
    """

    async def bounded() -> T:
        async with asyncio.timeout(120):
            return await work

    try:
        return asyncio.run(bounded())
    finally:
        asyncio.set_event_loop_policy(None)


def a_bucket(folder: Path) -> tuple[Store, dict[str, str]]:
    """A bucket with a stack, and the variables of a shell that names it."""
    url = f"sqlite://{folder}/bucket.sqlite"
    store = open_store(url)
    store.put("stack/pools.json", msgspec.json.encode(STACK))
    return store, {"SPOTKEEPER_STACK": STACK.stack, "SPOTKEEPER_BUCKET": url, "SPOTKEEPER_CLOCK": "0:0:1"}


@pytest.fixture
def bucket(tmp_path: Path) -> tuple[Store, dict[str, str]]:
    return a_bucket(tmp_path)
