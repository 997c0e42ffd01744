"""Peak speeds of machines' accelerators and networks, as their vendors state them, for `compare`.

Sources, as they stood in 2026:

* Accelerators: NVIDIA's data sheets of A100, H100, H200, L4, L40S, T4 and V100, and that of A10G, which AWS publishes.
  Figures with sparsity are halved, as are figures of NVLink and PCIe that add up both directions. Google's "GPU machine
  types" has the same figures for NVLink. Between V100s of one machine: AWS's announcement of P3, 200 GB/s with four of
  them and 300 GB/s with eight.
* Networks of Compute Engine: the column "Maximum network bandwidth" of "GPU machine types"
  (docs.cloud.google.com/compute/docs/gpus), without paid tiers; A3 Edge as in most regions. N1 by the rule of "Network
  bandwidth" (docs.cloud.google.com/compute/docs/network-bandwidth): 2 Gbit/s a vCPU, 32 at most.
* Networks of EC2: the baseline, not the burst, of "Accelerated computing" in "Amazon EC2 instance types"
  (docs.aws.amazon.com/ec2/latest/instancetypes/ac.html); with EFA the sum over all cards.

Figures that no vendor states are marked as *estimate*.
"""

from __future__ import annotations

from typing import NamedTuple


class Accelerator(NamedTuple):
    """The peak speeds of an accelerator.

    ``tflops``: dense BF16, or FP16 if it has no BF16. ``gb_s``: GB/s to the next accelerator of its machine, in one
    direction.
    """

    tflops: float
    gb_s: float


T4 = Accelerator(65.0, 16.0)  # PCIe 3.0 x16
V100 = Accelerator(125.0, 100.0)
V100_OF_EIGHT = Accelerator(125.0, 150.0)
A10G = Accelerator(70.0, 32.0)  # PCIe 4.0 x16, also for the three accelerators below
L4 = Accelerator(121.0, 32.0)
L40S = Accelerator(362.0, 32.0)
A100 = Accelerator(312.0, 300.0)
H100 = Accelerator(989.0, 450.0)  # and H200

# By machine type, else by its family (the first part of its name). The name of an N1 does not say which accelerator the
# machine has; a T4 is assumed (*estimate*).
ACCELERATORS = {
    "a2": A100, "a3": H100, "g2": L4, "n1": T4,
    "g4dn": T4, "g5": A10G, "g6": L4, "g6e": L40S, "p4d": A100, "p4de": A100, "p5": H100, "p5e": H100, "p5en": H100,
    "p3": V100, "p3.16xlarge": V100_OF_EIGHT, "p3dn": V100_OF_EIGHT,
}  # fmt: skip
# Network speed from one machine to another, Gbit/s.
NETWORKS = {
    "a2-highgpu-1g": 24.0, "a2-highgpu-2g": 32.0, "a2-highgpu-4g": 50.0, "a2-highgpu-8g": 100.0,
    "a2-megagpu-16g": 100.0, "a2-ultragpu-1g": 24.0, "a2-ultragpu-2g": 32.0, "a2-ultragpu-4g": 50.0,
    "a2-ultragpu-8g": 100.0, "a3-highgpu-1g": 25.0, "a3-highgpu-2g": 50.0, "a3-highgpu-4g": 100.0,
    "a3-highgpu-8g": 1000.0, "a3-megagpu-8g": 1800.0, "a3-ultragpu-8g": 3600.0, "a3-edgegpu-8g": 400.0,
    "g2-standard-4": 10.0, "g2-standard-8": 16.0, "g2-standard-12": 16.0, "g2-standard-16": 32.0,
    "g2-standard-24": 32.0, "g2-standard-32": 32.0, "g2-standard-48": 50.0, "g2-standard-96": 100.0,
    "n1-standard-8": 16.0, "n1-standard-16": 32.0,
    "g4dn.xlarge": 5.0, "g4dn.2xlarge": 10.0, "g4dn.4xlarge": 20.0, "g4dn.8xlarge": 50.0, "g4dn.12xlarge": 50.0,
    "g4dn.16xlarge": 50.0, "g4dn.metal": 100.0,
    "g5.xlarge": 2.5, "g5.2xlarge": 5.0, "g5.4xlarge": 10.0, "g5.8xlarge": 25.0, "g5.12xlarge": 40.0,
    "g5.16xlarge": 25.0, "g5.24xlarge": 50.0, "g5.48xlarge": 100.0,
    "g6.xlarge": 2.5, "g6.2xlarge": 5.0, "g6.4xlarge": 10.0, "g6.8xlarge": 25.0, "g6.12xlarge": 40.0,
    "g6.16xlarge": 25.0, "g6.24xlarge": 50.0, "g6.48xlarge": 100.0,
    "g6e.xlarge": 2.5, "g6e.2xlarge": 5.0, "g6e.4xlarge": 20.0, "g6e.8xlarge": 25.0, "g6e.12xlarge": 100.0,
    "g6e.16xlarge": 35.0, "g6e.24xlarge": 200.0, "g6e.48xlarge": 400.0,
    "p3.2xlarge": 2.5, "p3.8xlarge": 10.0, "p3.16xlarge": 25.0, "p3dn.24xlarge": 100.0,
    "p4d.24xlarge": 400.0, "p4de.24xlarge": 400.0,
    "p5.4xlarge": 100.0, "p5.48xlarge": 3200.0, "p5e.48xlarge": 3200.0, "p5en.48xlarge": 3200.0,
}  # fmt: skip
# Estimates for types that are not listed.
NETWORK_GBIT_S = 10.0
INSIDE_GB_S = 16.0
