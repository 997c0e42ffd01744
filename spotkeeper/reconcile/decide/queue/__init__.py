"""The queue: how many machines each job may have, when there are not enough for all. Pure.

``order.py`` the order of all jobs' claims · ``scheduler.py`` reserves machines for them and takes them from others ·
``reclaim.py`` from whom · ``takeover.py`` the same where the limits have room but the cloud has no machines ·
``room.py`` what the limits of stack and teams have room for · ``use.py`` what a team has used, and to how many machines
it is entitled · ``claim.py`` what a job's round tells the queue, and does when its reservation changes.

All of it is decided in the allocation document, in the same compare-and-swap as grants. No process has to live for it:
each round and each tick computes the next allocation from the last one.
"""
