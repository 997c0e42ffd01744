"""Recorded markets and their replay: from a market, a job and a policy to cost, end and preemptions.

Pure, except for reading a recording. It replays reconcile's own policy and decides nothing itself.
"""
