"""attention_ext in models of diffusers: results and gradients are those of the default; what is in use can be taken back."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

pytest.importorskip(
    "diffusers", minversion="0.42", reason="diffusers is not installed, or older: pip install 'attention_ext[diffusers]'"
)

from diffusers import AutoencoderKL, AutoencoderKLWan, UNet2DConditionModel, UNet2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from helpers import normal
from redirected import run_own
from torch import Tensor, nn

from attention_ext.integrations import check_tested
from attention_ext.integrations.diffusers import AttnProcessor, use_in_vae

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def convolutions_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's rounds its operands to TF32 by default: a last bit of attention would become one of eleven."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def kl(device: str = "cpu") -> nn.Module:
    """One head of 512 channels in encoder and decoder, as in Stable Diffusion's."""
    torch.manual_seed(1)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    return AutoencoderKL(**blocks, block_out_channels=[32, 512], layers_per_block=1, norm_num_groups=8).eval().to(device)


def wan(device: str = "cpu") -> nn.Module:
    """One head of 64 channels; Wan's own has 384."""
    torch.manual_seed(1)
    return AutoencoderKLWan(base_dim=16, z_dim=4, dim_mult=[1, 4], num_res_blocks=1, temperal_downsample=[False]).eval().to(device)


VAES = {"kl": (kl, (1, 3, 16, 16)), "wan": (wan, (1, 3, 1, 16, 16))}


def through(vae: nn.Module, x: Tensor) -> Tensor:
    return vae.decode(vae.encode(x).latent_dist.mode()).sample


def unets(device: str) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    torch.manual_seed(1)
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 8}
    plain = UNet2DModel(**sizes, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    crossed = UNet2DConditionModel(**sizes, **blocks, cross_attention_dim=24, attention_head_dim=8)
    x, time = torch.randn(2, 3, 8, 8, device=device), torch.tensor([3, 7], device=device)
    other = {"sample": torch.randn(2, 4, 8, 8, device=device), "timestep": time}
    other |= {"encoder_hidden_states": torch.randn(2, 5, 24, device=device)}
    other |= {"encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], device=device)}
    return {"plain": (plain.eval().to(device), {"sample": x, "timestep": time}), "crossed": (crossed.eval().to(device), other)}


def close(got: Tensor, want: Tensor, exact: Tensor) -> None:
    """The error is at most twice that of the default, in whose dtype the whole model runs; exact: in float32."""
    errors = [float((of.float() - exact).norm() / exact.norm()) for of in (want, got)]
    assert got.dtype == want.dtype and errors[1] <= 2.0 * errors[0] + 1e-5, errors


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VAES)
def test_vae(name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_own(monkeypatch)
    make, shape = VAES[name]
    vae, x = make(device), normal(*shape, device=device)
    exact = through(vae, x)
    vae, x = vae.to(dtype), x.to(dtype)
    want = through(vae, x)
    with use_in_vae(vae, "always") as use:
        close(through(vae, x), want, exact)
    assert (use.override.taken, use.override.left) == (2, 0)
    assert torch.equal(through(vae, x), want) and use.override.taken == 2


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "crossed"])
def test_unet(name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_own(monkeypatch)
    model, arguments = unets(device)[name]
    exact = model(**arguments).sample
    model, arguments = model.to(dtype), {key: t.to(dtype) if t.is_floating_point() else t for key, t in arguments.items()}
    want, processor = model(**arguments).sample, AttnProcessor("always")
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    assert all(type(module.processor) is AttnProcessor2_0 for module in attentions) and len(attentions) >= 3
    for module in attentions:
        module.set_processor(processor)
    close(model(**arguments).sample, want, exact)
    assert (processor.override.taken, processor.override.left) == (len(attentions), 0)


def test_gradients(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_own(monkeypatch)
    vae, x = kl(device), normal(1, 3, 16, 16, device=device)
    want = torch.autograd.grad(through(vae, x).square().mean(), list(vae.encoder.parameters()))
    with use_in_vae(vae, "always"):
        got = torch.autograd.grad(through(vae, x).square().mean(), list(vae.encoder.parameters()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4 * float(other.abs().max()) + 1e-7)


@torch.no_grad()
def test_preferred_leaves_float64_and_the_cpu_to_pytorch(device: str) -> None:
    vae, x = kl(device).double(), normal(1, 3, 16, 16, device=device).double()
    want = through(vae, x)
    with use_in_vae(vae) as use:
        assert torch.equal(through(vae, x), want)
    (reason,) = use.override.reasons
    assert (use.override.taken, use.override.left) == (0, 2) and ("on cpu" if device == "cpu" else "faster") in reason


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_preferred_takes_half_types_and_float32_on_hopper(dtype: torch.dtype) -> None:
    vae, x = kl("cuda").to(dtype), normal(1, 3, 64, 64, device="cuda").to(dtype)
    with use_in_vae(vae) as use:
        through(vae, x)
    assert use.override.taken == (2 if torch.cuda.get_device_capability() == (9, 0) else 0)


@torch.no_grad()
@pytest.mark.parametrize("name", VAES)
def test_compiled(name: str) -> None:
    make, shape = VAES[name]
    vae, x = make(), normal(*shape)
    latent = vae.encode(x).latent_dist.mode()
    want = vae.decode(latent).sample
    with use_in_vae(vae, "always") as use:
        torch._dynamo.reset()
        got = torch.compile(vae.decode, fullgraph=name == "kl", backend="eager")(latent).sample
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert use.override.taken >= 1


def test_a_copy_runs_its_own_weights() -> None:
    vae, x = kl(), normal(1, 3, 16, 16)
    with torch.no_grad(), use_in_vae(vae, "always"):
        other = copy.deepcopy(vae)
        for parameter in other.decoder.parameters():
            parameter.zero_()
        assert not through(other, x).any() and through(vae, x).any()
        assert other.decoder.forward.within.taken == 2


def test_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = kl()
    outer = use_in_vae(vae)
    inner = use_in_vae(vae, "always")
    with pytest.raises(RuntimeError, match="vae: expected the forward that use_in_vae has set, got another one: undo that first"):
        outer.undo()
    inner.undo()
    inner.undo()
    outer.undo()
    assert "forward" not in vae.encoder.__dict__ and "forward" not in vae.decoder.__dict__


def test_other_threads_and_errors_leave_no_mode_behind() -> None:
    vae, x = kl(), normal(1, 3, 16, 16)
    with torch.no_grad(), use_in_vae(vae, "always") as use:
        with pytest.raises(RuntimeError):
            vae.decoder(x[0, 0])
        thread = threading.Thread(target=lambda: vae.decode(normal(1, 4, 8, 8)))
        thread.start()
        thread.join()
        assert use.override.taken == 1
        torch.nn.functional.scaled_dot_product_attention(*(normal(1, 2, 4, 8) for _ in range(3)))
    assert (use.override.taken, use.override.left) == (1, 0)


def test_refusals() -> None:
    with pytest.raises(TypeError, match="vae: expected a model with an encoder or a decoder, got Linear"):
        use_in_vae(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="when: expected"):
        AttnProcessor("sometimes")
    with pytest.raises(
        ImportError, match=r"tested with diffusers 0\.42 and this is 0\.41\.0: pip install 'diffusers==0\.42\.\*', or"
    ):
        check_tested("diffusers", "0.41.0", "0.42")
