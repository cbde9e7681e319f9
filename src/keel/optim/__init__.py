"""What comes after the gradients: Muon on whole and on sharded parameters, QK-Clip."""

from keel.optim.clip_specs import (
    Block,
    ClippedRows,
    LayerSpec,
    Role,
    grouped_rows,
    interleaved_rows,
    key_rows,
    mla_key_rows,
    mla_query_rows,
    query_rows,
    stacked_rows,
)
from keel.optim.logit_stats import max_logits
from keel.optim.muon import Muon
from keel.optim.muon_clip import MuonClip
from keel.optim.newton_schulz import orthogonalize
from keel.optim.qk_clip import ClipMetrics, QKClip

__all__ = [
    "Block",
    "ClipMetrics",
    "ClippedRows",
    "LayerSpec",
    "Muon",
    "MuonClip",
    "QKClip",
    "Role",
    "grouped_rows",
    "interleaved_rows",
    "key_rows",
    "max_logits",
    "mla_key_rows",
    "mla_query_rows",
    "orthogonalize",
    "query_rows",
    "stacked_rows",
]
