"""The kernels by name: the one place from which tests, benches and scripts have them."""


def kernel_names(table: str = "forward") -> tuple[str, ...]:
    """Of a table in csrc/plan, in its order. The package is imported by the call, so that a caller chooses when."""
    import torch

    import attention_ext  # noqa: F401

    return tuple(torch.ops.attention_ext.kernels(table))
