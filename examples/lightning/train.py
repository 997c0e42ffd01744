"""Lightning on machines that come and go, with one extra line.

python train.py --steps 100                               # alone, on a laptop
torchrun --nproc-per-node 2 train.py --steps 100          # DDP
spotkeeper submit job.yaml
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from spotkeeper.train.lightning import SpotkeeperCallback


class Net(pl.LightningModule):
    """Finds the brightest of ten rows of an image."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(100, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        time.sleep(self.step_s)  # like a larger model's step
        images, rows = batch
        loss = nn.functional.cross_entropy(self.layers(images), rows)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.0)
    args = parser.parse_args()
    pl.seed_everything(0)
    images = torch.randn(2048, 10, 10)
    data = TensorDataset(images, images.sum(2).argmax(1))
    spotkeeper = SpotkeeperCallback()
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))  # number of machines, set by torchrun
    trainer = pl.Trainer(
        accelerator="auto",
        strategy="ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=nodes,
        max_steps=args.steps,
        callbacks=[spotkeeper],  # <- the one line
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    net = Net(args.step_s)
    trainer.fit(net, DataLoader(data, batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        output = Path(os.environ.get("SPOTKEEPER_OUTPUT", "output"))  # fetched by `spotkeeper download lightning`
        output.mkdir(exist_ok=True)
        torch.save(net.state_dict(), output / "model.pt")
        print(f"{trainer.global_step} steps, loss {float(trainer.callback_metrics['loss']):.4f}", flush=True)


if __name__ == "__main__":
    main()
