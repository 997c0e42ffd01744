"""Signs of broken hardware that a crash may leave, as agents say them and people read them."""

from __future__ import annotations

from enum import Enum


class Sign(str, Enum):
    """What was found. All but NETWORK speak of the very machine that found it.

    NETWORK is what every survivor of a gang prints as well when a peer dies, so it means something
    only where one machine alone has it.
    """

    MEMORY = "memory"
    LOST = "lost"
    FAULT = "fault"
    DRIVER = "driver"
    HOST = "host"
    NETWORK = "network"


WORDS = {
    Sign.MEMORY: "an uncorrectable memory error of a GPU",
    Sign.LOST: "a GPU that cannot be reached",
    Sign.FAULT: "a GPU that fails on its instructions",
    Sign.DRIVER: "a GPU error told by the driver (Xid)",
    Sign.HOST: "a machine check or disk error told by the kernel",
    Sign.NETWORK: "an NCCL error of its network",
}


def parse(value: str) -> Sign | None:
    """The sign a fact's value stands for; None where it makes no sense."""
    return next((sign for sign in Sign if sign.value == value), None)
