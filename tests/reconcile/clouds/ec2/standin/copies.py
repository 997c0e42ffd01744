"""What copies of snapshots transfer: the blocks in which two of them differ, as EBS's own API lists them."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

from tests.reconcile.clouds.ec2.standin.protocol import Ec2Error
from tests.reconcile.clouds.ec2.standin.site import LostError, Site
from tests.reconcile.clouds.ec2.standin.things import BLOCK, Snapshot


def transferred_gb(there: Site, shot: Snapshot) -> float:
    """What a new copy in the region ``there`` is billed for: what has changed since the volume's last copy there."""
    before = [
        one for one in there.snapshots.values() if one.copied and one.origin == shot.origin and one.key == shot.key
    ]
    last = max((one for one in before if one.state == "completed"), key=lambda one: (one.started, one.id), default=None)
    return len(_changed(last, shot)) * BLOCK / 1e9


def ebs(site: Site, url: str, pages: int) -> tuple[int, bytes]:
    """ListChangedBlocks: ``GET /snapshots/SECOND/changedblocks?firstSnapshotId=FIRST``, ``pages`` blocks at once.

    Raises:
        LostError: no answer comes.
    """
    parts = urlsplit(url)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    try:
        fault = site.admit("ListChangedBlocks")
        answer = _changed_blocks(site, parts.path.split("/")[2], query, pages)
        if fault is not None:
            raise LostError("ListChangedBlocks")
    except Ec2Error as error:
        return error.status, json.dumps({"__type": error.code, "message": str(error)}).encode()
    return 200, json.dumps(answer).encode()


def _changed_blocks(site: Site, second: str, query: dict[str, str], pages: int) -> dict[str, object]:
    found = [site.snapshots.get(each) for each in (query["firstSnapshotId"], second)]
    first, last = found
    if first is None or last is None:
        raise Ec2Error("ResourceNotFoundException", "The snapshot does not exist.", 404)
    if first.state != "completed" or last.state != "completed" or first.origin != last.origin:
        raise Ec2Error("ValidationException", "not two complete snapshots of one volume", 400)
    at, size = int(query.get("pageToken") or 0), min(pages, int(query.get("maxResults") or pages))
    changed = _changed(first, last)
    more = {"NextToken": str(at + size)} if at + size < len(changed) else {}
    blocks = [{"BlockIndex": block, "SecondBlockToken": "AAAA"} for block in changed[at : at + size]]
    return {"ChangedBlocks": blocks, "ExpiryTime": 0.0, "VolumeSize": last.size, "BlockSize": BLOCK, **more}


def _changed(first: Snapshot | None, last: Snapshot) -> list[int]:
    before = first.blocks if first is not None else {}
    return [block for block, written in sorted(last.blocks.items()) if before.get(block) != written]
