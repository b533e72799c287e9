"""Small problems through every kernel of the package, for compute-sanitizer: odd sizes, masks, causal, groups, dropout."""

import sys
from pathlib import Path

import torch

import attention_ext  # noqa: F401

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from kernels import KERNELS

OPS = torch.ops.attention_ext


def run(
    dtype: torch.dtype, L: int, S: int, E: int, Ev: int, kernel: str = "auto", backward: str | None = "auto", **options: object
) -> None:
    """Forward and backward of 2 heads, or of groups of 2 for each of 2 key heads (one key head would not be packed)."""
    heads = 4 if options.get("enable_gqa") else 2
    q = torch.randn(1, heads, L, E, device="cuda", dtype=dtype)
    k, v = (torch.randn(1, 2, S, width, device="cuda", dtype=dtype) for width in (E, Ev))
    mask, p, causal = options.pop("mask", None), options.pop("dropout_p", 0.0), options.pop("causal", False)
    seed = torch.tensor([7], device="cuda") if p else None
    out, lse = OPS.sdpa_forward(q, k, v, mask, seed, p, causal, kernel_name=kernel, **options)
    assert out.isfinite().all()
    if backward is None:
        return
    with_mask = mask is not None and mask.is_floating_point()
    options |= {"mask_grad": with_mask, "kernel_name": backward}
    grads = OPS.sdpa_backward(torch.ones_like(out), None, q, k, v, mask, out, lse, seed, p, causal, **options)
    assert all(grad.isfinite().all() for grad in grads)


