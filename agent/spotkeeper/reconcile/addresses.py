"""Which addresses our machines may have. A master address is the one listed for that member, and inside these.

Nobody can make a gang dial elsewhere: not with a body (none holds an address), and not with a listing.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

ENV = "SPOTKEEPER_ADDRESSES"
# RFC 1918 and unique local IPv6. Not `is_private`: that counts loopback, link-local (metadata) and documentation in.
PRIVATE = "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fc00::/7"
LOOPBACK = "127.0.0.0/8"  # of the one-machine cloud


class Addresses:
    """``text``: networks, comma-separated.

    Raises:
        ValueError: one of them is no network; the text names the setting.
    """

    def __init__(self, text: str = PRIVATE) -> None:
        try:
            self._networks: tuple[IPv4Network | IPv6Network, ...] = tuple(
                ip_network(part.strip()) for part in text.split(",") if part.strip()
            )
        except ValueError as error:
            raise ValueError(f"{ENV}={text!r}: {error}; want networks such as {PRIVATE}") from None
        self.holds = lru_cache(20_000)(self._holds)  # a fleet is listed every minute

    def _holds(self, text: str) -> bool:
        """Whether it is written as an address, and one of ours. Names, ports and zone ids are not addresses."""
        try:
            address: IPv4Address | IPv6Address = ip_address(text)
        except ValueError:
            return False
        return (
            str(address) == text
            and "%" not in text
            and any(address in network for network in self._networks if network.version == address.version)
        )
