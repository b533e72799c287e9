"""The public functions."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._checks import refuse
from ._overrides import handle_torch_function, overridden
from ._transforms import constant
from .attention import router
from .attention.bias import plain_mask
from .attention.recall import attempt
from .linear.product import attempt as attempt_linear
from .linear.softmax import call_and_update

__all__ = ["Explanation", "explain", "linear_batchnorm_softmax", "linear_float32", "preferred", "sdpa", "sdpa_with_lse"]

_SDPA = torch.ops.attention_ext.sdpa.default


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
    """Scaled dot-product attention, softmax(scale * Q K^T + mask) V: torch.ops.attention_ext.sdpa.

    The schema and the semantics are those of torch.nn.functional.scaled_dot_product_attention, the same on every device.

    Args:
        query: (..., Hq, L, E), float16, bfloat16, float32 or float64, any strides; rank 2, (L, E), or more, 3 with enable_gqa.
        key: (..., Hk, S, E), of the query's dtype and device. Leading dims of the operands broadcast; every size may be 0 or 1.
        value: (..., Hk, S, Ev). Ev may differ from E.
        attn_mask: broadcasts to (..., Hq, L, S), rank 2 or more. bool: True takes part. float32 or the query's dtype: added to
            the scaled scores. It may require grad, which has the mask's own shape. Not together with is_causal. A CausalBias of
            torch.nn.attention.bias means what it means for PyTorch's operator; other classes with a `__torch_function__` of their
            own are refused.
        dropout_p: probability in [0, 1] that a weight is zeroed (after the softmax; the others are scaled by 1 / (1 - p)). It is
            always applied: pass 0.0 in evaluation. 0 consumes no random numbers. This package's kernels round it to a multiple of
            2^-16, scale included: below 2^-17 nothing is dropped, and 1 alone drops everything. The backward pass draws the mask of
            its forward pass, also in compiled and exported programs and in CUDA graphs, whose replays have a new one each.
        is_causal: query i sees keys 0 to i (top-left alignment, also where L != S).
        scale: factor of Q K^T, 1 / sqrt(E) by default; may be 0 or negative.
        enable_gqa: query head h reads key head h // (Hq // Hk) and value head h // (Hq // Hv); Hk and Hv divide Hq.

    Returns:
        (..., Hq, L, Ev) in the query's dtype, in memory as (..., L, Hq, Ev) where the query lies so (heads inside rows), else
        contiguous. A row without a visible key is exactly 0 and has zero gradients; S = 0 gives zeros, E = 0 the mean of the
        visible values. A score of +inf makes its row NaN, and a row of a mask's lowest finite number gives the mean of the values,
        as in PyTorch. A masked key never counts, but what a non-finite value under a mask does is undefined.

    Raises:
        RuntimeError: an input that is refused; the message names the argument, what was expected and what came.
        torch.OutOfMemoryError: the result or the workspace does not fit.

    Precision: scores, softmax and sums are in float32 (float64 for float64), so half precision's scores may pass 65504; its weights
    are rounded to its dtype before they meet the values. float32 is float32-accurate whatever PyTorch's TF32 setting is, which
    matters only where PyTorch's MATH back end runs.

    What runs: on CUDA this package's kernels, or that back end of PyTorch's operator which was measured faster for the kind of call
    (with a gradient: in both directions together) and keeps all of the above; a back end that is turned off
    (torch.nn.attention.sdpa_kernel) does not. CPU tensors other than DTensors, torch.func transforms other than vmap alone,
    forward-mode AD and, on CUDA, ranks above 10 go to PyTorch's own operator; explain says which and why, and so does the logger
    attention_ext at level INFO at each eager call. This package's kernels expand no mask and repeat no key or value in memory,
    launch on the current stream of the query's device, do not synchronise with the host, allocate through torch only, and may be
    called from several threads.

    See Vaswani et al. 2017, "Attention is all you need", section 3.2.1, and PyTorch's documentation of
    scaled_dot_product_attention. Double backward is refused where this package's own kernels or PyTorch's fused ones run.
    """
    if is_compiling():
        if scale is not None or dropout_p != 0.0:  # each function that Dynamo follows is a guard of each call of the program
            dropout_p, scale = constant(dropout_p), constant(scale)
    else:
        known = attempt((query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
        if known is not None:
            return known
    if attn_mask is not None:  # here too: a graph of torch.compile loses what a mask's class means
        attn_mask, is_causal = plain_mask(attn_mask, query, key, is_causal)
    out: Tensor = _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out


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
    """sdpa and the log-sum-exp of its rows: torch.ops.attention_ext.sdpa_with_lse.

    Arguments, their shapes and dtypes, what is refused, and autocast are those of sdpa; key and value may have different head
    counts with enable_gqa.

    Returns:
        out: (..., Hq, L, Ev) in the query's dtype, as sdpa gives it.
        lse: (..., Hq, L), float32 (float64 for float64): log(sum_j exp(scale * q_i . k_j + mask_ij)) over the visible keys,
            natural logarithm, before dropout; -inf for a row without a visible key.

    Both are differentiable with respect to query, key, value and a float mask. merge_partials puts the results of several calls
    over disjoint sets of keys together.

    Raises:
        RuntimeError: as sdpa.

    On CUDA the package's kernels run, on the CPU its reference in blocks of rows. Double backward is refused there. Under
    torch.func transforms and forward-mode AD, and for ranks above 10 on CUDA, it is a composition of ATen operators, which holds
    the whole score matrix; under vmap alone it is the kernel with one more leading dim, and dropout needs randomness="different".
    """
    attn_mask, is_causal = plain_mask(attn_mask, query, key, is_causal)
    out, lse = torch.ops.attention_ext.sdpa_with_lse.default(
        query, key, value, attn_mask, constant(dropout_p), is_causal, scale=constant(scale), enable_gqa=enable_gqa
    )
    return out, lse


@dataclass(frozen=True)
class Explanation:
    """What would run for a call of sdpa.

    kernel: "torch" (PyTorch's own operator), on CUDA "torch: cudnn", "torch: flash" or "torch: efficient" (its back ends),
        "torch_math" (its MATH back end), "reference" (sdpa_forward on the CPU, for DTensors) or the name of one of this package's
        kernels.
    reason: why, as a clause; of this package's kernels on CUDA also why no back end of PyTorch's.
    workspace: bytes taken from torch's allocator during the call beside the output; of PyTorch's, what is made of a bool mask for
        it, and copies of operands and of the result.
    preferred: whether a kernel of this package runs that was measured faster than PyTorch's own operator on this kind of card.
    """

    kernel: str
    reason: str
    workspace: int
    preferred: bool

    def __str__(self) -> str:
        speed = "measured faster than" if self.preferred else "not measured faster than"
        return f"{self.kernel}, because {self.reason}; {self.workspace} bytes of workspace; {speed} PyTorch's own operator."


def explain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Explanation:  # fmt: skip
    """Which kernel sdpa would run for these arguments, and why. Runs nothing; raises what sdpa would raise."""
    call, _ = router.checked(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return Explanation(*router.described(call, router.route(call)))


def preferred(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> bool:  # fmt: skip
    """Whether sdpa was measured faster than PyTorch's own operator for such a call.

    False where nothing was measured, and where PyTorch's operator or one of its back ends is what runs: whoever asks before putting
    sdpa in its place gains nothing there.
    """
    return explain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).preferred


def linear_float32(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias in float32: torch.ops.attention_ext.linear_float32.

    torch.nn.functional.linear at float32's accuracy whatever torch's settings for float32 products are (TF32, bfloat16). That
    accuracy is one of rows: on CUDA the error of a row, as a norm, is

    - at most 1.05 times that of PyTorch's float32 product for usual inputs, whose products have both signs;
    - up to about four units in the last place of the row's largest element where one product makes a sum (one-hot rows, a column
      above all others), which PyTorch rounds once;
    - up to about 2.2 times PyTorch's where all products have one sign: Tensor Cores cut off what they add.

    An element that is tiny beside its row's largest has no relative accuracy of its own. docs/kernels/linear.md has the bounds.

    Args:
        input: (..., K), float32, any strides.
        weight: (N, K), float32, any strides.
        bias: (N,), float32.

    Returns:
        (..., N), float32, contiguous. Values of all magnitudes, infinities and NaN come out as in a float32 product; only where a
        partial sum overflows in PyTorch's product the result may be finite here.

    Raises:
        RuntimeError: an input that is refused; the message names the argument, what was expected and what came.

    Differentiable any number of times. In an autocast region it stays in float32, and half operands are widened. Where weight or
    bias is mapped by vmap, under other torch.func transforms and under forward-mode AD it is PyTorch's linear, on CUDA in float64.
    """
    out: Tensor | None = None if is_compiling() else attempt_linear((input, weight, bias))
    if out is None:
        if overridden(input, weight, bias):
            out = handle_torch_function(linear_float32, (input, weight, bias), input, weight, bias)
        else:
            out = torch.ops.attention_ext.linear_float32.default(input, weight, bias)
    return out


def linear_batchnorm_softmax(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    scale: Tensor | float = 1.0,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """softmax(scale * batch_norm(linear(input, weight, bias), running_mean, running_var, bn_weight, bn_bias, ...), -1).

    The functions are torch.nn.functional's, and so are their arguments; nn.LinearBatchNormSoftmax is the module.

    Args:
        input: (M, K), float16, bfloat16, float32 or float64, any strides.
        weight, bias: (F, K) and (F,), of the input's dtype.
        running_mean, running_var: (F,), both or neither. When training they do not matter for the result and are updated in place,
            as by batch_norm: (1 - momentum) * running + momentum * batch, with the unbiased variance.
        bn_weight, bn_bias: (F,).
        scale: a number, or a tensor of shape (), (1,) or (F,); of any sign. Integers, and any dtype at rank 0, are taken too.
        training: normalise with the batch's mean and biased variance, which one row has not, else with the running ones. An empty
            batch gives an empty result and leaves the running statistics alone, as in PyTorch.
        momentum: the batch's share of the new running statistics.
        eps: added to the variance.

    The statistics, bn_weight, bn_bias and scale are of the input's dtype or float32 (float64 beside float64).

    Returns:
        (M, F) in the input's dtype, where PyTorch promotes to that of scale; contiguous. The product is that of linear_float32 for
        float32, whatever torch's TF32 setting; sums, statistics and softmax are in float32 (float64 for float64). A row of only
        -inf before the softmax is NaN, as in PyTorch.

    Raises:
        ValueError: training with one row; a negative eps, or 0 when training.
        RuntimeError: any other input that is refused; the message names the argument, what was expected and what came.

    Differentiable any number of times in all but the running statistics. In an autocast region input, weight and bias are cast to
    the region's dtype; the result, computed from them in float32 and rounded to that dtype, comes in the dtype that PyTorch's
    softmax would have there: float32 on CUDA, on the CPU what scale and the region's dtype promote to. Under torch.func transforms
    and forward-mode AD it is a composition of PyTorch's operators.
    """
    tensors = (input, weight, bias, running_mean, running_var, bn_weight, bn_bias, scale)
    if overridden(*tensors):
        result: Tensor = handle_torch_function(
            linear_batchnorm_softmax, tensors, input, weight, bias, running_mean=running_mean, running_var=running_var,
            bn_weight=bn_weight, bn_bias=bn_bias, scale=scale, training=training, momentum=momentum, eps=eps,
        )  # fmt: skip
        return result
    if momentum is None:
        refuse("momentum", "a number (nn.LinearBatchNormSoftmax counts the batches for a cumulative average)", None)
    return call_and_update(input, weight, bias, bn_weight, bn_bias, running_mean, running_var, scale, training, momentum, eps)
