"""The benchmark of lost steps counts each loss against the spacing at its own kill."""

from __future__ import annotations

import pytest

from bench.train import loss
from bench.train.loss import Kill


def test_a_loss_counts_against_the_spacing_at_its_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest loss is 1.2 of its spacing; a smaller one, with images closer together, is 2.5."""
    kills = [Kill.of(100, 40, [1, 3, 20, 70], 0.1), Kill.of(30, 20, [1, 8, 16, 20], 0.1)]
    assert [(kill.lost, kill.spacing) for kill in kills] == [(60, 50), (10, 4)]
    monkeypatch.setattr(loss, "measure", lambda *_: kills)
    (figure,) = loss.figures()
    assert (figure["value"], figure["holds"]) == (2.5, False)
    assert "60 steps, 6.0 s of training (median 35 steps); an image every 4 to 50 steps" in str(figure["against"])
