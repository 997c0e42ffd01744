"""The IAM actions that the adapter needs: what it calls, and what ``infra/aws/rights.py`` grants."""

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
MEASURES = ("ebs:ListChangedBlocks",)  # of snapshots that bear the stack's tag, if it pays for warm copies
COPIES = ("ec2:CopySnapshot",)  # of a stack with several regions, from and under the stack's tag
CHANGES = (  # of what bears the stack's tag
    "ec2:AttachVolume",
    "ec2:DeleteSnapshot",
    "ec2:DeleteVolume",
    "ec2:DetachVolume",
    "ec2:TerminateInstances",
)
WITH_THEM = ("ec2:CreateTags", "iam:PassRole")  # bound to ``ec2:CreateAction`` of ``MAKES``, and to the nodes' role
ACTIONS = tuple(sorted((*READS, *MAKES, *CHANGES, *WITH_THEM)))
