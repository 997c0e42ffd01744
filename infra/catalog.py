"""Tables for both clouds: the zones of each region, and machine types with list prices and accelerators.

A stack file is checked against the zones. Reconcile compares offers by these prices, and the ledger uses them, unless
``prices:`` in the stack file sets others by zone. The tables are constants: if `pulumi up` fetched them, each change of
a price would show as a change of the stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spotkeeper.contract.stack import Price

# Letters of the zones of each Compute Engine region. Append new regions: a region's place determines its address range.
GCP_ZONES: dict[str, str] = dict.fromkeys((
    "africa-south1", "asia-east1", "asia-east2", "asia-northeast1", "asia-northeast2", "asia-northeast3",
    "asia-south1", "asia-south2", "asia-southeast1", "asia-southeast2", "australia-southeast1",
    "australia-southeast2", "europe-central2", "europe-north1", "europe-north2", "europe-southwest1",
    "europe-west2", "europe-west3", "europe-west4", "europe-west6", "europe-west8", "europe-west9",
    "europe-west10", "europe-west12", "me-central1", "me-central2", "me-west1", "northamerica-northeast1",
    "northamerica-northeast2", "northamerica-south1", "southamerica-east1", "southamerica-west1", "us-east4",
    "us-east5", "us-south1", "us-west1", "us-west2", "us-west3", "us-west4",
), "abc") | {"europe-west1": "bcd", "us-central1": "abcf", "us-east1": "bcd"}  # fmt: skip


# Letters of the availability zones of each EC2 region, as accounts see them.
AWS_ZONES: dict[str, str] = dict.fromkeys((
    "af-south-1", "ap-east-1", "ap-northeast-3", "ap-south-1", "ap-south-2", "ap-southeast-1", "ap-southeast-2",
    "ap-southeast-3", "ap-southeast-4", "ca-west-1", "eu-central-1", "eu-central-2", "eu-north-1", "eu-south-1",
    "eu-south-2", "eu-west-1", "eu-west-2", "eu-west-3", "il-central-1", "me-central-1", "me-south-1", "sa-east-1",
    "us-east-2", "us-west-1",
), "abc") | {
    "ap-northeast-1": "acd", "ap-northeast-2": "abcd", "ca-central-1": "abd", "us-east-1": "abcdef",
    "us-west-2": "abcd",
}  # fmt: skip


# Regions where Lambda has no function URLs, to which machines report (Lambda guide, "Creating and managing function
# URLs"). The list shrinks over time.
AWS_WITHOUT_URLS = frozenset(
    {
        *("ap-east-2", "ap-south-2", "ap-southeast-4", "ap-southeast-5", "ap-southeast-6", "ap-southeast-7"),
        *("ca-west-1", "eu-central-2", "eu-south-2", "il-central-1", "me-central-1"),
    }
)


def zones_of(region: str) -> tuple[str, ...]:
    """Return the full names (us-central1-a, us-east-1a) of a region's zones; empty for an unknown region."""
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

# USD per accelerator-hour, added to the price of types to which accelerators are added separately (N1).
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


def _by_type(counts: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[str, int]]:
    """Turn a table accelerator -> machine type -> count into machine type -> (accelerator, count)."""
    return {kind: (name, count) for name, kinds in counts.items() for kind, count in kinds.items()}


# Machine types with built-in accelerators -> (accelerator, count).
GCP_BUILT_IN: dict[str, tuple[str, int]] = _by_type({
    "nvidia-l4": {
        "g2-standard-4": 1, "g2-standard-8": 1, "g2-standard-12": 1, "g2-standard-24": 2, "g2-standard-48": 4,
    },
    "nvidia-tesla-a100": {"a2-highgpu-1g": 1, "a2-highgpu-2g": 2, "a2-highgpu-4g": 4, "a2-highgpu-8g": 8},
    "nvidia-a100-80gb": {"a2-ultragpu-1g": 1, "a2-ultragpu-8g": 8},
    "nvidia-h100-80gb": {"a3-highgpu-1g": 1, "a3-highgpu-8g": 8},
})  # fmt: skip

# USD per machine-hour, rounded list prices of us-east-1; spot prices move; these are starting values.
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

