"""The linear operators and their module on DTensors."""

from __future__ import annotations

import copy
from functools import partial

import torch
from helpers import leaves, normal
from ranks import RANKS
from sharding_compare import check, compare, same, scatter
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import attention_ext

OPS = torch.ops.attention_ext


def linear(device: str, *leading: int, bias: bool = True) -> list[Tensor | None]:
    """input (*leading, 8), weight (10, 8), bias (10,) or None"""
    return leaves(normal(*leading, 8, device=device), normal(10, 8, device=device), normal(10, device=device) if bias else None)


@check
def linear_float32(device: str) -> None:
    mesh = init_device_mesh(device, (RANKS,))
    op = attention_ext.linear_float32
    compare(mesh, op, linear(device, 4, 6), "R R R", "R", "R R R")
    compare(mesh, op, linear(device, 4, 6), "0 R R", "0", "0 P P")  # rows
    compare(mesh, op, [t.detach() for t in linear(device, 4, 6)], "1 R R", "1")  # rows whose gradient 2.10 cannot flatten
    compare(mesh, op, linear(device, 4, 6), "R 0 0", "2", "P 0 0")  # features
    compare(mesh, op, linear(device), "R 0 0", "0", "P 0 0")
    compare(mesh, op, linear(device, 4, 6, bias=False), "2 1", "P", "2 1")  # the dim that is summed over
    compare(mesh, op, linear(device, 6), "1 1 R")  # not beside a bias
    for shape in ((1, RANKS), (RANKS, 1)):
        compare(init_device_mesh(device, shape), op, linear(device, 4, 6), "0R R0 R0", "02", "0P P0 P0")


def batch_norm(device: str) -> list[Tensor]:
    """bn_weight, bn_bias, running_mean, running_var"""
    weight, bias, mean, var = (torch.rand(10).to(device) + 0.5 for _ in range(4))
    return [weight.requires_grad_(), bias.requires_grad_(), mean, var]


@check
def linear_batchnorm_softmax(device: str) -> None:
    mesh = init_device_mesh(device, (RANKS,))
    op = OPS.linear_batchnorm_softmax
    arguments = [*linear(device, 6), *batch_norm(device), torch.rand(10).to(device).requires_grad_()]
    replicated, rows = "R R R R R R R R", "0 R R R R R R R"
    for training in (False, True):
        compare(mesh, op, [*arguments, training, 1e-5], replicated, "R R R R", "R R R R R R")
    compare(mesh, op, [*arguments, False, 1e-5], rows, "0 R R 0", "0 P P P P P")
    compare(mesh, op, [*arguments, True, 1e-5], rows)  # the same operands, and statistics of all rows


@check
def linear_batchnorm_softmax_by_a_number(device: str) -> None:
    def op(*tensors: Tensor, training: bool) -> Tensor:
        names = ("bn_weight", "bn_bias", "running_mean", "running_var")
        named = dict(zip(names, tensors[3:], strict=True))
        return attention_ext.linear_batchnorm_softmax(*tensors[:3], **named, scale=2.5, training=training)

    mesh = init_device_mesh(device, (RANKS,))
    arguments = [*linear(device, 6), *batch_norm(device)]
    compare(mesh, partial(op, training=False), arguments, "0 R R R R R R", "0", "0 P P P P")
    compare(mesh, partial(op, training=True), arguments, "0 R R R R R R")


@check
def module(device: str) -> None:
    mesh = init_device_mesh(device, (RANKS,))
    plain = attention_ext.nn.LinearBatchNormSoftmax(nn.Linear(8, 10), nn.BatchNorm1d(10), 2.5).to(device)
    sharded = distribute_module(copy.deepcopy(plain), mesh)
    for training in (True, False):
        plain.train(training), sharded.train(training)
        input = normal(6, 8, device=device)
        want, got = plain(input), sharded(*scatter(mesh, [input], "0"))
        same("out", got, want, None if training else "0")
        want.square().sum().backward()
        got.square().sum().backward()
        right = {**dict(plain.named_buffers()), **{name: p.grad for name, p in plain.named_parameters()}}
        for name, t in {**dict(sharded.named_buffers()), **{name: p.grad for name, p in sharded.named_parameters()}}.items():
            same(name, t, right[name])
