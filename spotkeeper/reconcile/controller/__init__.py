"""One job's round, the tick over all jobs, and the intake of reports: I/O around the pure ``decide()``.

``reconcile_job.py`` runs a round: it carries out the steps of ``steps.py`` against the bucket and the cloud, and
decides nothing itself, not even the order of its reads. ``tick.py`` runs the rounds of all jobs from one listing,
then the sweep for jobs without a record. ``intake.py`` turns what an agent says into facts. ``document.py`` makes the
answer: role and generation document. ``lease.py`` keeps a job to one round at a time. ``docs/protocol.md`` has the
rules and timings of rounds, leases and bursts.

**Resume with other files.** The request to resume a held job may name the hash of other files. The round checks these
against the job's disks, and its write of the record makes the new job file valid (``decide/gang/requests.py``).

**Failed ticks.** A tick has failed if it raised, if the cloud answered in no zone, or if no job's round could be
done. Its answer is then 503 (an error on Lambda). Each tick ends with one log line, ``event`` ``tick`` or
``tick_failed``, which the clouds' alerts count, and with a note in the bucket, ``stack/tick``
(``contract/stack.py``): when a tick last succeeded, since when ticks fail, and why. The note is read at every tick and
written when it changes, and every five minutes while all is well. ``status`` and ``watch`` say "no tick succeeded
for N minutes: REASON"; if the bucket itself fails, the note's age alone shows the failure. In the
one-machine cloud the schedule restarts the function's process after three failures in a row, then after six, and so
on (``local/serverless/triggers.py``).
"""
