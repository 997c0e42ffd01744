"""Many ticks leave no descriptor and no thread open; ``bench/job/leak.py`` measures half an hour of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from bench.job.leak import UNFINISHED, Crowd, Sample, processes, sample, stack_file
from spotkeeper.client.target import STACK, local_target, local_token
from spotkeeper.local import deploy
from spotkeeper.local.lifecycle.cloud import LocalCloud

WARM, TICKS = 10, 30


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[tuple[LocalCloud, Crowd]]:
    """Twenty jobs that wait, because no zone has capacity: only ticks run."""
    cloud = LocalCloud.up(tmp_path / "cloud", scale=1.0, seed=1)
    try:
        for zone in cloud.config.zones:
            cloud.set_capacity(zone, 0)
        deploy.up(STACK, stack_file(tmp_path, UNFINISHED), cloud, cloud.folder / "deploy", engine="in-process")
        yield cloud, Crowd(cloud, tmp_path)
    finally:
        cloud.down(purge=True)


def ticked(cloud: LocalCloud, times: int) -> dict[str, Sample]:
    """Open descriptors and threads after some ticks."""
    target = local_target(cloud.folder)
    url = target.state(target.store()).function_url
    headers = {"Authorization": f"Bearer {local_token(target, url)}"}
    for _ in range(times):
        answer = requests.post(f"{url}/v1/tick", headers=headers, timeout=60)
        assert answer.ok and answer.json()["jobs"] == 20 and not answer.json()["failed"], answer.text
    return {process: sample(pids) for process, pids in processes(cloud).items()}


def test_ticks_of_many_jobs_leave_no_descriptor_and_no_thread_behind(crowd: tuple[LocalCloud, Crowd]) -> None:
    cloud, jobs = crowd
    jobs.fill()
    before, after = ticked(cloud, WARM), ticked(cloud, TICKS)
    for process in before:
        # a few connections more are open on a busy machine; a leak would be a descriptor a tick
        assert after[process].descriptors < before[process].descriptors + TICKS / 2, (process, before, after)
        # a pool may start its last thread late; a leak would be a thread a tick
        assert after[process].threads < before[process].threads + TICKS / 10, (process, before, after)
