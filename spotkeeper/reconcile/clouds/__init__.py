"""Adapters of the clouds to ``contract.cloud.Cloud``: one listing, eight actions, prices. They decide nothing.

``gce/`` and ``ec2/`` have the same file names: ``cloud.py`` the interface, ``listing.py`` the lists, ``actions.py`` the
actions, ``api.py`` the requests, ``errors.py`` the meaning of errors, ``schema.py`` the documents, ``advice.py`` prices
and estimates. ``base.py``, ``http_client.py`` and ``rate_limit.py`` are shared. Only the stack's adapter is imported.
botocore, which is in Lambda's runtime, is imported at the first call.

====================== ======================================== =================================================
topic                  Compute Engine                           EC2
====================== ======================================== =================================================
names                  unique in a zone                         the tag ``Name``, beside the stack's own tag
prevents a second      ``requestId``; a failure shows later, in ``ClientToken``. For more than a day after a machine is
machine or disk        the operation                            gone, EC2 answers its repeated launch with the gone
                                                                machine and launches none. The attempt is then given up
                                                                (rule 7 of ``docs/protocol.md``)
prevents a second      its name, unique in the project          a search for its name before each creation. If two exist
snapshot                                                        nevertheless, the older one is used, and when it is no
                                                                longer needed, both are deleted together
listing                all zones by one request; the answer     the region by one request; if it fails, each zone by
                       has a warning for each zone that failed  one request, unless EC2 throttles
a machine missing in   is gone                                  is looked up by id. It probably exists, because
a listing                                                       terminated machines stay listed for an hour
a new resource         is visible at once                       can be invisible for seconds
no capacity            HTTP 503, or the operation's error       HTTP 500, or a launched machine that never ran
                                                                (``StateReason``)
requests are sent by   own HTTP client, one deadline per answer the same; botocore only encodes, signs and decodes
most changes           15 per second, bursts of 100             5 per second, bursts of 50; launches: 2 per second,
                                                                bursts of 5
prices                 of the region                            of each zone (``DescribeSpotPriceHistory``)
                       (``advice.capacityHistory``)
estimates, kept a day  a zone's obtainability, uptime and       a zone's placement score (``GetSpotPlacementScores``)
                       preemptions
events of losses       log sink and Pub/Sub push                EventBridge; the machine is looked up by id
====================== ======================================== =================================================

A disk can contain data. So a second disk is made in its place only if the first one certainly failed, or is missing
long after it was made. ``infra/aws/rights.py`` grants exactly the IAM actions that the EC2 adapter needs. Both clouds
run the same scenarios in ``tests/sim``; at each of their steps ``make ec2`` kills, freezes or misleads the function.
"""
