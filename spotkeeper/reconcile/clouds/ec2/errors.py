"""Classify EC2's refusals by error code. The HTTP status decides only for unknown codes: "no capacity" is a 500 too.

Source: AWS, "Error codes for the Amazon EC2 API".
"""

from __future__ import annotations

import re

from spotkeeper.contract.cloud import ResultKind

CODES: dict[str, ResultKind] = {
    # No such machine in that zone now: choose another offer.
    "InsufficientInstanceCapacity": ResultKind.CAPACITY,
    "InsufficientCapacity": ResultKind.CAPACITY,
    "InsufficientHostCapacity": ResultKind.CAPACITY,
    "InsufficientReservedInstanceCapacity": ResultKind.CAPACITY,
    "ReservationCapacityExceeded": ResultKind.CAPACITY,
    "UnfulfillableCapacity": ResultKind.CAPACITY,
    "InsufficientFreeAddressesInSubnet": ResultKind.CAPACITY,  # the zone's subnet is full
    "InsufficientVolumeCapacity": ResultKind.CAPACITY,
    "SpotMaxPriceTooLow": ResultKind.CAPACITY,
    "Unsupported": ResultKind.CAPACITY,  # "your requested instance type is not supported in your requested zone"
    # A quota of the account, which a person can ask AWS to raise.
    "MaxSpotInstanceCountExceeded": ResultKind.QUOTA,
    "VcpuLimitExceeded": ResultKind.QUOTA,
    "InstanceLimitExceeded": ResultKind.QUOTA,
    "VolumeLimitExceeded": ResultKind.QUOTA,
    "MaxIOPSLimitExceeded": ResultKind.QUOTA,
    "SnapshotLimitExceeded": ResultKind.QUOTA,
    "NetworkInterfaceLimitExceeded": ResultKind.QUOTA,
    "AddressLimitExceeded": ResultKind.QUOTA,
    "ResourceLimitExceeded": ResultKind.QUOTA,
    # Too many calls: this call was not carried out.
    "RequestLimitExceeded": ResultKind.THROTTLED,
    "Throttling": ResultKind.THROTTLED,
    "ThrottlingException": ResultKind.THROTTLED,
    "RequestThrottled": ResultKind.THROTTLED,
    "RequestThrottledException": ResultKind.THROTTLED,
    "EC2ThrottledException": ResultKind.THROTTLED,
    "BandwidthLimitExceeded": ResultKind.THROTTLED,
    "SlowDown": ResultKind.THROTTLED,
    "SnapshotCreationPerVolumeRateExceeded": ResultKind.THROTTLED,
    "ConcurrentSnapshotLimitExceeded": ResultKind.THROTTLED,
    "PendingSnapshotLimitExceeded": ResultKind.THROTTLED,  # a gang that moves makes one per node: some must wait
    # EC2 may not know resources that an `up` has just declared, and reports them as nonexistent. The calls were not
    # carried out; a hold would give up a gang's machines for a passing state.
    "InvalidLaunchTemplateId.NotFound": ResultKind.THROTTLED,
    "InvalidLaunchTemplateId.VersionNotFound": ResultKind.THROTTLED,
    "InvalidGroup.NotFound": ResultKind.THROTTLED,
    "InvalidPlacementGroup.Unknown": ResultKind.THROTTLED,
    "InvalidSubnetID.NotFound": ResultKind.THROTTLED,
    # Another resource uses it, or it is not ready yet.
    "VolumeInUse": ResultKind.IN_USE,
    "InvalidSnapshot.InUse": ResultKind.IN_USE,
    "IncorrectState": ResultKind.IN_USE,
    "IncorrectInstanceState": ResultKind.IN_USE,
    "InvalidVolume.NotFound": ResultKind.IN_USE,  # in a call that needs the volume, which may not be visible yet
    "InvalidInstanceID.NotFound": ResultKind.IN_USE,
    "InvalidSnapshot.NotFound": ResultKind.IN_USE,
    # The token was used up, by a machine that is gone or by another request: the next attempt has another (rule 7).
    "IdempotentInstanceTerminated": ResultKind.DEAD_KEY,
    "IdempotentParameterMismatch": ResultKind.DEAD_KEY,
    # The outcome is unknown.
    "InternalError": ResultKind.AMBIGUOUS,
    "InternalFailure": ResultKind.AMBIGUOUS,
    "ServiceUnavailable": ResultKind.AMBIGUOUS,
    "Unavailable": ResultKind.AMBIGUOUS,
    "RequestTimeout": ResultKind.AMBIGUOUS,
    "RequestExpired": ResultKind.AMBIGUOUS,  # the credentials expired on the way; the next call uses new ones
    "ExpiredToken": ResultKind.AMBIGUOUS,
    "ExpiredTokenException": ResultKind.AMBIGUOUS,
}
# For up to two minutes EC2 refuses an instance profile that IAM has just made, such as for a new stack's first job.
_YOUNG = re.compile(r"Invalid IAM Instance Profile|IAM Instance Profile .* has no associated IAM Roles", re.IGNORECASE)
# Remedies for refusals if EC2's text does not name any.
REMEDIES: dict[str, str] = {
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": (
        "the account has no role for spot machines; create it: "
        "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
    ),
    "Client.InternalError": (
        "most often a right to use the disks' encryption key is missing: "
        "check `kms_key` in the stack file and the key's policy"
    ),
}
GONE = frozenset({"InvalidInstanceID.NotFound", "InvalidVolume.NotFound", "InvalidSnapshot.NotFound"})

# ``StateReason`` of an accepted launch that ended before it ran. Reasons for the end of a machine that has run
# (``Server.SpotInstanceTermination``) are not here: those are losses, not failed launches.
REASONS: dict[str, ResultKind] = {
    "Server.InsufficientInstanceCapacity": ResultKind.CAPACITY,
    "Client.VolumeLimitExceeded": ResultKind.QUOTA,
    "Client.InstanceLimitExceeded": ResultKind.QUOTA,
    "Client.VcpuLimitExceeded": ResultKind.QUOTA,
    "Client.InternalError": ResultKind.PERMANENT,  # "client error on launch": often a KMS key that the role may not use
    "Client.InvalidSnapshot.NotFound": ResultKind.PERMANENT,
    "Client.InvalidParameterValue": ResultKind.PERMANENT,
}


def classify(code: str, status: int, message: str = "") -> ResultKind:
    """Return the class of a refusal; for a code that is not in the table, the HTTP status decides."""
    found = CODES.get(code)
    if code == "InvalidParameterValue" and _YOUNG.search(message):
        return ResultKind.THROTTLED  # not carried out, and only temporary: the intent is repeated
    if found is not None:
        return found
    if status == 429:
        return ResultKind.THROTTLED
    return ResultKind.AMBIGUOUS if status >= 500 else ResultKind.PERMANENT


def detail_of(code: str, message: str) -> str:
    """Return one line for the ledger, cut to 300 characters; a known remedy precedes EC2's text."""
    remedy = f"({REMEDIES[code]})" if code in REMEDIES else ""
    return " ".join(f"{code} {remedy} {message}".split())[:300]
