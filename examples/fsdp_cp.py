"""Plain PyTorch: FSDP2, context parallelism and MuonClip, with checkpoints that resume.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_cp.py                  # CPUs: gloo
    torchrun --standalone --nproc-per-node 8 examples/fsdp_cp.py --cp 4 --out runs/fsdp_cp
    ... --recompute --compile

Ranks form a mesh (dp, cp): ranks of one dp row share each packed batch of documents by tokens, rows
have batches of their own, and parameters are sharded over all ranks. With --out, checkpoints go
there (torch.distributed.checkpoint), and the same command goes on from the last one.

b documents end to end are t tokens over all ranks of a row; h heads of d channels.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from keel.distributed import AttnKey, MaxLogitsTracker, calc_attn, dispatch, varlen_key
from keel.nn.gpt import rotated, rotation
from keel.nn.max_logits import KeepsMaxLogits
from keel.optim import MuonClip

DIGITS = 8


class Attention(KeepsMaxLogits, nn.Module):
    """Tokens of this rank (t / cp, size) over those of all ranks that the key knows."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, size // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(size, size, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, key: AttnKey) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        turn = rotation(key.position_ids(x.device), self.head_dim, base=10_000.0)
        q, k = rotated(q, turn), rotated(k, turn)
        maxima = MaxLogitsTracker()  # MuonClip takes the maximum over ranks, once a step
        out, _ = calc_attn(q, k, v, key, defer_max_logits=maxima)
        for top in maxima.local():
            running = self.running_maximum(self.num_heads, q)
            if running is not None:
                torch.maximum(running, top, out=running)
        y: torch.Tensor = self.o_proj(out.flatten(1))
        return y


class Block(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.attention = Attention(size, num_heads)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: torch.Tensor, key: AttnKey) -> torch.Tensor:
        x = x + self.attention(self.norm(x), key)
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.recompute = args.recompute
        self.embedding = nn.Embedding(DIGITS, args.size)
        self.blocks = nn.ModuleList(Block(args.size, args.heads) for _ in range(args.layers))
        self.head = nn.Linear(args.size, DIGITS, bias=False)

    def forward(self, tokens: torch.Tensor, key: AttnKey) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, key, use_reentrant=False)
            else:
                x = block(x, key)
        logits: torch.Tensor = self.head(x)
        return logits


def batch(step: int, row: int, num_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """(t + 1,) digits, each the sum of the two before it, and the bounds of documents.

    The last one is a target only. The same on all ranks of a row, whenever it is asked for.
    """
    dice = torch.Generator().manual_seed(1000 * step + row)
    digits, bounds = torch.randint(DIGITS, (num_tokens + 1,), generator=dice), [0]
    while bounds[-1] < num_tokens:
        length = int(torch.randint(8, 40, (1,), generator=dice))
        bounds.append(min(bounds[-1] + length, num_tokens))
        for n in range(bounds[-2] + 2, bounds[-1]):
            digits[n] = (digits[n - 1] + digits[n - 2]) % DIGITS
    return digits, bounds


class Progress:
    """What a checkpoint holds; torch.distributed.checkpoint calls the two methods."""

    def __init__(self, model: nn.Module, optimizer: MuonClip) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        clip = self.optimizer.clip.state_dict()
        return {"model": model, "optimizer": optimizer, "clip": clip, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.optimizer.clip.load_state_dict(state["clip"])
        self.step = int(state["step"])


def last_checkpoint(folder: Path) -> Path | None:
    """The newest that is whole: its metadata are written last."""
    whole = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    return whole[-1] if whole else None


def train(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Model(args).to(device)
    ranks = mesh["dp", "cp"]._flatten("ranks")
    for block in model.blocks:
        if args.compile:
            block.compile()
        fully_shard(block, mesh=ranks)
    fully_shard(model, mesh=ranks)
    # CPUs are slow at small products in bf16; leave ns_dtype out on a GPU.
    options = {} if device.type == "cuda" else {"ns_dtype": torch.float32}
    optimizer = MuonClip(model, lr=args.lr, tau=args.tau, **options)
    progress = Progress(model, optimizer)
    found = last_checkpoint(args.out) if args.out else None
    if found:
        dcp.load({"progress": progress}, checkpoint_id=found)
    log = print if dist.get_rank() == 0 else lambda *_: None
    log(f"{dist.get_world_size()} ranks, {mesh}, begins at step {progress.step}")
    row, num_rows = mesh.get_local_rank("dp"), mesh.size(0)
    while progress.step < args.steps:
        digits, bounds = batch(progress.step, row, args.tokens)
        key = varlen_key(bounds, causal=True, group=mesh["cp"].get_group())
        tokens, targets = (dispatch(x.to(device), key) for x in (digits[:-1], digits[1:]))
        optimizer.zero_grad()
        total = F.cross_entropy(model(tokens, key), targets, reduction="sum")
        mean = total / (args.tokens * num_rows)  # of all ranks together
        (mean * dist.get_world_size()).backward()  # FSDP takes the mean over ranks
        optimizer.step()
        progress.step += 1
        loss = mean.detach()
        dist.all_reduce(loss)
        assert optimizer.metrics is not None
        top, clipped = optimizer.metrics.max_logits.max(), optimizer.metrics.clipped
        log(f"step {progress.step} loss {loss:.6f} max logit {top:.2f} clipped {clipped}")
        if args.out and (progress.step % args.save_every == 0 or progress.step == args.steps):
            where = args.out / f"step-{progress.step:06}"
            dcp.save({"progress": progress}, checkpoint_id=where)
    norms = [x.full_tensor().double().norm() for x in model.parameters()]
    clips = sum(int(x["clips"].sum()) for x in optimizer.clip.state_dict()["layers"].values())
    log(f"weights {torch.stack(norms).norm().item()!r}, heads clipped {clips} times")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="FSDP2, context parallelism and MuonClip.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=512, help="of a batch, over all cp ranks")
    parser.add_argument("--cp", type=int, default=0, help="ranks that share a batch; 0: all")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--tau", type=float, default=3.0, help="largest logit left alone")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--compile", action="store_true", help="torch.compile of each block")
    parser.add_argument("--out", type=Path, help="folder of checkpoints; none without it")
    parser.add_argument("--save-every", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    cp = args.cp or world
    if world % cp:
        raise SystemExit(f"--cp {cp} must divide the {world} ranks")
    mesh = init_device_mesh(device.type, (world // cp, cp), mesh_dim_names=("dp", "cp"))
    try:
        train(args, mesh, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
