"""What happened to a job and what it cost: pure views of its record, progress and ledger.

Nothing here reads a bucket or a clock; callers pass documents and ``now``. ``rich`` is
imported by what prints only: ``render``, ``tables`` and the ``..._text``.
"""
