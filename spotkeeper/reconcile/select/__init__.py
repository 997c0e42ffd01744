"""Chooses which machine to buy next and where, and keeps the observations of the market for that choice.

``offers.py`` applies the rule in ``rule.py`` to a stack's offers and observations (pure) · ``zone_history.py`` how
long spot lasts in a zone (pure) · ``market.py`` reads and feeds the bucket's ``market/`` · ``player.py`` plays recorded
markets. ``docs/selection.md`` explains the rule and its figures.

All of ``market/`` is advisory. A missing, old or unreadable value there counts as unknown, never as zero, and reading
delays a round by at most two seconds.

* ``market/prices/<pool>``: the prices of the pool's spot machines, and the cloud's own estimates of its zones. A cloud
  is asked once an hour for each pool, whether it answers or not: the question is noted before it is sent. A choice
  uses a price at most a day old, otherwise the stack file's. An intent records the price it was made at. Costs
  integrate these prices over each machine's time, so they follow the bill: a change of price shows up to an hour
  late, and a machine counts until the listing that no longer has it.
* ``market/hours/<pool>/<hour>``: what happened to the pool's machines by the ledgers of all jobs (launched, refused,
  noticed, lost, released), one small object per hour, kept 90 days. A machine is named by its attempt, so a repeated
  round writes the same.
* ``market/past/<pool>``: all hours before, folded: by zone, since when spot is available, how often it was lost
  against what its age made expect, how long boots take. Two days halve the weight of what was seen. A tick reads
  this and the newest two hours, so a loss changes the next choice.

A *preemption* is one thing everywhere (``contract.market.Fate``): a spot machine that had joined and that the cloud
took, or was about to take when it was given up. It is announced if a notice stood then; a withdrawn notice does not
count.
"""
