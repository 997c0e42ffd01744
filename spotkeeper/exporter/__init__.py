"""``spotkeeper exporter``: a stack's state as Prometheus metrics.

``reading.py`` reads the bucket at a bounded pace · ``families.py`` makes metric families of a reading (pure) ·
``server.py`` serves them
"""
