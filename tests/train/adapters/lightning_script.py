"""A Lightning script as people write them, with one line of ours."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from spotkeeper.train.lightning import SpotkeeperCallback
from tests.train.adapters import fate


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same samples for every rank, without indices."""

    def __iter__(self) -> Any:
        data = fate.Images(40, noisy=False)
        return (data[index] for index in range(40))


class Net(pl.LightningModule):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x))).mean((2, 3))))

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch["pixels"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val", nn.functional.cross_entropy(self(batch["pixels"]), batch["labels"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.args.asks_total:
            assert self.trainer.estimated_stepping_batches > 0
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}, {"scheduler": plateau, "monitor": "val"}]


class Fate(pl.Callback):
    def __init__(self, args: Any) -> None:
        self.args = args

    def on_train_batch_end(self, trainer: pl.Trainer, *given: Any) -> None:
        print(f"batch {given[-1]} ends", flush=True)
        fate.befall(self.args, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            print("a validation ends", flush=True)
            fate.note(self.args, f"validated after {trainer.global_step}: {trainer.callback_metrics['val']:.9f}")

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        fate.note(self.args, f"epoch {trainer.current_epoch} began after {trainer.global_step}")


def main() -> None:
    args = fate.parse()
    pl.seed_everything(7)
    world = 1 if args.unaware else int(os.environ["WORLD_SIZE"])
    data = Stream() if args.iterable else fate.Images(46, noisy=True)
    loader = DataLoader(data, 4, shuffle=None if args.iterable else True, num_workers=args.workers)
    net = Net(args)
    averaging = [WeightAveraging()] if args.averaged else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1 if args.unaware else int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp" if world > 1 else "auto",
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        val_check_interval=args.val_every if args.val_every == 1.0 else int(args.val_every),
        callbacks=[Fate(args), SpotkeeperCallback(), *averaging],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader, DataLoader(fate.Images(10, noisy=False), 4))
    states = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    logged = trainer.fit_loop.epoch_loop._batches_that_stepped
    fate.leave(args, trainer.global_step, dict(net.state_dict()), trainer.optimizers[0].state_dict(), states, logged)


if __name__ == "__main__":
    main()
