"""Hashes of the results of some 300 calls on a card: the same bits before and after a change that is not to change them.

    PYTHONPATH=WHEEL_A python scripts/hash_results.py > a.json      on one card, with one wheel
    PYTHONPATH=WHEEL_B python scripts/hash_results.py > b.json      on the same card, with another
    python scripts/hash_results.py --compare a.json b.json

The calls: every kernel by its name and the plan's choice, all dtypes, masks, causal, dropout by a fixed seed, grouped heads,
strides, broadcast operands and odd sizes, forward and backward; the linear operators; the stages. Inputs come from the CPU's
generator, the same on every machine. A kernel that refuses a call, or is not for this card, is recorded as refused. --compare exits
with 1 if hashes differ.
"""

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from kernel_names import kernel_names

OPS = torch.ops.attention_ext
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZES = {  # L, S, E, Ev
    "even": (130, 192, 64, 64),
    "odd": (67, 133, 40, 72),
    "wide": (70, 96, 512, 320),
    "widest": (65, 80, 640, 1024),
}
VARIANTS = ("plain", "causal", "bool mask", "bias", "dropout", "grouped", "heads inside rows", "broadcast")

Call = Callable[[], tuple[Tensor, ...]]


def digest(tensors: tuple[Tensor, ...]) -> list[str]:
    """A hash of each tensor's elements in row-major order, with its dtype, sizes and strides."""
    found = []
    for tensor in tensors:
        about = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
        memory = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        found.append(hashlib.sha256(about.encode() + memory).hexdigest()[:16])
    return found


def draw(generator: torch.Generator, device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def attention(device: str, kernel: str, dtype: torch.dtype, sizes: str, variant: str) -> tuple[Tensor, ...]:
    """out, lse and the gradients of query, key, value and a bias."""
    generator = torch.Generator().manual_seed(7)
    L, S, E, Ev = SIZES[sizes]
    heads = (4, 2) if variant == "grouped" else (4, 4)
    q = draw(generator, device, dtype, *((1, 4, L, E) if variant == "broadcast" else (2, heads[0], L, E)))
    k, v = (draw(generator, device, dtype, 2, heads[1], S, width) for width in (E, Ev))
    if variant == "heads inside rows":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    mask = None
    if variant == "bool mask":
        mask = (torch.rand(2, 1, L, S, generator=generator) < 0.7).to(device)
    elif variant == "bias":
        mask = draw(generator, device, dtype, 1, 4, L, S).requires_grad_()
    seed, p = (torch.tensor([11], device=device), 0.25) if variant == "dropout" else (None, 0.0)
    inputs = [t.requires_grad_() for t in (q, k, v)] + ([mask] if variant == "bias" else [])
    options = {"enable_gqa": variant == "grouped", "kernel_name": kernel}
    out, lse = OPS.sdpa_forward(q, k, v, mask, seed, p, variant == "causal", **options)
    grad = draw(generator, device, dtype, *out.shape)
    return out, lse, *torch.autograd.grad(out, inputs, grad)


def linear(device: str, dtype: torch.dtype, K: int, training: bool) -> tuple[Tensor, ...]:
    """The linear layer's four results and the gradients of input and weight; in float32 the product alone, too."""
    generator = torch.Generator().manual_seed(7)
    x, weight, bias = (draw(generator, device, dtype, *shape) for shape in ((70, K), (133, K), (133,)))
    wide = torch.promote_types(dtype, torch.float32)
    statistics = [(draw(generator, device, wide, 133).abs() + 0.5) for _ in range(5)]
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    results = OPS.linear_batchnorm_softmax(x, weight, bias, *statistics, training, 1e-5)
    grads = torch.autograd.grad(results[0].sum() + results[3].square().sum(), inputs)
    product = (OPS.linear_float32(x, weight, bias),) if dtype == torch.float32 else ()
    return *results, *grads, *product


def stages(device: str, dtype: torch.dtype, sizes: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    L, S, E, Ev = SIZES[sizes]
    q, k, v = (draw(generator, device, dtype, 2, *shape) for shape in ((L, E), (S, E), (S, Ev)))
    scores = OPS.qk_scores(q, k, None, True)
    weights, total, lse = OPS.row_softmax(scores, dtype=str(dtype).removeprefix("torch."))
    return scores, weights, total, lse, OPS.scores_values(weights, total, v)


def calls(device: str) -> Iterator[tuple[str, Call]]:
    """(name, call) of everything that is hashed."""
    kernels = ("auto", *(kernel_names() if device == "cuda" else ()))
    for kernel, dtype, sizes, variant in itertools.product(kernels, DTYPES, SIZES, VARIANTS):
        fused_only = kernel.startswith("sm90") and dtype not in DTYPES[:2]  # half types
        if not fused_only:
            yield (
                f"attention, {kernel}, {dtype}, {sizes}, {variant}",
                lambda a=(device, kernel, dtype, sizes, variant): attention(*a),
            )
    for dtype, K, training in itertools.product(DTYPES, (72, 600), (False, True)):
        mode = "training" if training else "evaluation"
        yield f"linear, {dtype}, K = {K}, {mode}", lambda a=(device, dtype, K, training): linear(*a)
    for dtype, sizes in itertools.product(DTYPES, SIZES):
        yield f"stages, {dtype}, {sizes}", lambda a=(device, dtype, sizes): stages(*a)


def hashes(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, call in calls(device):
        try:
            found[name] = digest(call())
        except RuntimeError as error:
            if "attention_ext: kernel_name:" not in str(error):
                raise
            found[name] = "refused"
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for each call whose results differ, or that only one of the two has."""
    lines = []
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old or name not in new:
            lines.append(f"{name}: only in the {'second' if name in new else 'first'}")
        elif old[name] != new[name]:
            results = [i for i, (a, b) in enumerate(zip(old[name], new[name], strict=False)) if a != b]
            lines.append(f"{name}: " + ("refused by one" if "refused" in (old[name], new[name]) else f"results {results} differ"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    args = parser.parse_args()
    if args.compare:
        old, new = (json.loads(path.read_text()) for path in args.compare)
        lines = differences(old["calls"], new["calls"])
        refused = sum(value == "refused" for value in old["calls"].values())
        print("\n".join(lines) or f"{len(old['calls'])} calls, {refused} of them refused by their kernel: the same bits")
        return 1 if lines else 0
    import attention_ext
    from attention_ext._libraries import BUILD

    card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    about = {"card": card, "torch": torch.__version__, "version": attention_ext.__version__, "csrc_tree": BUILD.csrc}
    json.dump(about | {"calls": hashes(args.device)}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
