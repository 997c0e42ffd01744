"""The machine's cloud: its metadata server, its bucket, and the identity of its jobs.

``metadata.py``, ``storage.py``, ``identity.py`` the interfaces · ``gce.py``, ``gcs.py``, ``identity_gcp.py`` and
``ec2.py``, ``s3.py``, ``identity_aws.py`` their implementations · ``notice.py`` warnings · ``sigv4.py`` signatures.
The functions here choose the cloud; no other module of the agent knows which one it runs in.

======================= ========================================= ==================================================
what                    Compute Engine                            EC2
======================= ========================================= ==================================================
news                    one recursive long poll                   polls: ``spot/instance-action`` every second,
                                                                  rebalance every 5 s, maintenance every minute
end by preemption       ``sk-notice-s`` after ``preempted``       the time in ``instance-action``
end by maintenance      ``upcoming-maintenance``; else an hour    ``events/maintenance/scheduled``; a notice from an
                        after ``maintenance-event`` changed       hour before
                        (with accelerators; else a minute)
risk of preemption      nothing                                   ``events/recommendations/rebalance``
proof to the function   two identity tokens                       SigV4 by the instance profile's keys
bucket                  JSON API, OAuth token                     S3, signed; above 8 MiB in parts
metadata server         answers only requests with its header     version 2: a token by PUT, kept six hours
data disk               ``google-sk-data``                        the one EBS volume without partitions
======================= ========================================= ==================================================

Warnings become one notice with a deadline (``notice.py``), and a more certain cause replaces a less certain one. The
new notice is reported before the old one is withdrawn: in a gap between them the function would cancel the replacement.
A rebalance recommendation becomes a notice with a deadline in an hour, and every half hour the deadline is postponed:
the job saves, a replacement is requested, and training continues if none is available. A failure of the metadata server
never means "not preempted".

On EC2 the machines' role needs ``s3:ListBucket``: without it S3 answers 403, not 404, for a missing object. The bucket
needs a lifecycle rule that deletes unfinished multipart uploads.

The job's identity is served on 127.0.0.1 (``identity.py``; port and AWS token outlive the agent in
``run/spotkeeper/identity.*``): in the form of a metadata server that knows one service account (GCP), or of a
container's credentials (AWS). A secret goes from the cloud's store into the agent's memory, and through the launcher's
socket into the job's environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from spotkeeper.clock import Clock
from spotkeeper_agent.cloud.metadata import EC2_ENDPOINT, GCE_HOST, Metadata

if TYPE_CHECKING:
    from spotkeeper_agent.cloud.identity import Endpoints, JobIdentity

DMI = Path("/sys/class/dmi/id/sys_vendor")


def here(clock: Clock) -> Metadata:
    """Return this machine's metadata client, chosen by addresses in the environment, or else by the firmware's vendor.

    Makes no request. Unless it finds EC2, it returns the client of Compute Engine.
    """
    if GCE_HOST not in os.environ and (EC2_ENDPOINT in os.environ or vendor().startswith("Amazon")):
        from spotkeeper_agent.cloud.ec2 import Ec2

        return Ec2(clock)
    from spotkeeper_agent.cloud.gce import Gce

    return Gce(clock)


def vendor() -> str:
    """Return the machine's vendor from its firmware, such as "Google" or "Amazon EC2"; "" if it cannot be read."""
    try:
        return DMI.read_text().strip()
    except OSError:
        return ""


def job_identity(name: str, metadata: Metadata, clock: Clock, endpoints: Endpoints) -> JobIdentity:
    """Return the identity that the stack gives to jobs. ``name``: a service account's address or a role's ARN.

    Raises:
        IdentityError: ``name`` is neither, or belongs to another cloud.
    """
    from spotkeeper_agent.cloud.ec2 import Ec2
    from spotkeeper_agent.cloud.gce import Gce
    from spotkeeper_agent.cloud.identity import IdentityError

    if name.startswith("arn:") and isinstance(metadata, Ec2):
        from spotkeeper_agent.cloud.identity_aws import AwsIdentity

        return AwsIdentity(name, metadata, clock, endpoints)
    if "@" in name and isinstance(metadata, Gce):
        from spotkeeper_agent.cloud.identity_gcp import GcpIdentity

        return GcpIdentity(name, metadata.access_token, clock, endpoints)
    raise IdentityError(f"{name}: is not a service account or role of this machine's cloud", final=True)
