"""Rules on what the stack sends to people (`channels`, `alerts` and `budget` of the stack file).

``checks`` describes their form.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from infra.settings import teams
from infra.settings.both import twice
from infra.settings.model import Settings
from spotkeeper.contract.notification import CHANNEL_NAME, AddressError, check_address, is_public, is_reference
from spotkeeper.contract.parse.problem import Problem, join, problem

EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+\Z")
_ADDRESSES_BYTES = 2500  # Lambda allows 4 KB for all environment variables


def channels(s: Settings) -> Iterator[Problem]:
    """Check names and literal addresses of channels. Messages never repeat an address, which often is a secret."""
    names: set[str] = set()
    for index, channel in enumerate(s.channels):
        path = join("channels", index)
        if not CHANNEL_NAME.match(channel.name):
            yield problem(f"{path}.name", teams.NAME, channel.name)
        elif channel.name in names:
            yield problem(f"{path}.name", "is the name of another channel too", channel.name)
        names.add(channel.name)
        if is_reference(channel.address):
            continue  # checked for each cloud
        try:
            host = check_address(channel.address)[0]
        except AddressError as error:
            yield Problem(f"{path}.address", f"{error}; or name the secret that has the address")
            continue
        if not s.endpoints.compute.startswith("http:") and _is_address(host) and not is_public(host):
            yield Problem(f"{path}.address", "is not a public address, and the function sends to public addresses only")
    if (size := len(s.addresses())) > _ADDRESSES_BYTES:
        told = f"the addresses have {size} bytes, at most {_ADDRESSES_BYTES} fit: put long ones into the secret store"
        yield Problem("channels", told)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def alarms(s: Settings) -> Iterator[Problem]:
    if s.alerts.email and not EMAIL.match(s.alerts.email):
        yield problem("alerts.email", "is not an email address", s.alerts.email)
    if s.alerts.email and not s.alerts.about:
        told = "is empty, so no alarm is sent: remove `about` to get all alarms, or `email` to get none"
        yield Problem("alerts.about", told)
    if s.alerts.missed_minutes < 2 * s.reconcile.tick_minutes:
        least = 2 * s.reconcile.tick_minutes
        yield problem("alerts.missed_minutes", f"is below {least}, the length of two ticks", s.alerts.missed_minutes)
    yield from twice("alerts.about", s.alerts.about)


def budget_steps(s: Settings) -> Iterator[Problem]:
    if s.budget is None:
        return
    if not re.fullmatch(r"[A-Z]{3}", s.budget.currency):
        yield problem("budget.currency", "want a three-letter currency code such as USD", s.budget.currency)
    if not s.budget.alert_at:
        yield Problem("budget.alert_at", "is empty, so no email is sent: remove it to get them at 50, 90 and 100 %")
    yield from twice("budget.alert_at", s.budget.alert_at)
