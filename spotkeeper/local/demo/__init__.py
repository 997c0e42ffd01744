"""`make demo`: runs the example job from start to end on one machine while machines are preempted.

``chaos`` preempts machines, ``watcher`` measures training, ``proof`` checks the weights, ``__main__`` runs all.
"""
