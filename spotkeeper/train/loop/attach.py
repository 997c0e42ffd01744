"""``attach()``: what a training script calls once, to restore the newest checkpoint and get its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spotkeeper.train.core.parts import Attached
from spotkeeper.train.loop import diagnostics
from spotkeeper.train.loop.run import Run

__all__ = ["Run", "attach"]


def attach(
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    scaler: Any = None,
    ema: Any = None,
    checkpoint_dir: Path | str | None = None,
    seed: int | None = None,
    global_batch: int | None = None,
    **parts: Any,
) -> Run:
    """Restore the newest checkpoint that any rank has, and return the run. Collective.

    Call it once per script, after the process group, DDP and the optimizer exist. On return all objects and the random
    state are as they were at the checkpoint; in a new run nothing changes.

    Args:
        model: the module that is trained: in DistributedDataParallel, sharded by ``fully_shard``, compiled, or plain.
        optimizer: one optimizer, or a list or dict of several in a fixed order. The run counts the first one's steps.
        scheduler, scaler, ema, **parts: objects with ``state_dict`` and ``load_state_dict``, whose state is the same on
            all ranks (except the scaler's); random generators of torch, NumPy and Python; dicts, lists and dataclasses
            of numbers. Each rank keeps its own generators and numbers.
        checkpoint_dir: checkpoint folder of a run outside Spotkeeper. Default ``.spotkeeper/ckpt/<script>``. In a
            Spotkeeper job the agent sets the folder.
        seed: seed of the order of samples. Default ``SPOTKEEPER_SEED``, else 0.
        global_batch: samples of all ranks per optimizer step, for any number of ranks. The loader's batches become
            micro-batches, and the script calls ``run.backward`` and ``run.step``. Default in a job whose number of
            nodes may change, or whose machines differ: the loader's batch size x the ranks at its largest size.

    Returns:
        The run, to be looped over with ``run.steps(loader)``.

    Raises:
        PartError: an object has no state to save; the message names the argument.
        AttachError: nothing was given to save; the checkpoint belongs to another model or other objects; or the number
            of ranks may change and the model or optimizer does not support that.
        CallError: several ranks run without a process group, or ``attach`` was called before.
        RuntimeError: another run uses the checkpoint folder.

    Example::

        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        run = spotkeeper.attach(model=model, optimizer=optimizer)
        for images, labels in run.steps(loader, epochs=90):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.report(loss=loss)
    """
    given = Attached.of(model, optimizer, scaler, {"scheduler": scheduler, "ema": ema} | parts)
    diagnostics.check_given(given)
    return Run(given, checkpoint_dir, seed, global_batch)
