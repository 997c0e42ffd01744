"""Views of a job's state, events and cost, made from its record, progress and ledger. Pure.

No module reads a bucket or a clock; callers pass documents and ``now``. Only code that prints imports ``rich``.
"""
