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


# Letters of the availability zones of each EC2 region, as accounts see them.
AWS_ZONES: dict[str, str] = {
    "af-south-1": _ABC,
    "ap-east-1": _ABC,
    "ap-northeast-1": "acd",
    "ap-northeast-2": "abcd",
    "ap-northeast-3": _ABC,
    "ap-south-1": _ABC,
    "ap-south-2": _ABC,
    "ap-southeast-1": _ABC,
    "ap-southeast-2": _ABC,
    "ap-southeast-3": _ABC,
    "ap-southeast-4": _ABC,
    "ca-central-1": "abd",
    "ca-west-1": _ABC,
    "eu-central-1": _ABC,
    "eu-central-2": _ABC,
    "eu-north-1": _ABC,
    "eu-south-1": _ABC,
    "eu-south-2": _ABC,
    "eu-west-1": _ABC,
    "eu-west-2": _ABC,
    "eu-west-3": _ABC,
    "il-central-1": _ABC,
    "me-central-1": _ABC,
    "me-south-1": _ABC,
    "sa-east-1": _ABC,
    "us-east-1": "abcdef",
    "us-east-2": _ABC,
    "us-west-1": "abc",
    "us-west-2": "abcd",
}


def zones_of(region: str) -> tuple[str, ...]:
    """Full names of a region's zones (us-central1-a, us-east-1a); empty for a region that is in neither table."""
    if region in AWS_ZONES:
        return tuple(f"{region}{letter}" for letter in AWS_ZONES[region])
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

# USD per machine-hour, rounded list prices of us-east-1; spot prices move, these are what one may begin with.
AWS_PRICES: dict[str, Price] = {
    "t3.medium": Price(on_demand=0.042, spot=0.017),
    "t3.large": Price(on_demand=0.083, spot=0.033),
    "m7i.large": Price(on_demand=0.101, spot=0.040),
    "m7i.xlarge": Price(on_demand=0.202, spot=0.081),
    "m7i.2xlarge": Price(on_demand=0.403, spot=0.161),
    "m7g.xlarge": Price(on_demand=0.163, spot=0.065),
    "c7i.xlarge": Price(on_demand=0.179, spot=0.071),
    "c7i.2xlarge": Price(on_demand=0.357, spot=0.143),
    "c7i.4xlarge": Price(on_demand=0.714, spot=0.286),
    "c7g.xlarge": Price(on_demand=0.145, spot=0.058),
    "g4dn.xlarge": Price(on_demand=0.526, spot=0.210),
    "g4dn.2xlarge": Price(on_demand=0.752, spot=0.301),
    "g4dn.12xlarge": Price(on_demand=3.912, spot=1.565),
    "g5.xlarge": Price(on_demand=1.006, spot=0.403),
    "g5.2xlarge": Price(on_demand=1.212, spot=0.485),
    "g5.4xlarge": Price(on_demand=1.624, spot=0.650),
    "g5.8xlarge": Price(on_demand=2.448, spot=0.979),
    "g5.12xlarge": Price(on_demand=5.672, spot=2.269),
    "g5.24xlarge": Price(on_demand=8.144, spot=3.258),
    "g5.48xlarge": Price(on_demand=16.288, spot=6.515),
    "g6.xlarge": Price(on_demand=0.805, spot=0.322),
    "g6.2xlarge": Price(on_demand=0.978, spot=0.391),
    "g6.4xlarge": Price(on_demand=1.323, spot=0.529),
    "g6.8xlarge": Price(on_demand=2.014, spot=0.806),
    "g6.12xlarge": Price(on_demand=4.602, spot=1.841),
    "g6.48xlarge": Price(on_demand=13.350, spot=5.340),
    "g6e.xlarge": Price(on_demand=1.861, spot=0.744),
    "g6e.12xlarge": Price(on_demand=10.493, spot=4.197),
    "g6e.48xlarge": Price(on_demand=30.131, spot=12.052),
    "p3.2xlarge": Price(on_demand=3.060, spot=0.918),
    "p3.8xlarge": Price(on_demand=12.240, spot=3.672),
    "p3.16xlarge": Price(on_demand=24.480, spot=7.344),
    "p4d.24xlarge": Price(on_demand=21.958, spot=9.881),
    "p4de.24xlarge": Price(on_demand=27.447, spot=12.351),
    "p5.48xlarge": Price(on_demand=55.040, spot=24.768),
    "p5e.48xlarge": Price(on_demand=59.700, spot=26.865),
    "p5en.48xlarge": Price(on_demand=63.296, spot=28.483),
}

