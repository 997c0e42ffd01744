"""``spotkeeper exporter``: a stack's state as Prometheus metrics, and recoveries as OpenTelemetry traces.

``reading.py`` reads the bucket at a bounded pace · ``families.py`` makes metric families of a reading (pure) ·
``server.py`` serves them · ``spans.py`` makes and sends traces
"""
