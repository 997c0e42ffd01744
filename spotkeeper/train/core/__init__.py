"""Building blocks of the library: the gang of ranks, the attached objects, random state, settings, errors.

``gang.py`` communication between ranks · ``parts.py`` objects given to ``attach()`` · ``pickling.py`` and
``arrays.py`` pickles with an allowlist of types · ``shards.py`` sharded tensors · ``rng.py`` random state ·
``microbatch.py`` how a global batch is cut and summed · ``gradorder.py`` bitwise equal DDP resumes · ``signals.py``
stop requests · ``settings.py`` environment variables · ``beneath.py`` safe access to folders that others can write ·
``headroom.py`` memory that may still be taken · ``errors.py`` errors that a restart cannot fix.

**Machines of different speed.** Each machine's control file keeps its measured seconds per sample. At the next
generation's ``attach()`` the ranks of an elastic job (one whose number of nodes may change) exchange these figures, and
each micro-batch goes to the rank that would finish it first (``microbatch.shares``). The resulting plan lasts one
generation. The cut into micro-batches does not depend on the figures, so the loss curve does not either.
"""
