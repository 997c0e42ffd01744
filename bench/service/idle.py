"""Cost of an idle stack, from the resources that the example stacks declare and the calls of a tick."""

from __future__ import annotations

from collections import Counter

from infra import idle
from spotkeeper.cli.stacks.render import plan
from spotkeeper.cli.stacks.stackfile import CHECKOUT, read_stack_file

GOAL_USD = 3.0


def figures() -> list[dict[str, object]]:
    return [figure(cloud) for cloud in ("gcp", "aws")]


def figure(cloud: str) -> dict[str, object]:
    file = CHECKOUT / "infra" / "stacks" / f"Pulumi.example-{cloud}.yaml"
    declared = Counter(one.type for one in plan(file, None))
    lines = idle.idle(read_stack_file(file, None, "").settings, declared)
    usd = round(idle.total(lines), 2)
    return {
        "name": f"idle.{cloud}_usd_month",
        "value": usd,
        "unit": "USD",
        "goal": f"<= {GOAL_USD:g}",
        "holds": usd <= GOAL_USD,
        "against": "; ".join(f"{line.what} {line.usd:.2f}" for line in lines) + "; static machines bill beside it",
    }


if __name__ == "__main__":
    for each in figures():
        print(f"{each['name']} {each['value']}  ({each['against']})")
