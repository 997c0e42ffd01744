"""What the clouds offer, as data: zones of regions, and list prices of machine types.

Zones decide whether a stack file is right; prices are starting values for choosing an
offer and for the ledger, overridden per pool and zone by ``prices:`` in the stack file.
Nothing here may call a cloud: a program that asks shows a diff whenever the answer moves.
"""

from __future__ import annotations

from spotkeeper.spec.stack import Price

# Letters of the zones of each Compute Engine region; a region that opens is one line more.
_ABC = "abc"
GCP_ZONES: dict[str, str] = {
    "africa-south1": _ABC,
    "asia-east1": _ABC,
    "asia-east2": _ABC,
    "asia-northeast1": _ABC,
    "asia-northeast2": _ABC,
    "asia-northeast3": _ABC,
    "asia-south1": _ABC,
    "asia-south2": _ABC,
    "asia-southeast1": _ABC,
    "asia-southeast2": _ABC,
    "australia-southeast1": _ABC,
    "australia-southeast2": _ABC,
    "europe-central2": _ABC,
    "europe-north1": _ABC,
    "europe-north2": _ABC,
    "europe-southwest1": _ABC,
    "europe-west1": "bcd",
    "europe-west2": _ABC,
    "europe-west3": _ABC,
    "europe-west4": _ABC,
    "europe-west6": _ABC,
    "europe-west8": _ABC,
    "europe-west9": _ABC,
    "europe-west10": _ABC,
    "europe-west12": _ABC,
    "me-central1": _ABC,
    "me-central2": _ABC,
    "me-west1": _ABC,
    "northamerica-northeast1": _ABC,
    "northamerica-northeast2": _ABC,
    "northamerica-south1": _ABC,
    "southamerica-east1": _ABC,
    "southamerica-west1": _ABC,
    "us-central1": "abcf",
    "us-east1": "bcd",
    "us-east4": _ABC,
    "us-east5": _ABC,
    "us-south1": _ABC,
    "us-west1": _ABC,
    "us-west2": _ABC,
    "us-west3": _ABC,
    "us-west4": _ABC,
}


def zones_of(region: str) -> tuple[str, ...]:
    """Full names of a region's zones; empty for a region that is not in the table."""
    return tuple(f"{region}-{letter}" for letter in GCP_ZONES.get(region, ""))


# USD per machine-hour, rounded list prices of us-central1 (accelerators of the type included).
# They differ between regions and change: correct them with `prices:` where it matters.
GCP_PRICES: dict[str, Price] = {
    "e2-standard-2": Price(on_demand=0.067, spot=0.027),
    "e2-standard-4": Price(on_demand=0.134, spot=0.054),
    "e2-standard-8": Price(on_demand=0.268, spot=0.107),
    "n1-standard-4": Price(on_demand=0.190, spot=0.042),
    "n1-standard-8": Price(on_demand=0.380, spot=0.084),
    "n1-standard-16": Price(on_demand=0.760, spot=0.168),
    "n2-standard-4": Price(on_demand=0.194, spot=0.049),
    "n2-standard-8": Price(on_demand=0.388, spot=0.098),
    "n2-standard-16": Price(on_demand=0.777, spot=0.196),
    "c3-standard-8": Price(on_demand=0.402, spot=0.146),
    "c3-standard-22": Price(on_demand=1.106, spot=0.401),
    "g2-standard-4": Price(on_demand=0.707, spot=0.283),
    "g2-standard-8": Price(on_demand=0.854, spot=0.342),
    "g2-standard-12": Price(on_demand=1.000, spot=0.400),
    "g2-standard-24": Price(on_demand=2.000, spot=0.800),
    "g2-standard-48": Price(on_demand=4.000, spot=1.600),
    "a2-highgpu-1g": Price(on_demand=3.673, spot=1.469),
    "a2-highgpu-2g": Price(on_demand=7.347, spot=2.939),
    "a2-highgpu-4g": Price(on_demand=14.694, spot=5.878),
    "a2-highgpu-8g": Price(on_demand=29.387, spot=11.755),
    "a2-ultragpu-1g": Price(on_demand=5.069, spot=2.534),
    "a2-ultragpu-8g": Price(on_demand=40.550, spot=20.275),
    "a3-highgpu-1g": Price(on_demand=11.061, spot=4.424),
    "a3-highgpu-8g": Price(on_demand=88.250, spot=35.300),
}

# USD per accelerator-hour, added to the price of types that take them separately (N1).
GCP_ACCELERATOR_PRICES: dict[str, Price] = {
    "nvidia-tesla-t4": Price(on_demand=0.350, spot=0.140),
    "nvidia-tesla-p100": Price(on_demand=1.460, spot=0.584),
    "nvidia-tesla-v100": Price(on_demand=2.480, spot=0.992),
}

# USD per GB-month of a data disk, rounded list prices of us-central1; provisioned IOPS and throughput are not in them.
GCP_DISK_PRICES: dict[str, float] = {
    "pd-standard": 0.040,
    "pd-balanced": 0.100,
    "pd-ssd": 0.170,
    "hyperdisk-balanced": 0.080,
}

# Machine types that bring their accelerators: the family's accelerator, and how many.
GCP_BUILT_IN: dict[str, tuple[str, int]] = {
    "g2-standard-4": ("nvidia-l4", 1),
    "g2-standard-8": ("nvidia-l4", 1),
    "g2-standard-12": ("nvidia-l4", 1),
    "g2-standard-24": ("nvidia-l4", 2),
    "g2-standard-48": ("nvidia-l4", 4),
    "a2-highgpu-1g": ("nvidia-tesla-a100", 1),
    "a2-highgpu-2g": ("nvidia-tesla-a100", 2),
    "a2-highgpu-4g": ("nvidia-tesla-a100", 4),
    "a2-highgpu-8g": ("nvidia-tesla-a100", 8),
    "a2-ultragpu-1g": ("nvidia-a100-80gb", 1),
    "a2-ultragpu-8g": ("nvidia-a100-80gb", 8),
    "a3-highgpu-1g": ("nvidia-h100-80gb", 1),
    "a3-highgpu-8g": ("nvidia-h100-80gb", 8),
}


def list_price(machine_type: str, accelerator: str | None, count: int) -> Price | None:
    """The table's price of a machine with its accelerators, or None where a part is not in it."""
    base = GCP_PRICES.get(machine_type)
    if base is None or accelerator is None or machine_type in GCP_BUILT_IN:
        return base
    extra = GCP_ACCELERATOR_PRICES.get(accelerator)
    if extra is None or base.spot is None or extra.spot is None:
        return None
    return Price(
        on_demand=round(base.on_demand + count * extra.on_demand, 4), spot=round(base.spot + count * extra.spot, 4)
    )
