"""Data: the order of samples, and a run's place in it.

``sampler.py`` rebuilds a loader over an order that depends only on seed and epoch · ``feed.py`` yields batches,
starting at the run's position. ``core/signals.py`` shields loader workers from stop signals.
"""
