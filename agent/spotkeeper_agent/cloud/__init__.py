"""The machine's cloud: its metadata server, its bucket, and the identity of its jobs.

``metadata.py``, ``storage.py``, ``identity.py`` the interfaces · ``gce.py``, ``gcs.py``, ``identity_gcp.py`` and
``ec2.py``, ``s3.py``, ``identity_aws.py`` their implementations · ``notice.py`` warnings · ``sigv4.py`` signatures.
The functions here choose the cloud; no other module of the agent knows in which cloud it runs.

======================= ========================================= ==================================================
what                    Compute Engine                            EC2
======================= ========================================= ==================================================
how changes are seen    one recursive long poll                   polls: ``spot/instance-action`` every second,
                                                                  rebalance every 5 s, maintenance every minute
end by preemption       ``sk-notice-s`` seconds after             the time in ``instance-action``
                        ``preempted`` becomes true
end by maintenance      the time in ``upcoming-maintenance``; if  the time in ``events/maintenance/scheduled``; the
                        none, an hour (without accelerators: a    notice begins an hour before
                        minute) after ``maintenance-event``
risk of preemption      nothing                                   ``events/recommendations/rebalance``
proof to the function   two identity tokens                       SigV4 by the instance profile's keys
bucket                  JSON API, OAuth token                     S3, signed; above 8 MiB in parts
metadata server         answers only requests with its header     version 2: a token by PUT, kept six hours
data disk               ``google-sk-data``                        the one EBS volume without partitions
======================= ========================================= ==================================================

Warnings become one notice with a deadline (``notice.py``), and a more certain cause replaces a less certain one. The
new notice is reported before the old one is withdrawn: without a notice the function would cancel the replacement. A
rebalance recommendation becomes a notice with a deadline in an hour, postponed every half hour: the job saves and a
replacement is requested, but training continues until the replacement is ready. A failure of the metadata server never
means "not preempted".

On EC2 the machines' role needs ``s3:ListBucket``: without it S3 answers 403, not 404, for a missing object. The bucket
needs a lifecycle rule that deletes unfinished multipart uploads.

A server on 127.0.0.1 (``identity.py``) gives the job its identity, on GCP like a metadata server with one service
account, on AWS like a container's credential endpoint. Its port and AWS token are kept in ``run/spotkeeper/identity.*``
for a restarted agent. Secrets go from the cloud's store through the agent's memory into the job's environment.
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

    Makes no request. If nothing shows that this is EC2, the client is that of Compute Engine.
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
    """Return the identity that the stack gives to jobs. ``name``: a service account's email or a role's ARN.

    Raises:
        IdentityError: ``name`` is neither of these, or belongs to another cloud.
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
    raise IdentityError(f"{name} is not a service account or role of this machine's cloud", final=True)
