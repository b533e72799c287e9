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


def test_problem_97() -> None:
    kernel, reason, workspace, preferred = plan([32, 32, 32, 512, 512, 1024, 1024])
    assert kernel == "pipeline"
    assert reason
    assert 0 < workspace <= CAP
    assert preferred is False


@pytest.mark.parametrize("cap", [0, 1 << 16, 1 << 20, CAP])
def test_hopper_has_a_fused_kernel_for_head_dims_from_257_to_512() -> None:
    if "9.0a" not in torch.ops.attention_ext.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")
    shape = [1, 8, 2, 1024, 1024]
    for E, Ev in ((257, 257), (512, 512), (64, 320), (512, 8)):
        assert plan([*shape, E, Ev])[0] == "sm90_512"
        assert plan([*shape, E, Ev], mask="float", causal=False)[2] == 0
    for E, Ev in ((256, 256), (513, 512), (512, 520), (1024, 1024), (0, 512)):
        assert plan([*shape, E, Ev])[0] == "pipeline"
    assert plan([*shape, 512, 512], capability=80)[0] == "pipeline"
    assert plan([*shape, 512, 512], capability=100)[0] == "pipeline"
    assert plan([*shape, 512, 512], element=4)[0] == "pipeline"
    assert plan([*shape, 512, 512], tma_operands=False)[0] == "pipeline"
    assert plan([1, 8, 2, 1024, 0, 512, 512])[0] == "pipeline"


def test_workspace_stays_under_the_cap_or_is_one_row(cap: int) -> None:
    random.seed(0)
    for _ in range(300):
        B, H, L, S = (random.choice([1, 2, 3, 8, 100, 1000, 4096, 100_000]) for _ in range(4))
        element = random.choice([2, 4, 8])
        workspace = plan([B, H, H, L, S, 64, 64], element, cap=cap)[2]
        row = 2 * (S + 8) * max(element, 4) + 2048
        assert 0 < workspace <= max(cap, row)


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
