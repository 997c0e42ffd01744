"""Imported last by a server of forks: what it has imported lives for ever, and forks that collect garbage skip it.

Else each collection looks at a million objects, and copies the pages of all.
"""

import gc

gc.collect()
gc.freeze()
