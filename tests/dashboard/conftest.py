"""A stack in a bucket, without jobs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from spotkeeper.reconcile.store.store import Store, open_store
from tests.contract.samples import STACK


@pytest.fixture
def bucket(tmp_path: Path) -> tuple[Store, dict[str, str]]:
    """A bucket with a stack, and the variables of a shell that names it."""
    url = f"sqlite://{tmp_path}/bucket.sqlite"
    store = open_store(url)
    store.put("stack/pools.json", msgspec.json.encode(STACK))
    return store, {"SPOTKEEPER_STACK": STACK.stack, "SPOTKEEPER_BUCKET": url, "SPOTKEEPER_CLOCK": "0:0:1"}
