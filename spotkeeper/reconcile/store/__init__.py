"""The bucket, which has all of a stack's state: documents, compare-and-swap, names of objects.

``store.py`` reads and writes documents, those of ``market.py`` and ``sweeps.py`` too; ``bucket.py`` has what they
share, over ``objects.py``'s interface: ``objects_obstore.py`` (S3, Cloud Storage) or ``objects_sqlite.py`` (the
one-machine cloud; a plain folder has no compare-and-swap). ``paths.py`` has one function or constant per name; no other
file spells a path. ``docs/protocol.md`` lists the documents and who writes them.

The record and the allocation contain their format (``"v":1``), a version and the writer's nonce, by which a writer
recognises its own write if the answer was lost. Above 64 KB they are compressed with zlib, which their first byte shows
(``documents.py``). A process decodes each version once, and asks the bucket at every read whether this version is still
the newest (If-None-Match). Every call ends within its request's deadline (``objects.py``).
"""
