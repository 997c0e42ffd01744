"""Every class of bad input, with at least its number of cases."""

from __future__ import annotations

import pytest

from tests.security.site import Site
from tests.security.table import TABLE, Row
from tests.security.tally import TALLY


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.area}: {row.name}")
def test_each_class_of_bad_input_is_refused(site: Site, row: Row) -> None:
    site.put_back()
    name, labels = f"{row.area}: {row.name}", []
    TALLY.failed.append(name)
    for label, check in row.cases(site):
        try:
            check()
        except Exception as error:
            raise AssertionError(f"case {len(labels) + 1}, {label}: {type(error).__name__}: {error}") from error
        labels.append(label)
    assert len(labels) >= row.least
    TALLY.failed.remove(name)
    TALLY.classes[name] = len(labels)


def test_every_class_of_bad_input_is_tested() -> None:
    assert len({(row.area, row.name) for row in TABLE}) == len(TABLE) == 99
    assert len({row.area for row in TABLE}) == 10
    assert sum(row.least for row in TABLE) >= 2216