# USD per GB-month of a data disk, rounded list prices of us-east-1; provisioned IOPS and throughput are not in them.
AWS_DISK_PRICES: dict[str, float] = {"gp3": 0.080, "gp2": 0.100, "io1": 0.125, "io2": 0.125, "st1": 0.045}

AWS_BUILT_IN: dict[str, tuple[str, int]] = {
    "g4dn.xlarge": ("nvidia-t4", 1),
    "g4dn.2xlarge": ("nvidia-t4", 1),
    "g4dn.12xlarge": ("nvidia-t4", 4),
    "g5.xlarge": ("nvidia-a10g", 1),
    "g5.2xlarge": ("nvidia-a10g", 1),
    "g5.4xlarge": ("nvidia-a10g", 1),
    "g5.8xlarge": ("nvidia-a10g", 1),
    "g5.12xlarge": ("nvidia-a10g", 4),
    "g5.24xlarge": ("nvidia-a10g", 4),
    "g5.48xlarge": ("nvidia-a10g", 8),
    "g6.xlarge": ("nvidia-l4", 1),
    "g6.2xlarge": ("nvidia-l4", 1),
    "g6.4xlarge": ("nvidia-l4", 1),
    "g6.8xlarge": ("nvidia-l4", 1),
    "g6.12xlarge": ("nvidia-l4", 4),
    "g6.48xlarge": ("nvidia-l4", 8),
    "g6e.xlarge": ("nvidia-l40s", 1),
    "g6e.12xlarge": ("nvidia-l40s", 4),
    "g6e.48xlarge": ("nvidia-l40s", 8),
    "p3.2xlarge": ("nvidia-v100", 1),
    "p3.8xlarge": ("nvidia-v100", 4),
    "p3.16xlarge": ("nvidia-v100", 8),
    "p4d.24xlarge": ("nvidia-a100", 8),
    "p4de.24xlarge": ("nvidia-a100-80gb", 8),
    "p5.48xlarge": ("nvidia-h100", 8),
    "p5e.48xlarge": ("nvidia-h200", 8),
    "p5en.48xlarge": ("nvidia-h200", 8),
}

# Elastic Fabric Adapters that a machine type can have: one on each network card.
AWS_EFA: dict[str, int] = {
    "c5n.18xlarge": 1,
    "c6i.32xlarge": 1,
    "g4dn.12xlarge": 1,
    "g5.8xlarge": 1,
    "g5.12xlarge": 1,
    "g5.24xlarge": 1,
    "g5.48xlarge": 1,
    "g6.8xlarge": 1,
    "g6.12xlarge": 1,
    "g6.48xlarge": 1,
    "g6e.12xlarge": 1,
    "g6e.48xlarge": 4,
    "m6i.32xlarge": 1,
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "trn1.32xlarge": 8,
}

BUILT_IN: dict[str, tuple[str, int]] = GCP_BUILT_IN | AWS_BUILT_IN
DISK_PRICES: dict[str, float] = GCP_DISK_PRICES | AWS_DISK_PRICES


def list_price(machine_type: str, accelerator: str | None, count: int) -> Price | None:
    """The table's price of a machine with its accelerators, or None where a part is not in it."""
    base = GCP_PRICES.get(machine_type) or AWS_PRICES.get(machine_type)
    if base is None or accelerator is None or machine_type in GCP_BUILT_IN:
        return base
    extra = GCP_ACCELERATOR_PRICES.get(accelerator)
    if extra is None or base.spot is None or extra.spot is None:
        return None
    return Price(
        on_demand=round(base.on_demand + count * extra.on_demand, 4), spot=round(base.spot + count * extra.spot, 4)
    )
