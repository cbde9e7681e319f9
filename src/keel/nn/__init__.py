"""Modules of a transformer that stand on Keel's attention and softmax, under Megatron's names."""

from keel.nn.attention import DotProductAttention
from keel.nn.config import MLATransformerConfig, TransformerConfig

__all__ = ["DotProductAttention", "MLATransformerConfig", "TransformerConfig"]
