"""Runs the rounds of single jobs, the tick over all jobs, and the intake of reports. ``decide()`` itself is pure.

``reconcile_job.py`` runs a round: it carries out the steps of ``steps.py`` against the bucket and the cloud, and
decides nothing itself, not even the order of its reads. ``tick.py`` runs the rounds of all jobs from one listing,
then the sweep for jobs without a record. ``intake.py`` stores an agent's reports as facts. ``document.py`` makes the
answer to an agent. ``bursts.py`` says when a round waits for more reports. ``lease.py`` lets only one round of a job
run at a time. ``docs/protocol.md`` has the rules and timings of rounds, leases and bursts of reports.

**Failed ticks.** A tick has failed if it raised, if no zone of the cloud answered, or if the round of every job was
interrupted. The function then answers 503 (on Lambda: an error). Each tick ends with a log line whose ``event`` is
``tick`` or ``tick_failed``; the clouds' alerts count these lines. The object ``stack/tick`` in the bucket
(``contract/stack.py``) says when a tick last succeeded, since when ticks fail, and why. A tick writes this object when
its content changes, otherwise every five minutes. ``status`` and ``watch`` read it and say "no tick succeeded for N
minutes: REASON"; if ticks cannot write the object, its age shows that. The one-machine cloud restarts the function's
process after three failed ticks in a row, and doubles this number at each restart (``local/serverless/triggers.py``).
"""
