"""Adapters of the clouds to ``contract.cloud.Cloud``: one listing, eight actions, prices. They decide nothing.

``gce/`` and ``ec2/`` have the same file names: ``cloud.py`` the interface, ``listing.py`` the lists, ``actions.py`` the
actions, ``api.py`` the requests, ``errors.py`` the meaning of errors, ``schema.py`` the documents, ``advice.py`` prices
and estimates. ``base.py``, ``http_client.py`` and ``rate_limit.py`` are shared. Only the stack's adapter is imported.
botocore, which is in Lambda's runtime, is imported at the first call.

====================== ======================================== =================================================
what                   Compute Engine                           EC2
====================== ======================================== =================================================
a name                 unique in its zone                       the tag ``Name``, beside the stack's own tag
a launch, a disk       ``requestId``; a failure comes later, in ``ClientToken``, known for a day and more after its
                       the operation                            machine is gone; then it is that dead machine, and the
                                                                attempt is given up (rule 7)
a snapshot             its name                                 no token, so it is looked up before; if two have one
                                                                name, the older counts, and both are deleted
a listing              all zones at once, each with warnings    one request for the region; if it fails, one per zone;
                                                                if throttled, none
listed before, now not is gone                                  is looked up by id: terminated machines stay listed
                                                                for an hour, so absence mostly means a stale answer
just made              is visible                               may be invisible for seconds: "not found" proves nothing
no capacity            503, or in the operation                 HTTP 500 at once, or ``StateReason`` of a machine that
                                                                never ran
time                   own HTTP client, one deadline an answer  the same: botocore writes, signs and reads, and neither
                                                                retries nor waits
pace                   15 changes a second, 100 at once         5 and 50; launches 2 and 5
prices                 of the region                            of each zone (``DescribeSpotPriceHistory``)
                       (``advice.capacityHistory``)
estimates, kept a day  obtainability, uptime and preemptions    placement scores (``GetSpotPlacementScores``)
                       of a zone
a loss is told by      log sink, push                           EventBridge; the id is looked up, others are dropped
====================== ======================================== =================================================

A disk may contain data, so its number is given up only on proof: the disk failed, or it is missing although its token
is old. ``infra/aws/rights.py`` grants exactly the IAM actions that all this needs. Both clouds run the same twelve
scenarios in ``tests/sim``. At each step of these, ``make ec2`` kills the function, freezes it, and gives it wrong
answers.
"""
