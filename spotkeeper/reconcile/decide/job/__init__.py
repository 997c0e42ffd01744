"""Pure: decisions about a job as a whole.

``limits.py`` limits launches and spending · ``progress.py`` computes the work done and left, the deadline and the cost,
and the work that a stop lost · ``egress.py`` charges transfers between regions · ``transfer.py`` compares the ways in
which a checkpoint gets there.
"""
