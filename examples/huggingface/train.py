"""Hugging Face's trainer on machines that come and go, with one extra line.

A small GPT-2 with random weights, so that nothing is downloaded.

    python train.py --steps 100                                 # alone, on a laptop
    torchrun --nproc-per-node 2 train.py --steps 100            # DDP
    spotkeeper submit job.yaml
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from spotkeeper.train.huggingface import SpotkeeperCallback

OUTPUT = Path(os.environ.get("SPOTKEEPER_OUTPUT", "output"))  # fetched by `spotkeeper download huggingface`


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences with a constant difference between neighbours."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index % 8 == 0:
            time.sleep(self.step_s)  # one per batch, like a larger model's step
        tokens = (index + (1 + index % 7) * torch.arange(32)) % 128
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir=str(OUTPUT),
            max_steps=args.steps,
            per_device_train_batch_size=8,
            logging_steps=20,
            save_strategy="no",  # the callback saves
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),  # without it, processes without a GPU would not find each other
        ),
        train_dataset=Counting(args.step_s),
        callbacks=[SpotkeeperCallback()],  # <- the one line
    )
    output = trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(str(OUTPUT / "model"))
        print(f"{output.global_step} steps, loss {output.training_loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
