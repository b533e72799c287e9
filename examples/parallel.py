"""Trains a small transformers model on several processes with attention_ext: data parallel, tensor parallel, or both.

    pip install "attention_ext[transformers]"
    torchrun --nproc-per-node 2 examples/parallel.py              # data parallel: FSDP2, half of the batch on each
    torchrun --nproc-per-node 2 examples/parallel.py --tensor 2   # tensor parallel: half of the heads on each
    torchrun --nproc-per-node 4 examples/parallel.py --tensor 2   # both

On as many GPUs as processes it is NCCL and bfloat16, else gloo on the CPU and float32. All three print the same losses up to
rounding, and so does one process. attention_ext needs nothing for it: FSDP2 gathers the weights of a layer before it runs, and
tensor parallelism gives each process its heads, so the kernels see plain tensors in both. docs/parallel.md says more.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import attention_ext.integrations.transformers as integration

BATCH, LENGTH, RATE = 4, 256, 1e-2  # sequences of all processes together, tokens of each, learning rate
PLAN = {  # of a layer; a column-wise part gives each process its heads, a row-wise part adds up what they made of them
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def make_model(**changes: int) -> LlamaForCausalLM:
    """The same on every process: 4 query heads and 2 key heads of dim 512, the head dim of Gemma 4's global layers."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 512}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(LlamaConfig(**sizes | changes), attn_implementation="attention_ext")


def parallelize(model: LlamaForCausalLM, mesh: DeviceMesh, half: torch.dtype | None = None) -> None:
    """In place. mesh: with the dims "data" and "tensor". half: the dtype to compute in; weights and gradients stay in float32."""
    if mesh["tensor"].size() > 1:
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tensor"], PLAN)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):  # the model last: it takes what is left
        fully_shard(part, mesh=mesh["data"], mp_policy=policy)


def make_batch(step: int) -> Tensor:
    """(BATCH, LENGTH) tokens, the same on every process. A token is followed by one of two, so there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    steps = torch.randint(1, 3, (BATCH, LENGTH), generator=generator)
    return steps.cumsum(1) % 128


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, mesh: DeviceMesh | None = None) -> float:
    """The loss of the whole batch before the step. The gradients stay."""
    if mesh is not None:  # the processes of one group "tensor" work on the same rows
        tokens = tokens.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss, group=mesh["data"].get_group())
        loss /= mesh["data"].size()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1, help="processes that share the heads; the others share the batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--when", default="preferred", choices=("preferred", "always"), help="which calls attention_ext takes")
    args = parser.parse_args()

    rank, processes = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= processes
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    mesh = init_device_mesh(device.type, (processes // args.tensor, args.tensor), mesh_dim_names=("data", "tensor"))

    integration.register(when=args.when)  # in each process
    model = make_model().to(device)
    parallelize(model, mesh, torch.bfloat16 if on_gpus else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(args.steps):
        loss = train_step(model, optimizer, make_batch(step).to(device), mesh)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
