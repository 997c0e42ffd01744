"""Processes that have torch from their first moment: forked from a server of which each test process has one."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.run", "torch.distributed.launcher.api", "spotkeeper.train.loop.run"]
)
