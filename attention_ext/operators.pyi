from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor
from torch._ops import OpOverloadPacket

_P = ParamSpec("_P")
_T = TypeVar("_T")

def _operator(signature: Callable[_P, _T]) -> OpOverloadPacket[_P, _T]: ...
@_operator
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention, with the schema of torch.ops.aten.scaled_dot_product_attention; attention_ext.sdpa has the contract."""

@_operator
def sdpa_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """out, and lse (..., Hq, L), differentiable in both; attention_ext.sdpa_with_lse has the contract."""

@_operator
def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    workspace_bytes: int = 134217728,
    kernel_name: str = "auto",
    key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse by this package's own kernels, on the CPU by its reference; never by PyTorch's.

    Args:
        seed: one int64 on the query's device, wanted where dropout_p > 0: equal seeds draw equal masks.
        workspace_bytes: how much beside the results a kernel that works in slices may take.
        kernel_name: a kernel by its name, which raises where that kernel refuses the problem; its gradient works.
        key_lengths: int32 (B,), B the product of the dims before the heads: keys from there on are unseen.
    """

@_operator
def sdpa_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    mask_grad: bool = False,
    wide_grads: bool = False,
    workspace_bytes: int = 134217728,
    kernel_name: str = "auto",
    key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and, with mask_grad, of the mask, which else is empty.

    Args:
        grad_lse: None stands for zeros.
        out: and lse, seed and the options: those of the forward.
        wide_grads: the first three come as they are summed, in float32 (float64 for float64).
    """

@_operator
def qk_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The pipeline's first stage: scale * Q K^T + mask, (..., Hq, L, S), -inf where a key is not visible. No gradient."""

@_operator
def row_softmax(scores: Tensor, *, dtype: str = "float32") -> tuple[Tensor, Tensor, Tensor]:
    """Its second stage: weights exp(scores - row maximum) of this dtype, their row sums, the log-sum-exp. No gradient."""

@_operator
def scores_values(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> Tensor:
    """Its third stage: weights @ value / row_sum, (..., Hq, L, Ev). No gradient."""

@_operator
def linear_float32(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear at float32's accuracy; attention_ext.linear_float32 has the contract."""

@_operator
def linear_batchnorm_softmax(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    scale: Tensor,
    training: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, the mean and the variance of the batch (where not training, the running ones), and the linear layer's result.

    It updates nothing; attention_ext.linear_batchnorm_softmax does and has the contract.
    """
