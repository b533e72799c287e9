"""The plan: pure host arithmetic, no GPU needed."""

import random

import pytest
import torch

import attention_ext

CAP = 128 << 20


def plan(
    sizes: list[int],
    element: int = 2,
    mask: str = "none",
    causal: bool = False,
    cap: int = CAP,
    capability: int = 90,
    tma_operands: bool = True,
) -> tuple:
    return torch.ops.attention_ext.plan(sizes, element, mask, causal, False, capability, tma_operands, cap)


def needs_hopper_kernels() -> None:
    if "9.0a" not in torch.ops.attention_ext.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")


def test_problem_97() -> None:
    kernel, reason, workspace, preferred = plan([32, 32, 32, 512, 512, 1024, 1024], capability=80)
    assert kernel == "pipeline"
    assert reason
    assert 0 < workspace <= CAP
    assert preferred is False
    needs_hopper_kernels()
    kernel, reason, workspace, preferred = plan([32, 32, 32, 512, 512, 1024, 1024])
    assert kernel == "sm90_pipeline" and reason and 0 < workspace <= CAP and preferred


def test_what_the_kernels_for_hopper_take() -> None:
    needs_hopper_kernels()
    shape = [1, 8, 2, 1024, 1024]
    for E, Ev in ((257, 257), (512, 512), (64, 320), (512, 8), (64, 64)):
        assert plan([*shape, E, Ev])[:3:2] == ("sm90_512", 0)
        assert plan([*shape, E, Ev], mask="float", causal=False)[0] == "sm90_512"
    for E, Ev in ((513, 512), (512, 520), (1024, 1024), (2000, 8)):
        assert plan([*shape, E, Ev])[0] == "sm90_pipeline"
    assert plan([*shape, 512, 512], capability=80)[0] == "pipeline"
    assert plan([*shape, 512, 512], capability=100)[0] == "pipeline"
    assert plan([*shape, 512, 512], element=4)[0] == "pipeline"
    assert plan([*shape, 512, 512], tma_operands=False)[0] == "pipeline"
    assert plan([1, 8, 2, 1024, 0, 512, 512])[0] == "pipeline"
    assert plan([*shape, 0, 512])[0] == "pipeline"
    assert plan([1, 8, 2, 1024, 1 << 18, 512, 512])[0] == "sm90_512"
    assert plan([1, 8, 2, 1024, (1 << 18) + 1, 512, 512])[0] == "pipeline"


@pytest.mark.parametrize(
    ("sizes", "causal", "kernel"),
    [
        ([64, 8, 8, 64, 64, 768, 768], False, "sm90_1024"),
        ([16, 16, 16, 128, 128, 640, 640], False, "sm90_1024"),
        ([32, 8, 8, 64, 64, 1024, 1024], False, "sm90_1024"),
        ([64, 8, 8, 128, 128, 1024, 1024], False, "sm90_pipeline"),
        ([1, 8, 8, 4096, 64, 1024, 1024], False, "sm90_pipeline"),
        ([4, 8, 8, 256, 256, 1024, 1024], False, "sm90_1024"),
        ([16, 16, 16, 256, 256, 768, 768], False, "sm90_pipeline"),
        ([16, 16, 16, 256, 256, 768, 768], True, "sm90_1024"),
        ([1, 8, 8, 127, 4096, 1024, 1024], True, "sm90_1024"),
        ([1, 8, 8, 127, 4096, 512, 512], True, "sm90_512"),
    ],
)
def test_short_problems(sizes: list[int], causal: bool, kernel: str) -> None:
    """Few keys above head dim 512, as measured; keys behind the last query do not count in causal attention."""
    needs_hopper_kernels()
    assert plan(sizes, causal=causal)[0] == kernel


def test_few_rows_and_short_keys() -> None:
    """What takes over where a fused kernel has few CTAs, and above head dim 512 where problems are short."""
    needs_hopper_kernels()
    assert plan([1, 1, 1, 4096, 4096, 512, 512])[0] == "sm90_pipeline"
    assert plan([1, 1, 1, 4096, 1024, 512, 512])[0] == "sm90_512"
    assert plan([1, 1, 1, 16384, 16384, 512, 512])[0] == "sm90_512"
    assert plan([1, 4, 4, 64, 64, 1024, 1024])[0] == "sm90_1024"
    assert plan([1, 4, 4, 64, 4096, 1024, 1024])[0] == "sm90_pipeline"


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ([8, 32, 4, 1, 8192, 512, 512], "sm90_512"),
        ([1, 32, 32, 1, 8192, 512, 512], "sm90_512"),
        ([1, 8, 8, 64, 8192, 512, 512], "sm90_pipeline"),
        ([1, 1, 1, 128, 16384, 512, 512], "sm90_pipeline"),
        ([1, 16, 16, 64, 16384, 320, 320], "sm90_512"),
        ([8, 32, 4, 1, 8192, 768, 768], "sm90_1024"),
        ([4, 32, 4, 16, 4096, 768, 768], "sm90_1024"),
        ([1, 32, 4, 1, 8192, 1024, 1024], "sm90_pipeline"),
    ],
)
def test_decoding(sizes: list[int], kernel: str) -> None:
    """Few queries a head and many keys, as measured: the pipeline multiplies 128 rows of every query head, however few."""
    needs_hopper_kernels()
    assert plan(sizes)[0] == kernel


def test_preferred_is_what_was_measured_faster() -> None:
    needs_hopper_kernels()
    assert plan([1, 8, 8, 1024, 1024, 512, 512])[3] and plan([1, 8, 8, 1024, 1024, 1024, 1024])[3]
    assert not plan([1, 8, 8, 1024, 64, 512, 512])[3] and not plan([1, 8, 8, 1024, 1024, 256, 256])[3]
    assert not plan([1, 8, 8, 1024, 1024, 512, 512], capability=80)[3]
    assert not plan([1, 8, 8, 1024, 1024, 512, 256])[3] and not plan([1, 8, 8, 1024, 1024, 1032, 512])[3]


@pytest.mark.parametrize("cap", [0, 1 << 16, 1 << 20, CAP])
def test_workspace_stays_under_the_cap_or_is_one_row(cap: int) -> None:
    random.seed(0)
    for _ in range(300):
        B, H, L, S = (random.choice([1, 2, 3, 8, 100, 1000, 4096, 100_000]) for _ in range(4))
        element = random.choice([2, 4, 8])
        row = 2 * (S + 8) * max(element, 4) + 2048
        for capability, E in ((80, 64), (90, 600)):
            kernel, _, workspace, _ = plan([B, H, H, L, S, E, E], element, cap=cap, capability=capability)
            assert workspace <= max(cap, row)
            assert (workspace == 0) == (kernel in ("sm90_512", "sm90_1024"))


def test_nothing_to_do_takes_no_workspace() -> None:
    assert plan([0, 4, 4, 5, 5, 8, 8])[2] == 0
    assert plan([2, 4, 4, 0, 5, 8, 8])[2] == 0


def test_sizes_are_checked() -> None:
    with pytest.raises(RuntimeError, match="sizes: expected"):
        plan([1, 2, 3])


def test_build_says_what_it_is() -> None:
    version, csrc, major, built_for = torch.ops.attention_ext.build_info()
    assert version == attention_ext.__version__
    assert csrc
    assert (major == 0) == (built_for == "") == version.endswith("+cpu")
