#!/usr/bin/env python3
"""Models of transformers and diffusers with "attention_ext" and with their default: JSON on stdout, progress on stderr.

    python bench/clients.py [--only TEXT] [--device cuda] [--small] [--limit SECONDS] > bench/results/clients_<card>.json

At the sizes that the libraries' configurations have by default, with random weights:

- Gemma 4: 6 of its layers, five with head dim 256 and a window of 512 and one with head dim 512, 8 query and 4 key heads, hidden
  size 2304; 4096 tokens in bfloat16. The forward alone, forward and backward together, and 64 tokens generated with a static cache
  after a prompt of 2048. Its vocabulary is cut to 4096, so that tables of words do not fill the memory.
- AutoencoderKL as in Stable Diffusion: a latent of 128 x 128 decoded to 1024 x 1024, one head of 512 over 16384 positions, in
  float16, bfloat16 and float32.

A row has for each implementation the milliseconds of a call and the peak of memory in it, bytes beyond what the model holds; the
ratio of the times, default over ours: above 1 ours is faster; which kernels of attention_ext ran, by its log; and how far the two
results are apart, relative to the largest value (for tokens: how many of them are the same).

Needs transformers and diffusers; wheels of them and of what they need to be imported fit into 35 MB.
"""

import argparse
import contextlib
import datetime
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
from common import attempt, log, time_ms
from torch import Tensor

from attention_ext._libraries import BUILD

__all__ = ["CASES", "measure"]

Call = Callable[[], Tensor]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
IMPLEMENTATIONS = ("default", "attention_ext")
LIMIT = 600.0  # seconds


def gemma4(small: bool) -> torch.nn.Module:
    import transformers

    layers = ["sliding_attention"] * 5 + ["full_attention"]
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": layers, "vocab_size": 4096, "vocab_size_per_layer_input": 4096}
    if small:
        sizes |= {"hidden_size": 64, "intermediate_size": 64, "hidden_size_per_layer_input": 8}
    config = transformers.Gemma4TextConfig(**sizes, pad_token_id=0, eos_token_id=None)
    return transformers.Gemma4ForCausalLM._from_config(config, dtype=BF16).eval().to(common.DEVICE)


def tokens(count: int) -> Tensor:
    return torch.randint(3, 4096, (1, count), generator=torch.Generator().manual_seed(1)).to(common.DEVICE)


@contextlib.contextmanager
def registered(model: torch.nn.Module, implementation: str) -> Iterator[None]:
    from attention_ext.integrations import transformers as integration

    with integration.register():
        model.set_attn_implementation("sdpa" if implementation == "default" else "attention_ext")
        yield


def gemma4_calls(way: str, small: bool) -> Iterator[tuple[str, Call]]:
    """way: "forward", "both" or "generate"."""
    model, ids = gemma4(small), tokens(64 if small else 2048 if way == "generate" else 4096)
    body = model.model

    def forward() -> Tensor:
        with torch.no_grad():
            return body(input_ids=ids, use_cache=False).last_hidden_state

    def both() -> Tensor:
        out = body(input_ids=ids, use_cache=False).last_hidden_state
        out.float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        return out.detach()

    def generate() -> Tensor:
        options = {"max_new_tokens": 4 if small else 64, "do_sample": False, "disable_compile": True}
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), cache_implementation="static", **options)

    for implementation in IMPLEMENTATIONS:
        with registered(model, implementation):
            yield implementation, {"forward": forward, "both": both, "generate": generate}[way]


def vae_calls(dtype: torch.dtype, small: bool) -> Iterator[tuple[str, Call]]:
    import diffusers

    from attention_ext.integrations.diffusers import use_in_vae

    widths = (8, 8, 8, 64) if small else (128, 256, 512, 512)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    vae = diffusers.AutoencoderKL(
        **blocks, block_out_channels=widths, layers_per_block=2, latent_channels=4, norm_num_groups=8 if small else 32
    )
    vae = vae.eval().to(common.DEVICE, dtype)
    side = 8 if small else 128
    latent = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(1)).to(common.DEVICE, dtype)

    def decode() -> Tensor:
        with torch.no_grad():
            return vae.decode(latent).sample

    yield "default", decode
    with use_in_vae(vae):
        yield "attention_ext", decode


CASES: dict[str, Callable[[bool], Iterator[tuple[str, Call]]]] = {
    "gemma4 forward, 4096 tokens, bfloat16": lambda small: gemma4_calls("forward", small),
    "gemma4 forward and backward, 4096 tokens, bfloat16": lambda small: gemma4_calls("both", small),
    "gemma4 64 tokens with a static cache, bfloat16": lambda small: gemma4_calls("generate", small),
    "AutoencoderKL decodes 1024 x 1024, float16": lambda small: vae_calls(FP16, small),
    "AutoencoderKL decodes 1024 x 1024, bfloat16": lambda small: vae_calls(BF16, small),
    "AutoencoderKL decodes 1024 x 1024, float32": lambda small: vae_calls(FP32, small),
}


class Kernels(logging.Handler):
    """What the log of attention_ext names: the operator and what runs for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        operator, *_, kernel, _reason = record.args
        self.found[f"{operator}: {kernel}"] = self.found.get(f"{operator}: {kernel}", 0) + 1


def kernels_of(call: Call) -> tuple[Tensor, dict[str, int]]:
    """The result of a call, and how often which kernel ran in it."""
    logger, handler = logging.getLogger("attention_ext"), Kernels()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        return call(), handler.found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def peak_bytes(call: Call) -> int:
    if common.DEVICE.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def apart(got: Tensor, want: Tensor) -> dict[str, float]:
    if not want.is_floating_point():
        return {"same_tokens": float((got == want).double().mean())}
    return {"max_difference": float((got.float() - want.float()).abs().max() / want.float().abs().max())}


def measure(calls: Iterator[tuple[str, Call]], most: int = 10) -> dict[str, Any]:
    """A row: {implementation: {"ms", "peak_bytes", "kernels"}}, "ratio", how far the results are apart."""
    row: dict[str, Any] = {}
    results: dict[str, Tensor] = {}
    for implementation, call in calls:
        torch.manual_seed(1)
        results[implementation], kernels = kernels_of(call)
        row[implementation] = {"ms": time_ms(call, most=most), "peak_bytes": peak_bytes(call), "kernels": kernels}
    ours, default = (row[name] for name in reversed(IMPLEMENTATIONS))
    return row | {"ratio": default["ms"] / ours["ms"]} | apart(results["attention_ext"], results["default"])


def about() -> dict[str, Any]:
    import diffusers
    import transformers

    cuda = common.DEVICE.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(common.DEVICE) if cuda else "none",
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "diffusers": diffusers.__version__,
        "csrc_tree": BUILD.csrc,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try whether everything runs")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which no further case is begun")
    args = parser.parse_args()
    common.DEVICE = torch.device(args.device)
    record: dict[str, Any] = about() | {"small": args.small, "clients": {}}
    begin = time.monotonic()
    for name, case in CASES.items():
        if args.only in name:
            if time.monotonic() - begin > args.limit:
                row: dict[str, Any] = {"not_available": f"not begun after {args.limit:.0f} s"}
            else:
                row = attempt(lambda case=case: measure(case(args.small), most=2 if args.small else 10))
            record["clients"][name] = row
            log(f"{name:52} {row.get('not_available') or round(row['ratio'], 3)}")
    json.dump(record, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
