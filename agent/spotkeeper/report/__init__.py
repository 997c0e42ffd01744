"""What happened to a job and what it cost: pure views of its record, progress and ledger.

Nothing here reads a bucket or a clock; callers pass documents and ``now``. ``rich`` is
imported by :mod:`spotkeeper.report.render` only.
"""
