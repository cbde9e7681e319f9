"""Modules of a transformer on Keel's attention and softmax: Megatron's names, and a small GPT."""

from keel.nn.attention import DotProductAttention
from keel.nn.config import MLATransformerConfig, TransformerConfig
from keel.nn.gpt import GPT, GPTConfig

__all__ = ["GPT", "DotProductAttention", "GPTConfig", "MLATransformerConfig", "TransformerConfig"]
