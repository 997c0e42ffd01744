"""What EC2's refusals mean: one table of its error codes. The HTTP status comes last: no capacity is a 500.

Source: AWS, "Error codes for the Amazon EC2 API".
"""

from __future__ import annotations

import re

from spotkeeper.spec.cloud import Class

CODES: dict[str, Class] = {
    # No machine of this kind there now: another offer.
    "InsufficientInstanceCapacity": Class.CAPACITY,
    "InsufficientCapacity": Class.CAPACITY,
    "InsufficientHostCapacity": Class.CAPACITY,
    "InsufficientReservedInstanceCapacity": Class.CAPACITY,
    "ReservationCapacityExceeded": Class.CAPACITY,
    "UnfulfillableCapacity": Class.CAPACITY,
    "InsufficientFreeAddressesInSubnet": Class.CAPACITY,  # that zone's subnet is full
    "InsufficientVolumeCapacity": Class.CAPACITY,
    "SpotMaxPriceTooLow": Class.CAPACITY,
    "Unsupported": Class.CAPACITY,  # "your requested instance type is not supported in your requested zone"
    # A limit of the account: a person can have it raised.
    "MaxSpotInstanceCountExceeded": Class.QUOTA,
    "VcpuLimitExceeded": Class.QUOTA,
    "InstanceLimitExceeded": Class.QUOTA,
    "VolumeLimitExceeded": Class.QUOTA,
    "MaxIOPSLimitExceeded": Class.QUOTA,
    "SnapshotLimitExceeded": Class.QUOTA,
    "NetworkInterfaceLimitExceeded": Class.QUOTA,
    "AddressLimitExceeded": Class.QUOTA,
    "ResourceLimitExceeded": Class.QUOTA,
    # Too many calls: none was carried out.
    "RequestLimitExceeded": Class.THROTTLED,
    "Throttling": Class.THROTTLED,
    "ThrottlingException": Class.THROTTLED,
    "RequestThrottled": Class.THROTTLED,
    "RequestThrottledException": Class.THROTTLED,
    "EC2ThrottledException": Class.THROTTLED,
    "BandwidthLimitExceeded": Class.THROTTLED,
    "SlowDown": Class.THROTTLED,
    "SnapshotCreationPerVolumeRateExceeded": Class.THROTTLED,
    "ConcurrentSnapshotLimitExceeded": Class.THROTTLED,
    "PendingSnapshotLimitExceeded": Class.THROTTLED,  # a large gang that moves makes one a rank: some come later
    # What an `up` has declared a moment ago EC2 may not know yet, and says so as of what never was. None was carried
    # out; a hold would take a gang's machines away for that moment.
    "InvalidLaunchTemplateId.NotFound": Class.THROTTLED,
    "InvalidLaunchTemplateId.VersionNotFound": Class.THROTTLED,
    "InvalidGroup.NotFound": Class.THROTTLED,
    "InvalidSubnetID.NotFound": Class.THROTTLED,
    # Something else has it, or it is not so far yet.
    "VolumeInUse": Class.IN_USE,
    "InvalidSnapshot.InUse": Class.IN_USE,
    "IncorrectState": Class.IN_USE,
    "IncorrectInstanceState": Class.IN_USE,
    "InvalidVolume.NotFound": Class.IN_USE,  # of a call that needs it; it may only not be visible yet
    "InvalidInstanceID.NotFound": Class.IN_USE,
    "InvalidSnapshot.NotFound": Class.IN_USE,
    # This token was used up, by a machine that is gone or by another request: attempt + 1 (rule 7).
    "IdempotentInstanceTerminated": Class.DEAD_KEY,
    "IdempotentParameterMismatch": Class.DEAD_KEY,
    # Nothing is known of what became of it.
    "InternalError": Class.AMBIGUOUS,
    "InternalFailure": Class.AMBIGUOUS,
    "ServiceUnavailable": Class.AMBIGUOUS,
    "Unavailable": Class.AMBIGUOUS,
    "RequestTimeout": Class.AMBIGUOUS,
    "RequestExpired": Class.AMBIGUOUS,  # keys ran out under way; the next call is signed with new ones
    "ExpiredToken": Class.AMBIGUOUS,
    "ExpiredTokenException": Class.AMBIGUOUS,
}
# A role's profile that IAM has just made is no parameter yet to EC2, for up to two minutes: a new stack's first job.
_YOUNG = re.compile(r"Invalid IAM Instance Profile|IAM Instance Profile .* has no associated IAM Roles", re.IGNORECASE)
GONE = frozenset({"InvalidInstanceID.NotFound", "InvalidVolume.NotFound", "InvalidSnapshot.NotFound"})

# Why a launch that was accepted ended before it ran, as ``StateReason`` says. What may befall a machine that has run
# (``Server.SpotInstanceTermination``) is not here: that is a loss, and no word about a launch.
REASONS: dict[str, Class] = {
    "Server.InsufficientInstanceCapacity": Class.CAPACITY,
    "Client.VolumeLimitExceeded": Class.QUOTA,
    "Client.InstanceLimitExceeded": Class.QUOTA,
    "Client.VcpuLimitExceeded": Class.QUOTA,
    "Client.InternalError": Class.PERMANENT,  # "client error on launch": most often a key its role may not use
    "Client.InvalidSnapshot.NotFound": Class.PERMANENT,
    "Client.InvalidParameterValue": Class.PERMANENT,
}


def classify(code: str, status: int, message: str = "") -> Class:
    """The class of a refusal. A code that is not in the table is judged by its status alone."""
    found = CODES.get(code)
    if code == "InvalidParameterValue" and _YOUNG.search(message):
        return Class.THROTTLED  # not carried out, and no answer for ever: the intent is repeated
    if found is not None:
        return found
    if status == 429:
        return Class.THROTTLED
    return Class.AMBIGUOUS if status >= 500 else Class.PERMANENT


def detail_of(code: str, message: str) -> str:
    """One line for people and the ledger, cut to 300 characters."""
    return " ".join(f"{code} {message}".split())[:300]
