"""Recorded markets, and what a policy makes of them: a market, a job and a policy in, an outcome out.

Standard library only, pure but for reading a recording; nothing here decides what to buy, and the policy that is
replayed is the one that reconcile uses.
"""
