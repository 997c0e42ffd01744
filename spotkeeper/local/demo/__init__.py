"""`make demo`: runs the example job from start to end on this computer while its VMs are preempted.

``chaos`` preempts machines, ``proof`` measures training and checks the weights, ``__main__`` runs both.
"""
