"""Every class of bad input, with at least its number of cases."""

from __future__ import annotations

import pytest

from tests.security.site import Site
from tests.security.table import TABLE, Row


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.area}: {row.name}")
def test_class(site: Site, row: Row) -> None:
    site.put_back()
    labels = []
    for label, check in row.cases(site):
        try:
            check()
        except Exception as error:
            raise AssertionError(f"case {len(labels) + 1}, {label}: {type(error).__name__}: {error}") from error
        labels.append(label)
    assert len(labels) >= row.least