AWS_BUILT_IN: dict[str, tuple[str, int]] = _by_type({
    "nvidia-t4": {"g4dn.xlarge": 1, "g4dn.2xlarge": 1, "g4dn.12xlarge": 4},
    "nvidia-a10g": {
        "g5.xlarge": 1, "g5.2xlarge": 1, "g5.4xlarge": 1, "g5.8xlarge": 1, "g5.12xlarge": 4, "g5.24xlarge": 4,
        "g5.48xlarge": 8,
    },
    "nvidia-l4": {
        "g6.xlarge": 1, "g6.2xlarge": 1, "g6.4xlarge": 1, "g6.8xlarge": 1, "g6.12xlarge": 4, "g6.48xlarge": 8,
    },
    "nvidia-l40s": {"g6e.xlarge": 1, "g6e.12xlarge": 4, "g6e.48xlarge": 8},
    "nvidia-v100": {"p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8},
    "nvidia-a100": {"p4d.24xlarge": 8},
    "nvidia-a100-80gb": {"p4de.24xlarge": 8},
    "nvidia-h100": {"p5.48xlarge": 8},
    "nvidia-h200": {"p5e.48xlarge": 8, "p5en.48xlarge": 8},
})  # fmt: skip

# Elastic Fabric Adapters that a machine type can have: one on each network card, from AWS_FIRST_EFA_CARD on.
# trn2.48xlarge (16 adapters) is missing: no public source says which of its cards take one.
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
    "p5.4xlarge": 1,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
    "p6-b300.48xlarge": 16,
    "trn1.32xlarge": 8,
}

AWS_FIRST_EFA_CARD: dict[str, int] = {"p6-b300.48xlarge": 1}  # its card 0 has no EFA; card 0 of all others has

BUILT_IN: dict[str, tuple[str, int]] = GCP_BUILT_IN | AWS_BUILT_IN
DISK_PRICES: dict[str, float] = GCP_DISK_PRICES | AWS_DISK_PRICES


# USD per GB that leaves a region for another one of the same cloud, rounded list prices, by the beginning of its name.
GCP_EGRESS: dict[str, float] = {
    "us": 0.02, "northamerica": 0.02, "europe": 0.02, "asia": 0.08, "australia": 0.10, "me": 0.11, "africa": 0.11,
    "southamerica": 0.14,
}  # fmt: skip
GCP_OCEAN_EGRESS = 0.05  # the least between two continents; North America is one
AWS_EGRESS: dict[str, float] = {
    "us": 0.02, "ca": 0.02, "eu": 0.02, "il": 0.08, "ap": 0.09, "ap-southeast-2": 0.098, "me": 0.1105, "sa": 0.138,
    "af": 0.147,
}  # fmt: skip


# Predefined dual-regions of Cloud Storage. Between a multi-region ("us") and a region of it, Google charges egress.
GCP_DUAL_REGIONS = {
    "asia1": ("asia-northeast1", "asia-northeast2"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "nam4": ("us-central1", "us-east1"),
}


def egress_usd_gb(source: str, target: str) -> float:
    """Return the list price of a GB from one region to another of the same cloud, USD.

    EC2 charges by the source. Google Cloud charges by both ends; this is the more expensive one.
    """
    if source in AWS_ZONES:
        return AWS_EGRESS.get(source) or AWS_EGRESS.get(source.partition("-")[0], max(AWS_EGRESS.values()))
    ends = [name.partition("-")[0].replace("northamerica", "us") for name in (source, target)]
    least = 0.0 if ends[0] == ends[1] else GCP_OCEAN_EGRESS
    return max(least, *(GCP_EGRESS.get(end, max(GCP_EGRESS.values())) for end in ends))


def egress(regions: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the price between each two of these regions, USD per GB, as ``StackState.egress``."""
    return {one: {other: egress_usd_gb(one, other) for other in regions if other != one} for one in regions}


def list_price(machine_type: str, accelerator: str | None, count: int) -> Price | None:
    """Return the list price of a machine with its accelerators; None if a table lacks the machine type or a price."""
    base = GCP_PRICES.get(machine_type) or AWS_PRICES.get(machine_type)
    if base is None or accelerator is None or machine_type in GCP_BUILT_IN:
        return base
    extra = GCP_ACCELERATOR_PRICES.get(accelerator)
    if extra is None or base.spot is None or extra.spot is None:
        return None
    return Price(
        on_demand=round(base.on_demand + count * extra.on_demand, 4), spot=round(base.spot + count * extra.spot, 4)
    )
