"""How a machine is bought: the one word that records, ledger and offers share."""

from __future__ import annotations

from enum import Enum


class Model(str, Enum):
    """How a machine is bought (the clouds say provisioning model)."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    STATIC = "static"
