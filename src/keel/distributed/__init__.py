"""Context parallelism: attention over tokens that are spread over the ranks of a group."""

from keel.distributed.attention import calc_attn
from keel.distributed.cost import CostModel
from keel.distributed.dispatch import dispatch, roll, undispatch
from keel.distributed.group_ops import group_cast, group_reduce
from keel.distributed.keys import AttnKey, flex_key, get_position_ids, varlen_key
from keel.distributed.layout import Layout
from keel.distributed.maxima import MaxLogitsTracker
from keel.distributed.plan import Plan, make_plan

__all__ = [
    "AttnKey",
    "CostModel",
    "Layout",
    "MaxLogitsTracker",
    "Plan",
    "calc_attn",
    "dispatch",
    "flex_key",
    "get_position_ids",
    "group_cast",
    "group_reduce",
    "make_plan",
    "roll",
    "undispatch",
    "varlen_key",
]
