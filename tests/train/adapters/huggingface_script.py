"""A script for Hugging Face's trainer as people write them, with one line of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from spotkeeper.train.huggingface import SpotkeeperCallback
from tests.train.adapters import fate


class Text(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 46

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(12) * (index + 1)) % 61
        return {"input_ids": tokens, "labels": tokens}


class Fate(TrainerCallback):
    def __init__(self, args: Any) -> None:
        self.args = args

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fate.befall(self.args, state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        fate.note(self.args, f"evaluated after {state.global_step}: {metrics['eval_loss']:.9f}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "loss" in logs:
            fate.note(self.args, f"logged after {state.global_step}: {logs['loss']:.6f}")


class Last(TrainerCallback):
    """A callback that changes weights would do so here."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print("a step begins", flush=True)


def main() -> None:
    args = fate.parse()
    config = GPT2Config(vocab_size=61, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        model=None if args.by_init else GPT2LMHeadModel(config),
        model_init=(lambda: GPT2LMHeadModel(config)) if args.by_init else None,
        args=TrainingArguments(
            output_dir=str(args.out.parent / "trainer"),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=args.accumulate,
            num_train_epochs=args.epochs,
            dataloader_num_workers=args.workers,
            learning_rate=3e-3,
            use_cpu=True,
            save_strategy="no",
            eval_strategy="steps" if args.val_every > 1 else "epoch",
            eval_steps=int(args.val_every),
            logging_steps=2,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Text(),
        eval_dataset=Text(),
        callbacks=[Fate(args)] if args.late else [Fate(args), SpotkeeperCallback(), Last()],
    )
    if args.late:
        trainer.add_callback(SpotkeeperCallback())
    output = trainer.train()
    state: list[Any] = [dict(trainer.model.state_dict())]
    if not args.weights_only:
        assert trainer.optimizer is not None and trainer.lr_scheduler is not None
        state += [trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()]
    fate.leave(args, trainer.state.global_step, state, round(output.training_loss, 6))


if __name__ == "__main__":
    main()
