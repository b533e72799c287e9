"""The operators of torch.ops.attention_ext under names that editors and type checkers know: operators.pyi has their signatures.

These are the same objects: operators.sdpa is torch.ops.attention_ext.sdpa.
"""

import torch

from . import _libraries as _libraries  # the schemas

__all__ = [
    "linear_batchnorm_softmax",
    "linear_float32",
    "qk_scores",
    "row_softmax",
    "scores_values",
    "sdpa",
    "sdpa_backward",
    "sdpa_forward",
    "sdpa_with_lse",
]

_OPS = torch.ops.attention_ext
linear_batchnorm_softmax = _OPS.linear_batchnorm_softmax
linear_float32 = _OPS.linear_float32
qk_scores = _OPS.qk_scores
row_softmax = _OPS.row_softmax
scores_values = _OPS.scores_values
sdpa = _OPS.sdpa
sdpa_backward = _OPS.sdpa_backward
sdpa_forward = _OPS.sdpa_forward
sdpa_with_lse = _OPS.sdpa_with_lse
