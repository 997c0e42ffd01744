"""Chooses which machine to buy next and where, and keeps the observations of the market for that choice.

``offers.py`` applies the rule in ``rule.py`` to a stack's offers and observations (pure) · ``zone_history.py`` how
long spot lasts in a zone (pure) · ``market.py`` reads and writes ``market/`` in the bucket · ``player.py`` applies the
rule to recorded markets. ``docs/selection.md`` explains the rule and its parameters.

All of ``market/`` is advisory. A missing, old or unreadable value there counts as unknown, never as zero, and reading
``market/`` delays a round by at most two seconds.

* ``market/prices/<pool>``: the prices of the pool's spot machines, and the cloud's own estimates of its zones. A cloud
  gets at most one request an hour for each pool, even if it does not answer, since a request is noted before it is
  sent. A choice uses a price that is at most a day old, otherwise the stack file's. An intent records the price at
  which it was made. Costs are these prices, summed over each machine's time. They differ little from the bill: a change
  of price counts up to an hour late, and a machine counts until it is missing from a listing.
* ``market/hours/<pool>/<hour>``: what happened to the pool's machines according to the ledgers of all jobs (launched,
  refused, noticed, lost, released), one small object per hour, kept 90 days. A machine is named by its attempt, so a
  repeated round writes the same observations.
* ``market/past/<pool>``: a summary of all earlier hours: for each zone since when spot is available, and its losses
  relative to those expected; for the pool how long boots take. An observation's weight halves every two days. A tick
  reads this summary and the newest two hours, so a loss changes the next choice.

A *preemption* means the same everywhere (``contract.market.Fate``): the cloud took a spot machine that had been
admitted, or was about to take it when the job gave it up. A preemption is *announced* if a notice was in force when
the machine went; a withdrawn notice does not count.
"""
