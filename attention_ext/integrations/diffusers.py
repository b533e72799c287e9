"""attention_ext in models of diffusers: an attention processor, and VAEs, whose attention no processor and no backend reaches.

diffusers has a dispatcher for attention (set_attention_backend), but its VAEs and UNets do not ask it. They call
F.scaled_dot_product_attention, so attention_ext.override does what is to be done; this file says where.
"""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import diffusers
from torch import Tensor, nn

from .. import override
from .._checks import message
from .._when import When
from . import check_tested

TESTED = "0.42"
check_tested("diffusers", diffusers.__version__, TESTED)

from diffusers.models.attention_processor import AttnProcessor2_0  # noqa: E402

__all__ = ["AttnProcessor", "InUse", "use_in_vae"]


class AttnProcessor(AttnProcessor2_0):  # type: ignore[misc]
    """diffusers' AttnProcessor2_0 with attention_ext.sdpa, for models with attention processors: UNets, AutoencoderKL.

        unet.set_attn_processor(attention_ext.integrations.diffusers.AttnProcessor())

    Args:
        when: which calls go to attention_ext.sdpa, as in attention_ext.override; the others stay with PyTorch.

    Attributes:
        override: counts the calls and says why some are left.
    """

    def __init__(self, when: When = "preferred") -> None:
        super().__init__()
        self.override = override(when)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.override:
            out: Tensor = super().__call__(*args, **kwargs)
            return out


class _Within:
    """A module's forward within an override; a copy of the module has one of its own."""

    def __init__(self, forward: Callable[..., Any], within: override) -> None:
        functools.update_wrapper(self, forward)
        self.forward, self.within = forward, within

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.within:
            return self.forward(*args, **kwargs)


class InUse:
    """What use_in_vae returns; undo() takes it back, and so does the end of a with block.

    Attributes:
        override: counts the calls and says why some are left.
    """

    def __init__(self, modules: list[nn.Module], within: override) -> None:
        self.override = within
        self._before = [(module, module.__dict__.get("forward"), _Within(module.forward, within)) for module in modules]
        for module, _, ours in self._before:
            module.forward = ours

    def undo(self) -> None:
        """Puts the modules' forward back; nothing where that has been done.

        Raises:
            RuntimeError: something else was put around it since.
        """
        for module, _, ours in self._before:
            if module.__dict__.get("forward") is not ours:
                raise RuntimeError(message("vae", "the forward that use_in_vae has set", "another one: undo that first"))
        for module, before, _ in self._before:
            del module.forward
            if before is not None:
                module.forward = before
        self._before = []

    def __enter__(self) -> "InUse":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def use_in_vae(vae: nn.Module, when: When = "preferred") -> InUse:
    """Attention of a VAE by attention_ext.sdpa: AutoencoderKL, and those of Wan, Qwen-Image, HunyuanVideo, Cosmos and others.

        use = attention_ext.integrations.diffusers.use_in_vae(pipe.vae)

    Their attention has one head as wide as the channels, 384 or 512, where PyTorch has no fast kernel.

    Args:
        vae: a model with an encoder or a decoder, or both.
        when: which calls go to attention_ext.sdpa, as in attention_ext.override. "preferred" takes half types and float32.

    Raises:
        TypeError: neither encoder nor decoder is a module.
    """
    parts = [part for name in ("encoder", "decoder") if isinstance(part := getattr(vae, name, None), nn.Module)]
    if not parts:
        raise TypeError(message("vae", "a model with an encoder or a decoder", type(vae).__name__))
    return InUse(parts, override(when))
