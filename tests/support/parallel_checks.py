"""Models in training by FSDP2 and by tensor parallelism, for tests/support/ranks.py to run: losses, gradients and updated weights
are those of one process.

A model of PyTorch alone whose attention sees DTensors, and where transformers is installed that of examples/parallel.py, whose
attention sees plain tensors.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from loader import script
from ranks import RANKS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import attention_ext

HEADS, GROUPS, E, ROWS = 4, 2, 512, 4  # query heads, key heads, head dim, sequences of the whole batch
RATE, STEPS = 1.0, 2
Results = dict[str, Tensor]


def attend(query: Tensor, *args: object, **options: object) -> Tensor:
    """By a kernel of this package, on the CPU by its reference; PyTorch's operator is what sdpa would be there."""
    seen.append(tuple(query.shape[:2]) if not isinstance(query, DTensor) else tuple(query.to_local().shape[:2]))
    if query.device.type == "cuda":
        return attention_ext.sdpa(query, *args, **options)
    return attention_ext.sdpa_with_lse(query, *args, **options)[0]


seen: list[tuple[int, int]] = []  # of each call the sequences and the heads that this process had


class Layer(nn.Module):
    """(B, L, 32) -> (B, L, 32); heads may be sharded."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        widths = {"q": (32, HEADS * E), "k": (32, GROUPS * E), "v": (32, GROUPS * E), "o": (HEADS * E, 32)}
        self.proj = nn.ModuleDict({name: nn.Linear(*width, bias=False) for name, width in widths.items()})
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (self.proj[name](normed).unflatten(-1, (-1, E)).transpose(1, 2) for name in "qkv")
        return x + self.proj["o"](self.attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A small language model; the loss of tokens (B, L), called as models of transformers are."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 32), nn.Linear(32, 128)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(2))

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def parallelize(model: Model, mesh: DeviceMesh, half: torch.dtype | None) -> Model:
    heads = ColwiseParallel(use_local_output=False)  # attention sees DTensors that are sharded along the heads
    plan = {f"layers.*.proj.{name}": heads for name in "qkv"} | {"layers.*.proj.o": RowwiseParallel(input_layouts=Shard(-1))}
    if mesh["tensor"].size() > 1:
        parallelize_module(model, mesh["tensor"], plan)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32))
    return model


def train(model: nn.Module, batches: list[Tensor], mesh: DeviceMesh | None = None) -> Results:
    """Losses of all steps, the gradients of the first and what the weights have changed by, each in full."""

    def full(t: Tensor) -> Tensor:
        return (t.full_tensor() if isinstance(t, DTensor) else t).detach().double().clone()

    before = {name: full(p) for name, p in model.named_parameters()}
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False), {}
    for step, tokens in enumerate(batches):
        if mesh is not None:
            tokens = tokens.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
        optimizer.zero_grad()
        out = model(tokens, labels=tokens, use_cache=False)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
        loss = loss.detach().double()
        if mesh is not None:
            dist.all_reduce(loss, group=mesh["data"].get_group())
            loss /= mesh["data"].size()
        found[f"loss {step}"] = loss
        if step == 0:
            found |= {f"gradient of {name}": full(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
    return found | {f"change of {name}": full(p) - before[name] for name, p in model.named_parameters()}


def compare(got: Results, one: Results, exact: Results, eps: float) -> None:
    """The error is at most twice that of one process in the same dtype by PyTorch's attention, or of the size of a rounding."""
    assert got.keys() == one.keys() == exact.keys() and len(exact) > 10
    for what, right in exact.items():
        assert float(right.norm()) > 0.0, what
        errors = [float((of[what] - right).norm() / right.norm()) for of in (one, got)]
        assert errors[1] <= 2.0 * errors[0] + 2.0 * eps, f"{what}: {errors[1]:.3g}, in one process {errors[0]:.3g}"


def of_the_example(model: nn.Module, mesh: DeviceMesh, half: torch.dtype | None) -> nn.Module:
    script("parallel.py", "examples").parallelize(model, mesh, half)
    return model


def of_transformers(model: nn.Module, mesh: DeviceMesh, half: torch.dtype | None) -> nn.Module:
    """The model from a checkpoint, distributed while it is loaded."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=mesh["tensor"].size(), fsdp_size=mesh["data"].size(), fsdp_mixed_precision=half is not None)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        model.save_pretrained(folders[0])  # the first process alone writes
        dist.barrier()
        # The dtype to compute in is FSDP2's to choose; with tensor parallelism alone it is that of the weights.
        options = {"attn_implementation": "attention_ext", "dtype": half if half and config.tp_size > 1 else torch.float32}
        loaded = type(model).from_pretrained(folders[0], distributed_config=config, **options).to(model.device)
        dist.barrier()
    return loaded


def make_own(implementation: str) -> Model:
    torch.manual_seed(1)
    return Model(attend if implementation == "attention_ext" else F.scaled_dot_product_attention)


def make_example(implementation: str) -> nn.Module:
    model = script("parallel.py", "examples").make_model()
    model.set_attn_implementation(implementation)
    return model


@contextmanager
def nothing_else() -> Iterator[None]:
    yield


@contextmanager
def registered() -> Iterator[None]:
    """attend is what models of transformers call for attention_ext."""
    from attention_ext.integrations import transformers as integration

    before, integration.sdpa = integration.sdpa, attend
    try:
        with integration.register(when="always"):
            yield
    finally:
        integration.sdpa = before


KINDS = {"own": (make_own, parallelize, nothing_else)}
if importlib.util.find_spec("transformers"):
    KINDS["example"] = (make_example, of_the_example, registered)
    KINDS["transformers"] = (make_example, of_transformers, registered)


def check(kind: str, tensor: int, device: str) -> None:
    """tensor: how many processes share the heads; the others share the batch."""
    make, parallel, around = KINDS[kind]
    mesh = init_device_mesh(device, (RANKS // tensor, tensor), mesh_dim_names=("data", "tensor"))
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(1, 3, (ROWS, 48), generator=generator).cumsum(1).to(device) for _ in range(STEPS)]
    with around():
        exact = train(make("eager").double().to(device), batches)
        for dtype in (torch.float32, torch.bfloat16):
            one = train(make("sdpa").to(device, dtype), batches)
            seen.clear()
            model = parallel(make("attention_ext").to(device), mesh, None if dtype == torch.float32 else dtype)
            got = train(model, batches, mesh)
            assert seen == [(ROWS // mesh["data"].size(), HEADS // tensor)] * 2 * STEPS  # a call for each layer and step
            compare(got, one, exact, torch.finfo(dtype).eps)


WAYS = {"fsdp": 1, "tensor": RANKS}
CHECKS = {f"{kind}, {way}": partial(check, kind, tensor) for kind in KINDS for way, tensor in WAYS.items()}
