"""The frameworks are no part of the environment that all tests run in: ``make adapters`` has them."""

from __future__ import annotations

from importlib.util import find_spec

from tests.train import gangs

FRAMEWORKS = [name for name in ("lightning.pytorch", "transformers", "accelerate") if find_spec(name.partition(".")[0])]

if FRAMEWORKS:
    gangs.preload(*FRAMEWORKS)  # seconds, once, instead of in every worker
    gangs.LIMIT_S = 240.0  # and what they do at the start of a run takes a minute on a busy machine
