"""Building blocks of the library: the gang of ranks, the attached objects, random state, settings, errors.

``gang.py`` communication between ranks · ``parts.py`` objects given to ``attach()`` · ``pickling.py`` and
``arrays.py`` pickles with an allowlist of types · ``shards.py`` sharded tensors · ``rng.py`` random state ·
``microbatch.py`` how a global batch is cut and summed · ``gradorder.py`` bitwise DDP resumes · ``signals.py`` stop
requests · ``settings.py`` environment variables · ``beneath.py`` safe access to folders that others can write ·
``errors.py`` errors that a restart cannot fix.

**Machines of different speed.** Each machine's seconds per sample stay in its control file. At the next generation's
``attach()`` the ranks of an elastic job exchange them, and each micro-batch goes to the rank that would finish it first
(``microbatch.shares``). They are stored nowhere else: a plan lasts one generation. The cut into micro-batches does not
depend on them, so neither does the loss curve.
"""
