"""Trains a small Llama with the Trainer of transformers: attention on Keel, MuonClip, packed text.

    pip install '.[transformers]' accelerate
    python examples/hf_trainer.py            # seconds on a CPU

The collator puts documents of any length behind each other, without padding; position_ids that
start again tell attention where they begin. `tau` is so low that heads are clipped from the start.
"""

from __future__ import annotations

import random
import tempfile

import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import keel.integrations.transformers
from keel.optim import MuonClip

DIGITS = 8


def documents(count: int) -> list[dict[str, list[int]]]:
    """Rows of digits, each the sum of the two before it."""
    dice = random.Random(0)
    rows = []
    for _ in range(count):
        digits = [dice.randrange(DIGITS), dice.randrange(DIGITS)]
        for _ in range(dice.randrange(4, 22)):
            digits.append((digits[-1] + digits[-2]) % DIGITS)
        rows.append({"input_ids": digits})
    return rows


def train(steps: int = 60, tau: float = 1.0) -> tuple[list[float], int]:
    """Losses as the Trainer logged them, and how often a head was clipped."""
    keel.integrations.transformers.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=DIGITS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        attn_implementation="keel",
    )
    model = LlamaForCausalLM(config)
    # fp64 in Newton-Schulz because CPUs are slow at small products in bf16; leave it out on a GPU.
    optimizer = MuonClip(model, lr=0.02, tau=tau, ns_dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=16,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=documents(512),
            data_collator=DataCollatorWithFlattening(),
            optimizers=(optimizer, None),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    layers = optimizer.clip.state_dict()["layers"].values()
    return losses, sum(int(layer["clips"].sum()) for layer in layers)


if __name__ == "__main__":
    losses, clips = train()
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, heads clipped {clips} times")
