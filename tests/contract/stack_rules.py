"""Rules on ``stack/pools.json`` beyond types: what the Pulumi programs declare must keep them."""

from __future__ import annotations

from collections.abc import Iterator

from spotkeeper.contract.names import POOL_NAME, STACK_NAME
from spotkeeper.contract.parse.problem import Problem, SpecError, join, nearest, problem
from spotkeeper.contract.stack import PoolState, StackState, region_of, template_key


def check_stack(state: StackState) -> StackState:
    """``state`` itself, if what Pulumi wrote makes sense.

    Raises:
        SpecError: everything that does not.
    """
    problems = list(stack_names(state))
    for index, pool in enumerate(state.pools):
        path = join("pools", index)
        for validator in POOL_VALIDATORS:
            problems += [Problem(f"{path}.{p.path}", p.message, p.value, p.hint) for p in validator(pool, state)]
    if problems:
        raise SpecError(problems)
    return state


def stack_names(state: StackState) -> Iterator[Problem]:
    if not STACK_NAME.match(state.stack):
        yield problem("stack", "want a letter, then letters, digits and -, at most 24, all lower case", state.stack)
    seen: set[str] = set()
    for index, pool in enumerate(state.pools):
        path = join(join("pools", index), "name")
        if pool.name in seen:
            yield problem(path, "another pool has this name", pool.name)
        elif not POOL_NAME.match(pool.name):
            yield problem(path, "want a letter, then letters, digits and -, at most 24, all lower case", pool.name)
        seen.add(pool.name)


def pool_zones(pool: PoolState, state: StackState) -> Iterator[Problem]:
    for index, zone in enumerate(pool.zones):
        if zone in pool.zones[:index]:
            yield problem(join("zones", index), "is named twice", zone)
        elif region_of(zone) not in (regions := state.regions or (state.region,)):
            others = [z for z in state.zones() if region_of(z) in regions]
            yield problem(join("zones", index), f"is not a zone of {' or '.join(regions)}", zone, nearest(zone, others))
    for zone in pool.placement:
        if zone not in pool.zones:
            yield problem(join("placement", zone), "is not a zone of this pool", hint=nearest(zone, pool.zones))


def pool_prices(pool: PoolState, state: StackState) -> Iterator[Problem]:
    for zone in pool.zones:
        price = pool.prices.get(zone)
        if price is None:
            yield problem(join("prices", zone), "missing, want the prices of this zone")
        elif price.spot is not None and price.spot > price.on_demand:
            yield problem(join(join("prices", zone), "spot"), "is above the on-demand price", price.spot)
    for zone in pool.prices:
        if zone not in pool.zones:
            yield problem(join("prices", zone), "is not a zone of this pool", hint=nearest(zone, pool.zones))


def pool_kind(pool: PoolState, state: StackState) -> Iterator[Problem]:
    """A spot pool needs templates, a static one its nodes; neither may have the other's."""
    if pool.max_on_demand > pool.max_machines:
        yield problem("max_on_demand", f"is above max_machines ({pool.max_machines})", pool.max_on_demand)
    regions = [region for region in state.regions or (state.region,) if region in map(region_of, pool.zones)]
    spot, bought = (
        [template_key(model, each, next(iter(state.regions), state.region)) for each in regions]
        for model in ("spot", "on-demand")
    )
    for key in pool.templates:
        if key not in (*spot, *bought):
            yield problem(join("templates", key), "is no model", hint=nearest(key, (*spot, *bought)))
    if pool.kind == "spot":
        for key in spot:
            if key not in pool.templates:
                yield problem(f"templates.{key}", "missing, want the template's link")
        for key in bought if pool.max_on_demand else ():
            if key not in pool.templates:
                yield problem(f"templates.{key}", "missing, but max_on_demand is above 0")
        if pool.machines:
            yield problem("machines", "only a static pool has machines", len(pool.machines))
        return
    if len(pool.machines) != pool.max_machines:
        yield problem("machines", f"has {len(pool.machines)} entries, but max_machines is {pool.max_machines}")
    for index, machine in enumerate(pool.machines):
        if machine.zone not in pool.zones:
            path = join(join("machines", index), "zone")
            yield problem(path, "is not a zone of this pool", machine.zone, nearest(machine.zone, pool.zones))


def pool_ec2(pool: PoolState, state: StackState) -> Iterator[Problem]:
    """On AWS a spot pool can be had in each of its zones, from a template at one version."""
    if state.cloud != "aws" or pool.kind != "spot":
        return
    for zone in pool.zones:
        if zone not in pool.subnets:
            yield problem(join("subnets", zone), "missing, want the subnet of this zone")
    for model in pool.templates:
        if model not in pool.template_versions:
            yield problem(join("template_versions", model), "missing, want the version of its launch template")


POOL_VALIDATORS = (pool_zones, pool_prices, pool_kind, pool_ec2)
