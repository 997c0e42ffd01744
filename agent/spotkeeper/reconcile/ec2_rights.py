"""What IAM must let the function do with EC2: the actions of every call that ``ec2*.py`` make, and no other.

Data for ``infra/aws/identity`` (which adds the conditions) and for the tests, which hold it against the calls that
are made. ``CreateTags`` is asked for by whatever is made with tags, ``PassRole`` by a launch whose template has an
instance profile. Reading is not bound to resources: EC2's Describe actions cannot be.
"""

from __future__ import annotations

READS = (
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeInstances",
    "ec2:DescribeSnapshots",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeVolumes",
    "ec2:GetSpotPlacementScores",
)
MAKES = ("ec2:CreateSnapshot", "ec2:CreateVolume", "ec2:RunInstances")  # under the stack's tag on the request
CHANGES = (  # of what bears the stack's tag
    "ec2:AttachVolume",
    "ec2:DeleteSnapshot",
    "ec2:DeleteVolume",
    "ec2:DetachVolume",
    "ec2:TerminateInstances",
)
WITH_THEM = ("ec2:CreateTags", "iam:PassRole")  # bound to ``ec2:CreateAction`` of ``MAKES``, and to the nodes' role
ACTIONS = tuple(sorted((*READS, *MAKES, *CHANGES, *WITH_THEM)))
