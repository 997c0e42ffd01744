"""Cost of jobs by the ledger against the bill: the worst error on two clouds.

* the simulated cloud, whose function is killed before or after every fourth effect, in twelve stories;
* the one-machine cloud, which bills as Google does (spotkeeper/local/spot_market/bill.py): spot at a changing market
  price, one machine taken away without notice.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the stories are part of the tests

from spotkeeper.contract import names  # noqa: E402
from spotkeeper.contract.job import JobRequest, RequestKind  # noqa: E402
from spotkeeper.contract.record import Phase  # noqa: E402
from spotkeeper.reconcile.store.store import open_store  # noqa: E402
from spotkeeper.report.money.money import money  # noqa: E402
from tests.local.spot_market import test_bill as local  # noqa: E402
from tests.sim.scenarios import SCENARIOS, perform  # noqa: E402
from tests.sim.test_crash_points import effects  # noqa: E402
from tests.sim.test_ledger import books  # noqa: E402

EVERY = 4
SCALE = 120.0  # virtual per real time: a process's last milliseconds are billed this many times
GOAL_PERCENT = 1.0


def simulated() -> tuple[float, int]:
    """Worst error in percent, and the number of runs."""
    errors = []
    for number, scenario in enumerate(SCENARIOS):
        points = effects(perform(scenario))[number % EVERY :: EVERY]
        errors += [books(scenario, at).error_percent for at in points]
    return max(errors), len(errors)


def real() -> float:
    """Error in percent for a job on the one-machine cloud, from start to end."""
    with tempfile.TemporaryDirectory(prefix="sk-bench-") as folder, local.a_cloud(Path(folder), SCALE) as cloud:
        run = local.Run(cloud, open_store(f"sqlite://{folder}/bucket.db"))
        began = cloud.clock.now()
        run.submit()
        run.wait(Phase.RUN)
        run.until(began + 2.2 * local.GAP_S)
        victim = run.record().nodes[1].cur
        assert victim is not None
        cloud.preempt(names.vm_name(local.STACK.stack, local.JOB, 1, victim.attempt), notice=False)
        run.until(began + 5.5 * local.GAP_S)
        run.wait(Phase.RUN)
        run.store.put_request(local.JOB, JobRequest("cancel-1", RequestKind.CANCEL, cloud.clock.now(), "bench"))
        run.wait(Phase.DONE)
        later = run.ask_prices()
        billed: float = cloud.bill().bill.spent
        return 100.0 * abs(money(run.ledger(), local.STACK, later, run.prices()).spent - billed) / billed


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    logging.disable(logging.CRITICAL)  # logs of the killed function
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
