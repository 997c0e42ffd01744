"""Notifications: a stack's channels, the events that a channel can get, and the documents of messages to send.

The stack file declares channels and their addresses; a job file only names channels. So a job cannot make the function
send requests to an address of its choice.
"""

from __future__ import annotations

import ipaddress
import re
from enum import Enum
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

CHANNEL_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,30}[a-z0-9])?\Z")
MAX_ADDRESS = 2000  # characters; addresses of Teams workflows have about 300

GCP_SECRET, AWS_SECRET, AWS_PARAMETER = "gcp-secret://", "aws-secret://", "aws-parameter://"
_GCP = re.compile(r"gcp-secret://(projects/[-a-z0-9:.]{1,63}/secrets/[-A-Za-z0-9_]{1,255})/versions/(latest|[0-9]+)\Z")
_AWS = re.compile(r"aws-secret://(arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[-A-Za-z0-9/_+=.@]{1,519})\Z")
_SSM = re.compile(r"aws-parameter://(arn:[a-z-]+:ssm:[a-z0-9-]+:[0-9]{12}:parameter/[-A-Za-z0-9/_.]{1,1011})\Z")
_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*\Z")

ChannelKind = Literal["slack", "teams", "discord", "webhook"]


class NotifyEvent(str, Enum):
    """The events of a job about which a channel can get notifications."""

    STARTED = "started"  # the first generation trains
    FIRST_CHECKPOINT = "first-checkpoint"  # the first checkpoint is durable
    ON_DEMAND = "on-demand"  # an on-demand fallback began
    HOLD = "hold"  # the job is on hold, for whatever reason
    RESUMED = "resumed"  # the job trains again after a hold
    OVER_BUDGET = "over-budget"  # the job has spent its `max_usd` and is on hold
    FINISHED = "finished"  # the job succeeded or was cancelled
    FAILED = "failed"  # the job failed: it ended, or is on hold until someone corrects its code


# A channel's default: events after which a person may have to act, and the end.
USUAL_EVENTS = (NotifyEvent.HOLD, NotifyEvent.OVER_BUDGET, NotifyEvent.FINISHED, NotifyEvent.FAILED)


class ChannelState(Struct, frozen=True, forbid_unknown_fields=True):
    """A channel in ``stack/pools.json``, which submitters may read. Only the function knows the channel's address."""

    name: str
    kind: ChannelKind
    events: tuple[NotifyEvent, ...] = USUAL_EVENTS  # of jobs whose file does not name this channel


class Notification(Struct, frozen=True, omit_defaults=True):
    """What happened to a job, what it has cost, and what the reader can do.

    ``id`` is the same each time the notification is sent. ``events``: first what happened, then what that includes; for
    example, a job over its budget is on hold too. A channel gets the notification if it wants one of these events.
    """

    id: str
    events: tuple[NotifyEvent, ...]  # empty: a test message
    at: float  # virtual unix seconds
    stack: str
    job: str  # the id
    name: str
    text: str
    todo: str = ""
    spent_usd: float | None = None
    usd_per_hour: float | None = None


class Outgoing(Struct, frozen=True, omit_defaults=True):
    """``notifications/<id>``: a notification that is not yet sent to all channels that want it.

    Attributes:
        tries: how often a process began to send it.
        not_before: when the next process may send it, virtual unix seconds.
        left: channels that still lack it; None: all that want it.
    """

    notification: Notification
    tries: Annotated[int, Meta(ge=0)] = 0
    not_before: float = 0.0
    left: tuple[str, ...] | None = None


class AddressError(ValueError):
    """An address of a channel is not allowed. The message never contains the address, which can be a secret."""


def secret_of(address: str, scheme: str) -> str | None:
    """Return the name or ARN in a reference of this scheme (``GCP_SECRET``, ...); None for any other address."""
    pattern = {GCP_SECRET: _GCP, AWS_SECRET: _AWS, AWS_PARAMETER: _SSM}[scheme]
    found = pattern.match(address)
    return found[1] if found else None


def is_reference(address: str) -> bool:
    """Return whether ``address`` refers to an entry of the cloud's secret store, which has the address itself."""
    return address.startswith((GCP_SECRET, AWS_SECRET, AWS_PARAMETER))


def check_address(address: str) -> tuple[str, int, str]:
    """Return host, port and request target of an https address after checking its form.

    Raises:
        AddressError: it is not https, has a user, or its host is not a plain name or address.
    """
    if len(address) > MAX_ADDRESS or not address.isascii() or not address.isprintable() or " " in address:
        raise AddressError(f"want an https address of at most {MAX_ADDRESS} printable characters")
    try:
        parts = urlsplit(address)
        host, port = (parts.hostname or "").lower(), parts.port or 443
    except ValueError:
        raise AddressError("is not an address: want an https address") from None
    if parts.scheme != "https":
        raise AddressError("want an https address")
    if "@" in parts.netloc:
        raise AddressError("must not contain a user or password")
    if not host or not (_HOST.match(host) or _is_ip(host)):
        raise AddressError("has no valid host name")
    return host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host


_V6_GLOBAL = ipaddress.IPv6Network("2000::/3")
_V6_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_V4_SPECIAL = tuple(
    map(
        ipaddress.IPv4Network,
        ("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "224.0.0.0/3"),
    )
)


def is_public(text: str) -> bool:
    """Return whether an IP address is a public unicast address.

    Private, loopback, link-local (the metadata server), shared, multicast and reserved addresses are not, nor are
    IPv6 addresses that contain an IPv4 address (mapped, 6to4, Teredo, NAT64).
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        return address in _V6_GLOBAL and address.is_global and not any(address in net for net in _V6_EMBEDDING)
    return address.is_global and not address.is_multicast and not any(address in net for net in _V4_SPECIAL)
