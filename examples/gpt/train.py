"""A byte-level GPT on text that every machine has: the Python standard library's source.

    python train.py --steps 50                              # alone, on a laptop
    torchrun --nproc-per-node 3 train.py --steps 50         # DDP
    spotkeeper submit job.yaml                              # on machines that come and go

The two lines that make it survive preemption are marked, and the one that keeps its model. All else is plain PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import spotkeeper

VOCABULARY = 256  # bytes


def read_text(limit: int) -> bytes:
    """The first ``limit`` bytes of the standard library, files in a fixed order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


class Windows(Dataset[Tensor]):
    """Non-overlapping windows of the text, each with the byte that follows it: int64 [context + 1]."""

    def __init__(self, text: bytes, context: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return self._text[start : start + self._context + 1].long()


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and beside a residual."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, dim)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Maps bytes to the loss of the next byte. Input and output embeddings are tied."""

    def __init__(self, dim: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, window: Tensor) -> Tensor:
        inputs, targets = window[:, :-1], window[:, 1:]
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


def digest(model: nn.Module) -> str:
    """A hash of all weights: equal only if every bit is."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of one window")
    parser.add_argument("--batch", type=int, default=8, help="windows of one rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SPOTKEEPER_SEED", "0")))
    parser.add_argument("--text-bytes", type=int, default=2_000_000)
    parser.add_argument("--device", default="cpu", help="torch's name of it, such as cuda")
    parser.add_argument("--nice", type=int, default=0, help="leave the cores of a shared machine to others")
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds a step takes at least, as a larger model's")
    return parser.parse_args()


def main() -> None:
    args = parse()
    os.nice(args.nice)
    torch.set_num_threads(1)  # bitwise results want the same number everywhere
    torch.manual_seed(args.seed)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("gloo")

    gpt = GPT(args.dim, args.layers, args.heads, args.context, dropout=0.1).to(args.device)
    model = DistributedDataParallel(gpt) if distributed else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loader = DataLoader(Windows(read_text(args.text_bytes), args.context), batch_size=args.batch, shuffle=True)

    run = spotkeeper.attach(model=model, optimizer=optimizer, scheduler=scheduler)  # <- the first line
    for window in run.steps(loader, steps=args.steps):  # <- the second
        began = time.monotonic()
        loss = model(window.to(args.device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        time.sleep(max(0.0, began + args.step_s - time.monotonic()))
        if run.rank == 0 and run.steps_done % 50 == 0:
            print(f"step {run.steps_done}  loss {loss.item():.4f}", flush=True)

    if run.rank == 0:
        sha = digest(gpt)
        print(f"{run.steps_done} steps, weights {sha}", flush=True)
        torch.save(gpt.state_dict(), run.output / "model.pt")  # <- fetched by `spotkeeper download gpt`
        (run.output / "model.sha256").write_text(sha + "\n")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
