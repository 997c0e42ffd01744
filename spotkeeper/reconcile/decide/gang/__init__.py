"""Pure: decisions about all nodes of a job together.

``generation.py`` publishes members · ``requests.py`` users' requests, the ends of holds and jobs · ``exits.py``
success, crash, hang, roll call · ``resize.py`` the number of nodes · ``zone_move.py`` moves to another zone ·
``bucket_move.py`` the same by a checkpoint's copy in the bucket · ``zone_probe.py`` probes of zones that may be better.

**A hang.** An agent says HUNG when a step takes ``hang.factor`` times the median and at least ``hang.floor_min``, or,
outside the loop, when no process used the processor for ``hang.idle_min``. The function then opens a roll call with the
cause ``hang`` (``Generation.stacks``): every agent makes its workers log their stack traces, and answers STACKS. The
hang counts as a crash, and uses the crash budget, only when all have answered or the roll call's time is over, so the
stack traces are logged before the processes end. If an answer says that a process is busy (in ``run.untimed()``,
outside the loop, or with changing stack traces), no hang is assumed for two minutes. The function does not look for
hangs itself, since only the machine knows what the job does.

**Leaving a zone for its price.** A gang that trains asks ``select()`` about all zones and probes zones where a move
would save money. A job probes a zone at most once in half an hour; probes use at most half of the launches that
``limits`` allows. A move is cancelled if the disks' copies are not ready within an hour or the cloud refuses them; the
wait before the next try grows. After a move a gang stays in its zone for at least ten times as long as the move took,
so moves take at most a tenth of its time.
"""
