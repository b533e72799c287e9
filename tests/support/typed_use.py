"""What mypy makes of attention_ext.operators: an ignored error that is none would be an error of its own. A test runs it, too."""

from torch import Tensor
from typing_extensions import assert_type

from attention_ext import operators


def right(query: Tensor) -> Tensor:
    assert_type(operators.sdpa(query, query, query, is_causal=True), Tensor)
    out, lse = operators.sdpa_forward(query, query, query, None, None, 0.0, False, kernel_name="auto")
    assert_type(lse, Tensor)
    assert_type(operators.sdpa_with_lse.default(query, query, query), tuple[Tensor, Tensor])
    return out


def wrong(query: Tensor) -> None:
    operators.sdpa(query, query, query, causal=True)  # type: ignore[call-arg]
    operators.sdpa(query, query, 1.0)  # type: ignore[arg-type]
    operators.sdpa_forward(query, query, query)  # type: ignore[call-arg]
