"""A snapshot and its copies in other regions are one: where it is complete, and what its copies have transferred.

EC2 bills a copy of a volume's snapshot by what has changed since the volume's last snapshot that the region has a copy
of, but tells nobody how much that was. EBS's own API lists the blocks in which two snapshots differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from msgspec import Struct

from spotkeeper.contract import codec, names
from spotkeeper.contract.cloud import DiskSnapshot
from spotkeeper.reconcile.clouds.ec2.api import Api, Ec2RefusedError
from spotkeeper.reconcile.clouds.ec2.schema import Owned, Part, SnapshotIn, by_name
from spotkeeper.reconcile.clouds.http_client import NoAnswerError

MEASURE_S = 3.0  # most of a listing's time: 5 GB of changes fit into a page, and the next listing goes on there
PAGE = 10_000  # blocks, EBS's most
THROTTLED = "RequestThrottledException"

Of = Mapping[str, Mapping[Owned, list[SnapshotIn]]]  # region -> its snapshots of each name, oldest first


class Changes(Part, frozen=True):
    """A page of the answer; the blocks themselves are counted only."""

    changed_blocks: tuple[object, ...] = ()
    block_size: int = 0
    next_token: str = ""


class _Measured(Struct, frozen=True):
    """How far the difference of two snapshots is known."""

    bytes: float = 0.0
    token: str = ""  # of the next page
    whole: bool = False
    refused: bool = False


class Copies:
    """Joins the regions' listings, and remembers what it has measured."""

    def __init__(self, apis: Mapping[str, Api]) -> None:
        self._apis = apis
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], _Measured] = {}  # by the ids of the older and the newer snapshot

    def joined(self, found: Mapping[str, Iterable[SnapshotIn]], stack: str, ends: float) -> tuple[DiskSnapshot, ...]:
        """Return one snapshot for each name, ready if it is complete in any region.

        Args:
            found: region -> its snapshots as EC2 lists them; none of a region that did not answer.
            ends: monotonic time by which the answer is wanted.

        ``gb`` is what its copies have transferred; two processes that could not see each other's copy have made two.
        A copy whose transfer is not measured yet counts as not complete: the older snapshot must stay until it is.
        Where that may not be measured, or there is no older one, a copy counts as all that its snapshot stores.
        """
        of = {region: by_name(items, stack) for region, items in found.items()}
        names_of = dict.fromkeys(owned for shots in of.values() for owned in shots)
        ends = min(ends, time.monotonic() + MEASURE_S)
        return tuple(self._joined(of, owned, stack, ends) for owned in names_of)

    def _joined(self, of: Of, owned: Owned, stack: str, ends: float) -> DiskSnapshot:
        shots = {region: items[owned] for region, items in of.items() if owned in items}
        source = next((region for region, same in shots.items() if not same[0].copied), next(iter(shots)))
        whole = shots[source][0].full_snapshot_size_in_bytes
        regions, transferred = {region: any(shot.complete for shot in same) for region, same in shots.items()}, 0.0
        ready = any(regions.values())
        for region in shots.keys() - {source}:
            measured = self._measured(of, owned, source, region, ends)
            if measured is not None and not measured.whole and not measured.refused:
                regions[region] = False
            size = measured.bytes if measured is not None and measured.whole else whole
            transferred = max(transferred, size * len(shots[region]))
        told = regions if len(self._apis) > 1 else {}
        return DiskSnapshot(names.disk_name(stack, *owned), *owned, ready, (transferred or whole) / 1e9, told)

    def _measured(self, of: Of, owned: Owned, source: str, region: str, ends: float) -> _Measured | None:
        """Return how far the transfer of a copy into ``region`` is known; None: all of the snapshot was transferred."""
        shot, base = of[source][owned][0], _base(of, owned, source, region)
        if base is None:
            return None
        key = (base.snapshot_id, shot.snapshot_id)
        if not shot.complete or not self._lock.acquire(blocking=False):
            return self._known.get(key, _Measured())
        try:
            known = self._known.get(key, _Measured())
            while not known.whole and not known.refused and time.monotonic() < ends:
                known = self._known[key] = self._page(source, key, known, ends)
        except NoAnswerError:
            pass  # the next listing goes on
        finally:
            self._lock.release()
        return self._known.get(key, _Measured())

    def _page(self, source: str, key: tuple[str, str], known: _Measured, ends: float) -> _Measured:
        query = {"FirstSnapshotId": key[0], "SecondSnapshotId": key[1], "MaxResults": PAGE}
        try:
            more = {"NextToken": known.token} if known.token else {}
            page = codec.convert(self._apis[source].blocks(query | more, ends), Changes)
        except Ec2RefusedError as error:
            if error.code == THROTTLED or error.status >= 500:
                raise NoAnswerError(str(error)) from error
            return _Measured(refused=True)
        size = known.bytes + len(page.changed_blocks) * page.block_size
        return _Measured(size, page.next_token, not page.next_token)


def _base(of: Of, owned: Owned, source: str, region: str) -> SnapshotIn | None:
    """Return the volume's newest older snapshot that has a complete copy in ``region``, or None."""
    shot, copy = of[source][owned][0], of[region][owned][0]
    older = [
        one
        for other, (one, *_) in of[source].items()
        if other[:2] == owned[:2]
        and one.volume_id == shot.volume_id
        and one.complete
        and one.age < shot.age
        and any(there.complete and there.age < copy.age for there in of[region].get(other, ()))
    ]
    return max(older, key=lambda one: one.age, default=None)
