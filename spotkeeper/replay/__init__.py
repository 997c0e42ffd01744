"""Replays a job on a recorded market under a policy: what it costs, when it ends, how often it is preempted.

Pure, except for reading a recording. All decisions are the policy's, for example reconcile's own policy.
"""
