"""What the ledger says that jobs cost, against what was billed: the worst of two clouds.

* the simulated cloud, whose function is killed before or after every fourth of its effects, in twelve stories;
* the one-machine cloud, which bills as Google does (agent/spotkeeper/local/bill.py): spot at a market's price that
  changes, one machine taken away without a word.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # both clouds' stories lie with the tests

from spotkeeper.reconcile.store import open_store  # noqa: E402
from spotkeeper.report.money import money  # noqa: E402
from spotkeeper.spec import names  # noqa: E402
from spotkeeper.spec.job import Ask, AskKind  # noqa: E402
from spotkeeper.spec.record import Phase  # noqa: E402

from tests.local import test_money as local  # noqa: E402
from tests.sim.scenarios import SCENARIOS, perform  # noqa: E402
from tests.sim.test_crash_points import effects  # noqa: E402
from tests.sim.test_ledger import books  # noqa: E402

EVERY = 4
SCALE = 120.0  # a process takes real milliseconds to end, which are this many times as long on the bill
GOAL_PERCENT = 1.0


def simulated() -> tuple[float, int]:
    """Percent, the worst; and how many plays."""
    errors = []
    for number, scenario in enumerate(SCENARIOS):
        points = effects(perform(scenario))[number % EVERY :: EVERY]
        errors += [books(scenario, at).error_percent for at in points]
    return max(errors), len(errors)


def real() -> float:
    """Percent, of a job on the one-machine cloud from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="sk-bench-") as folder, local.a_cloud(Path(folder), SCALE) as cloud:
        run = local.Run(cloud, open_store(f"sqlite://{folder}/bucket.db"))
        began = cloud.clock.now()
        run.submit()
        run.wait(Phase.RUN)
        run.until(began + 2.2 * local.GAP_S)
        victim = run.record().ranks[1].cur
        assert victim is not None
        cloud.preempt(names.vm_name(local.STACK.stack, local.JOB, 1, victim.attempt), notice=False)
        run.until(began + 5.5 * local.GAP_S)
        run.wait(Phase.RUN)
        run.store.put_ask(local.JOB, Ask("cancel-1", AskKind.CANCEL, cloud.clock.now(), "bench"))
        run.wait(Phase.DONE)
        later = run.ask_prices()
        billed: float = cloud.bill().bill.spent
        return 100.0 * abs(money(run.ledger(), local.STACK, later, run.prices()).spent - billed) / billed


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    logging.disable(logging.CRITICAL)  # a function that is killed logs of it
    try:
        (worst, plays), here = simulated(), real()
    finally:
        logging.disable(logging.NOTSET)
    error = max(worst, here)
    return [
        {
            "name": "ledger.error_percent",
            "value": round(error, 4),
            "unit": "%",
            "goal": f"<= {GOAL_PERCENT:g}",
            "holds": error <= GOAL_PERCENT,
            "against": f"the bill: {here:.4f} % on the one-machine cloud, {worst:.4f} % at most of {plays} runs of the "
            "simulated one, in each of which the function was killed at another point",
        }
    ]


if __name__ == "__main__":
    print(figures()[0])
