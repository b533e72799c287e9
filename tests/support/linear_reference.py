"""What the linear operators must return: float64 on the CPU, PyTorch's own in the same dtype, and the rule for float32.

Sizes: M rows, K columns of the input, N or F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import error_rule
import torch
import torch.nn.functional as F
from helpers import leaves, normal, tf32
from torch import Tensor

fused = torch.ops.attention_ext.linear_batchnorm_softmax
TF32_BITS = 13  # low bits of a float32 that TF32 does without


def rounded_to_tf32(tensor: Tensor) -> Tensor:
    """Values as the Tensor Cores read them: 10 bits of mantissa, rounded to nearest."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + (1 << (TF32_BITS - 1))) & ~((1 << TF32_BITS) - 1)).view(torch.float32)


def own_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch's float32 product, without TF32."""
    with tf32(False):
        return F.linear(input, weight, bias)


def product64(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    input, weight = (t.detach().cpu().double() for t in (input, weight))
    out = input @ weight.mT
    return out if bias is None else out + bias.detach().cpu().double()


def norm_errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The relative Frobenius norm of the error and that of the row with the largest; infinite where a row must be 0 and is not."""
    want = want.reshape(-1, want.size(-1))
    difference = got.detach().cpu().double().reshape(want.shape) - want

    def ratio(error: Tensor, size: Tensor) -> float:
        return float(torch.where(error == 0, 0.0, error / size).max()) if error.numel() else 0.0

    return ratio(difference.norm(), want.norm()), ratio(difference.norm(dim=-1), want.norm(dim=-1))


def check_float32(got: Tensor, want: Tensor, base: Tensor, factor: float = error_rule.LINEAR, quantum: float = 0.0) -> None:
    """Both errors of `got` are at most `factor` times those of `base`, PyTorch's own float32 result.

    quantum: what every element may be off beside that, for results in float32's denormal range.
    """
    assert got.dtype == torch.float32 and got.shape == want.shape == base.shape
    assert torch.isfinite(got).all() and torch.isfinite(want).all() and torch.isfinite(base).all()
    width = max(1, want.size(-1)) ** 0.5
    least = want.reshape(-1, want.size(-1)).norm(dim=-1)
    extra = quantum * width / float(least[least > 0].min()) if quantum else 0.0
    for name, ours, theirs in zip(("Frobenius", "worst row"), norm_errors(got, want), norm_errors(base, want), strict=True):
        assert ours <= factor * theirs + extra, f"{name} error {ours:.3e}, PyTorch's {theirs:.3e}"


def check_products(got: Tensor, want: Tensor, base: Tensor, units: float = 4.0) -> None:
    """Errors at most twice those of `base`, PyTorch's own, and `units` of 2^-24: each row's norm, each column's norm, any element.

    Units are of the row's norm, the column's, the largest element. Four: each of a product's two operands is off by up to 2^-23.
    Twice as many for a column, which may hang on one element: the product of low terms, up to 2^-22, is left out. Rows and columns
    of less than 16 elements, which may all be small by chance, are not looked at by themselves.
    """
    assert got.shape == want.shape == base.shape
    ours, theirs = (t.detach().cpu().double() - want for t in (got, base))
    for dim, name, allowed in ((0, "column", 2 * units), (1, "row", units)):
        if want.size(dim) >= 16:
            errors, limits = ours.norm(dim=dim), 2 * theirs.norm(dim=dim) + allowed * 2.0**-24 * want.norm(dim=dim)
            worst = int((errors - limits).argmax())
            assert (errors <= limits).all(), f"{name} {worst}: error {errors[worst]:.3e}, limit {limits[worst]:.3e}"
    (error, _), (own, _) = error_rule.errors(got, want), error_rule.errors(base, want)
    limit = 2 * own + units * error_rule.ulp(torch.float32, error_rule.largest(want))
    assert error <= limit, f"error {error:.3e}, PyTorch's {own:.3e}, limit {limit:.3e}"


def check_nonfinite(got: Tensor, base: Tensor, want: Tensor) -> None:
    """NaN and infinities where PyTorch's product has them, everything else a float32 product."""
    got, base = got.cpu(), base.cpu()
    assert torch.equal(got.isnan(), base.isnan())
    assert torch.equal(got == torch.inf, base == torch.inf) and torch.equal(got == -torch.inf, base == -torch.inf)
    finite = base.isfinite()
    got, base, want = (t.masked_fill(~finite, 0.0) for t in (got, base, want))
    check_float32(got, want, base)


@dataclass(frozen=True)
class Layer:
    """The arguments of linear_batchnorm_softmax, in its order."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    bn_weight: Tensor | None
    bn_bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    scale: Tensor
    training: bool = True
    eps: float = 1e-5

    def args(self) -> list:
        return [*self.leading(), self.scale, self.training, self.eps]

    def leading(self) -> list[Tensor | None]:
        return [self.input, self.weight, self.bias, self.bn_weight, self.bn_bias, self.running_mean, self.running_var]

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def map(self, function) -> Layer:
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})


DIFFERENTIABLE = ("input", "weight", "bias", "bn_weight", "bn_bias", "scale")


def make(
    M: int = 7,
    K: int = 12,
    F: int = 10,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
    affine: bool = True,
    stats: bool = True,
    scale: tuple[int, ...] = (1,),
    bn_dtype: torch.dtype | None = None,
    **options,
) -> Layer:
    """A layer with N(0, 1) inputs; bn_dtype is that of scale and all that belongs to the batch norm."""
    of_bn = {"dtype": bn_dtype or dtype, "device": device}
    return Layer(
        normal(M, K, dtype=dtype, device=device),
        normal(F, K, dtype=dtype, device=device) * K**-0.5 if K else normal(F, K, dtype=dtype, device=device),
        normal(F, dtype=dtype, device=device) if bias else None,
        normal(F, **of_bn) if affine else None,
        normal(F, **of_bn) if affine else None,
        normal(F, **of_bn) if stats else None,
        (torch.rand(F) + 0.5).to(of_bn["dtype"]).to(device) if stats else None,
        normal(*scale, **of_bn),
        **options,
    )


def layer64(layer: Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, mean, var, linear in float64 on the CPU; differentiable."""
    a = layer.map(lambda t: t.cpu().double())
    linear = a.input @ a.weight.mT
    if a.bias is not None:
        linear = linear + a.bias
    if a.training:
        mean = linear.mean(0)
        var = (linear - mean).square().mean(0)
    else:
        mean, var = a.running_mean.clone(), a.running_var.clone()
    x = (linear - mean) / (var + a.eps).sqrt()
    x = x if a.bn_weight is None else x * a.bn_weight
    x = x if a.bn_bias is None else x + a.bn_bias
    return torch.softmax(a.scale * x, -1), mean, var, linear


def own_layer(layer: Layer) -> Tensor:
    """PyTorch's own result in the input's dtype."""
    mean, var = (None, None) if layer.training else (layer.running_mean, layer.running_var)
    weight, bias = layer.bn_weight, layer.bn_bias
    if weight is None and bias is None and mean is not None and mean.dtype != layer.input.dtype:  # PyTorch wants all of one dtype
        weight, bias = torch.ones_like(mean), torch.zeros_like(mean)
    with tf32(False):
        linear = F.linear(layer.input, layer.weight, layer.bias)
        x = F.batch_norm(linear, mean, var, weight, bias, layer.training, 0.0, layer.eps)
        return torch.softmax(layer.scale.to(x.dtype) * x, -1)


def check_form(results: tuple[Tensor, ...], layer: Layer) -> None:
    """Dtypes, shapes, fresh contiguous memory."""
    M, features = layer.input.size(0), layer.weight.size(0)
    acc = torch.float64 if layer.input.dtype == torch.float64 else torch.float32
    assert [(t.dtype, tuple(t.shape)) for t in results] == [
        (layer.input.dtype, (M, features)), (acc, (features,)), (acc, (features,)), (acc, (M, features))
    ]  # fmt: skip
    assert all(t.is_contiguous() and t.device == layer.input.device for t in results)
    memory = [t.untyped_storage().data_ptr() for t in (*results, *layer.tensors().values()) if t.numel()]
    assert len(set(memory[: len(results)])) == len(memory[: len(results)])
    assert not set(memory[: len(results)]) & set(memory[len(results) :])


def truncation(layer: Layer) -> float:
    """What Tensor Cores may cut off a sum of half products, kept in float32: 2^-23 of its size with each 16 of them."""
    if layer.input.dtype not in (torch.float16, torch.bfloat16) or not layer.input.is_cuda or not layer.input.numel():
        return 0.0
    sizes = layer.input.detach().abs().cpu().double() @ layer.weight.detach().abs().cpu().double().mT
    return -(-layer.input.size(1) // 16) * 2.0**-23 * error_rule.largest(sizes)


def rounding(layer: Layer) -> float:
    """What two float32 sums of the layer's products may differ by, each of them as good as the other."""
    squares = layer.input.detach().cpu().double().square() @ layer.weight.detach().cpu().double().square().mT
    return 2.0**-22 * max(error_rule.largest(squares) ** 0.5, error_rule.largest(layer64(layer)[3]))


def check_layer(layer: Layer, operator: Callable[..., tuple[Tensor, ...]] = fused) -> Tensor:
    """All four results within the rule for their dtype.

    What comes after the product may be off by what an error of the product makes of it, beside the rule: of few columns PyTorch's
    own may be next to nothing by luck. A product with operands rounded to TF32 is off by a thousand times as much.
    """
    results = operator(*layer.args())
    check_form(results, layer)
    out, mean, var, linear = results
    want, want_mean, want_var, want_linear = layer64(layer)
    own = own_product(*(t if t is None else t.to(linear.dtype) for t in (layer.input, layer.weight, layer.bias)))
    cut, off, rounded, gain = truncation(layer), 0.0, 0.0, 0.0
    if linear.dtype == torch.float32:
        off = error_rule.errors(own, want_linear)[0] + error_rule.ulp(torch.float32, error_rule.largest(want_linear))
        rounded = rounding(layer)
        factor = layer.scale.detach().cpu().double() / (want_var + layer.eps).sqrt()
        gain = error_rule.largest(factor if layer.bn_weight is None else factor * layer.bn_weight.detach().cpu().double())
    error_rule.check_error("linear", linear, want_linear, own, extra=cut + rounded)
    if layer.training:
        extra = 2 * off + cut
        error_rule.check_error("mean", mean, want_mean, own.mean(0), extra=extra)
        spread = error_rule.largest(want_linear - want_mean)
        error_rule.check_error("var", var, want_var, own.var(0, correction=0), extra=2 * extra * spread)
    else:
        assert torch.equal(mean, layer.running_mean.to(mean.dtype)) and torch.equal(var, layer.running_var.to(var.dtype))
    slope = min(0.5, 2 * error_rule.largest(want))  # of the softmax
    error_rule.check_error("out", out, want, own_layer(layer), extra=slope * gain * off)
    return out


def ours(layer: Layer) -> Tensor:
    return fused(*layer.args())[0]


def gradients(
    call: Callable[[Layer], Tensor], layer: Layer, grad: Tensor, names: tuple[str, ...] = DIFFERENTIABLE
) -> dict[str, Tensor]:
    """Those of the layer's tensors of these names, given the one of call(layer)."""
    tensors = dict(zip(names, leaves(*(getattr(layer, n) for n in names)), strict=True))
    out = call(replace(layer, **tensors))
    assert out.requires_grad
    return dict(zip(names, torch.autograd.grad(out, list(tensors.values()), grad.to(out)), strict=True))


def surrounded(tensor: Tensor, value: float = float("nan")) -> Tensor:
    """The same values within memory full of `value`, at an odd offset and with room between the rows."""
    rows, columns = (1, tensor.numel()) if tensor.dim() < 2 else tensor.shape
    memory = torch.full((rows + 2, columns + 5), value, dtype=tensor.dtype, device=tensor.device)
    inside = memory[1:-1, 3 : 3 + columns]
    inside.copy_(tensor.reshape(rows, columns))
    return inside if tensor.dim() == 2 else inside[0] if tensor.dim() == 1 else inside[0, 0]
