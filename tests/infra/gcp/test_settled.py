"""The wait for fresh rights: once where it is made, again where they change, and never in an `up` without a change."""

from __future__ import annotations

from typing import Any

import pytest

from infra import shared
from infra.shared import SettledProvider
from tests.module_time import replace_time

PROPS: dict[str, Any] = {"rights": ["bd roles/storage.objectViewer"], "seconds": 120}


def test_settled_waits_only_after_new_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    replace_time(monkeypatch, shared, sleep=waited.append)
    provider = SettledProvider()
    made = provider.create(PROPS)
    assert (waited, made.id, made.outs) == ([120], "settled", PROPS)
    assert not provider.diff(made.id, PROPS, {**PROPS, "seconds": 90}).changes, "a patience is no right"
    more = {"rights": [*PROPS["rights"], "fn look"], "seconds": 60}
    change = provider.diff(made.id, PROPS, more)
    assert (change.changes, change.replaces, change.delete_before_replace) == (True, [], False)
    assert provider.update(made.id, PROPS, more).outs == more
    assert waited == [120, 60]
