"""The stack file: what it may say, what it means together, and how it is read.

``pool`` and ``model`` are its fields, ``checks`` what must hold on any cloud, ``gcp`` and
``aws`` what each cloud asks for and fills in (``both``: in its own words), ``read`` the way from text to
checked settings. A provider finds most mistakes in the middle of an `up`, and some never; so all
that can be known offline is told at once, before anything is declared, each with its path, its value and the remedy.
Nothing here may call a cloud, read the environment, or import Pulumi.
"""

from infra.settings.model import (
    Agent,
    Alerts,
    Bucket,
    Budget,
    Endpoints,
    Fallback,
    Limits,
    Network,
    Reconcile,
    Settings,
)
from infra.settings.pool import Accelerator, BootDisk, DataDisk, Machine, OnDestroy, Placement, Pool
from infra.settings.read import NAMESPACE, from_config, parse

__all__ = [
    "NAMESPACE",
    "Accelerator",
    "Agent",
    "Alerts",
    "BootDisk",
    "Bucket",
    "Budget",
    "DataDisk",
    "Endpoints",
    "Fallback",
    "Limits",
    "Machine",
    "Network",
    "OnDestroy",
    "Placement",
    "Pool",
    "Reconcile",
    "Settings",
    "from_config",
    "parse",
]