def run_linear(dtype: torch.dtype, M: int, N: int, K: int, *, training: bool, nan: bool = False) -> None:
    """The linear layer alone where it is float32, and with batch norm, scale and softmax; forward and backward."""
    x, weight, bias = (torch.randn(*size, device="cuda", dtype=dtype) for size in ((M, K), (N, K), (N,)))
    if nan:
        x[M // 2, K // 2] = torch.nan  # tiles that are made anew
    x.requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    mean, var, scale = (torch.rand(N, device="cuda", dtype=wide) + 0.5 for _ in range(3))
    out, *_, linear = OPS.linear_batchnorm_softmax(x, weight, bias, var, mean, mean, var, scale, training, 1e-5)
    total = out.to(wide).square().sum() + linear.sum()
    if dtype == torch.float32:
        total = total + OPS.linear_float32(x, weight, bias).sum() + OPS.linear_float32(x, weight.t().contiguous().t(), None).sum()
        for kernel in ("tiled", "split_half"):
            OPS._linear_float32_by(x.detach(), weight, bias, kernel)
    (grad,) = torch.autograd.grad(total, x)
    assert nan or (out.isfinite().all() and grad.isfinite().all())


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        run(dtype, 70, 133, 72, 40)
        run(dtype, 129, 130, 64, 64, causal=True)
    half = torch.float16
    run(half, 33, 65, 9, 7)  # rows that are not on 16-byte boundaries: the element-wise path
    run(half, 130, 70, 128, 128, enable_gqa=True)
    run(half, 40, 260, 64, 64, dropout_p=0.25)
    run(half, 40, 137, 64, 64, mask=torch.rand(40, 137, device="cuda") > 0.3)
    run(half, 40, 137, 64, 64, mask=torch.randn(2, 1, 137, device="cuda", dtype=half))
    run(half, 40, 137, 64, 64, mask=torch.randn(40, 1, device="cuda"))
    run(half, 20, 1500, 16, 16)  # a CTA for each row of the softmax
    run(half, 3, 9000, 16, 16)  # rows that do not fit into registers
    run(half, 300, 300, 64, 64, workspace_bytes=1 << 17)  # several slices
    run(half, 300, 300, 64, 64, workspace_bytes=1 << 19, enable_gqa=True, mask=torch.randn(1, 300, device="cuda"))  # cut
    run(half, 1100, 130, 16, 16, enable_gqa=True, causal=True)  # CTAs share the rows of a query head
    here = [kernel for kernel in KERNELS if kernel.device == "cuda" and kernel.runs_here()]
    for kernel, dtypes, E, Ev in ((of.name, of.dtypes, *dims) for of in here for dims in of.sanitized):
        dtype = half if half in dtypes else dtypes[0]
        run(dtype, 70, 300, E, Ev, kernel=kernel)
        run(dtype, 70, 300, E, Ev, kernel=kernel, causal=True)
        run(dtype, 40, 300, E, Ev, kernel=kernel, mask=torch.rand(40, 300, device="cuda") > 0.7, enable_gqa=True)
        run(dtype, 40, 300, E, Ev, kernel=kernel, mask=torch.randn(2, 1, 300, device="cuda", dtype=dtype), dropout_p=0.25)
    if torch.cuda.get_device_capability() == (9, 0):
        # CTAs stay, over tiles of one to three blocks of keys: 200 and 140 tiles of 128 rows on 132 processors, 140 and 136 of 64
        # rows. sm90_1024 in passes over all columns of values, in the last one with a tile a CTA. The backward pass is that of the
        # problems above.
        run(half, 6400, 300, 64, 64, kernel="sm90_256", backward=None, causal=True, enable_gqa=True)
        run(half, 8900, 130, 136, 256, kernel="sm90_256", backward=None, mask=torch.rand(1, 130, device="cuda") > 0.5)
        run(half, 2240, 300, 320, 264, kernel="sm90_512", backward=None, causal=True, enable_gqa=True)
        run(half, 4300, 130, 72, 520, kernel="sm90_1024", backward=None)
        run(half, 2560, 70, 1024, 520, kernel="sm90_1024", backward=None, causal=True)
        # Few rows over many keys: pieces of the keys, as many as there are, of a group at a time, and under a mask that hides some.
        for kernel, E, Ev in (("sm90_256", 64, 40), ("sm90_512", 320, 264), ("sm90_1024", 600, 1024)):
            run(half, 3, 1100, E, Ev, kernel=kernel, backward=None, enable_gqa=True)
            run(half, 3, 1100, E, Ev, kernel=kernel, backward=None, workspace_bytes=9 * 3 * 4 * (Ev + 2))
            mask = torch.arange(1100, device="cuda") % 512 < 70
            run(half, 3, 1100, E, Ev, kernel=kernel, backward=None, enable_gqa=True, mask=mask.view(1, -1))
        # The backward of the row kernels, of both classes; with more tiles than CTAs.
        for E, causal in ((64, False), (64, True), (128, False), (128, True), (192, False), (256, True)):
            run(half, 70, 300, E, E, backward="sm90_256", causal=causal)
            run(half, 300, 130, E, 40, backward="sm90_256", causal=causal, enable_gqa=True)
        run(half, 4300, 8600, 64, 64, backward="sm90_256", causal=True, enable_gqa=True)
        # Biases: of heads, shared, under dropout; gradients of each, some by several CTAs.
        for dtype, kernel in ((half, "sm90_256"), (torch.float32, "sm90_split_half")):
            for E, size, p in ((32, (4, 200, 304), 0.0), (64, (200, 304), 0.0), (64, (1, 304), 0.0), (128, (200, 304), 0.25)):
                mask = torch.randn(size, device="cuda", dtype=dtype)
                run(dtype, 200, 304, E, E, backward=kernel, mask=mask, dropout_p=p, enable_gqa=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        run_linear(dtype, 70, 133, 72, training=True)
        run_linear(dtype, 130, 300, 600, training=False)
        run_linear(dtype, 33, 131, 9, training=True)
    run_linear(torch.float32, 200, 1500, 1000, training=True, nan=True)
    run_linear(torch.float32, 3, 9000, 520, training=True)  # rows of the softmax that do not fit into registers
    run_linear(torch.float32, 3, 20, 8300, training=True)  # rows of the split that do not
    torch.cuda.synchronize()
    print("subset done")


if __name__ == "__main__":
    main()
