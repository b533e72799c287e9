"""scripts/check_binary.py on made-up code: what it must find, and what it must let pass."""

from types import ModuleType

import loader
import pytest

HALF = ("6__half", "13__nv_bfloat16")
GOOD = "        /*0010*/  UTMALDG.5D [UR8], [UR4] ;\n        /*0020*/  HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 ;\n"
EMPTY = "        /*0000*/  EXIT ;\n"
TRAP = "        /*0000*/  BPT.TRAP 0x1 ;\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loader.script("check_binary.py")


def names() -> list[str]:
    widths = ("Li384ELb0EEELb0E", "Li384ELb0EEELb1E", "Li384ELb1EEELb0E", "Li512ELb1EEELb1E")
    fused = [f"_Z20fused_forward_kernelIN9FusedTileI{t}{width}Evj" for t in HALF for width in widths]
    tiles = [f"{tile}NS_8RowsKindE{kind}E" for tile, kind in (("Li64ELi128EEEL", 0), ("Li64ELi192EEEL", 0), ("Li256ELi128EEEL", 1))]
    fused += [f"_Z19rows_forward_kernelIN8RowsTileI{t}{tile}Evj" for t in HALF for tile in tiles]
    products = (
        "WgmmaScoresWork",
        "WgmmaValuesWork",
        "WgmmaLinearWork",
        "score_gradients_kernel",
        "16gradients_kernel",
        "backward_turns_kernel",
        "row_values_kernel",
        "row_grad_kernel",
        "column_grads_kernel",
        "mask_tiles_kernel",
    )
    halves = [f"_Z{kernel}I9WgmmaTileI{t}Lb0EEEEv" for kernel in products for t in HALF]
    split = (
        *("WgmmaLinearWork", "SplitHalfScoresWork", "SplitHalfValuesWork"),
        *("SplitHalfWeightsWork", "SplitHalfWeightGradsWork", "split_half_gradients_kernel", "split_half_score_pairs_kernel"),
    )
    fused += [f"_Zsplit_half_fused_{part}_kernelIEv" for part in ("rows", "columns", "mask")]
    return [*fused, *halves, *(f"_Z{kernel}I18SplitHalfWgmmaTileEEv" for kernel in split)]


def dump(codes: dict[str, str], arch: str) -> str:
    return f"\n\tcode for {arch}\n\t.target\t{arch}\n" + "".join(f"\n\t\tFunction : {name}\n{code}" for name, code in codes.items())


def findings_of(script: ModuleType, changes: dict[str, str | None], elsewhere: dict[str, str] | None = None) -> list[str]:
    codes: dict[str, str] = {}
    for name in names():
        code = changes.get(name, GOOD)
        if code is not None:
            codes[name] = code
    sass = dump(dict.fromkeys(names(), TRAP) | (elsewhere or {}), "sm_80") + dump(codes, "sm_90a")
    findings: list[str] = []
    script.check_wgmma_products(script.functions_of(sass), findings)
    return findings


def test_traps_for_other_cards_pass(script):
    assert findings_of(script, {}) == []


@pytest.mark.parametrize("name", names())
def test_empty_kernels_for_other_cards_are_found(script, name):
    assert [name in finding and "BPT" in finding for finding in findings_of(script, {}, {name: EMPTY})] == [True]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    ("code", "found"),
    [
        (None, "no code for sm_90a"),
        (EMPTY, "no HGMMA"),
        (GOOD.replace("HGMMA", "HMMA"), "no HGMMA"),
        (GOOD.replace("UTMALDG", "LDGSTS"), "no UTMALDG"),
        (GOOD + "        /*0030*/  STL [R1], R2 ;\n", "local memory"),
    ],
)
def test_every_kernel_is_looked_at(script, name, code, found):
    findings = findings_of(script, {name: code})
    assert findings and all(found in finding or code is EMPTY for finding in findings)
    assert any(found in finding for finding in findings)


def test_a_library_without_the_kernels(script):
    findings: list[str] = []
    script.check_wgmma_products(script.functions_of(dump({"_Zother": EMPTY}, "sm_80")), findings)
    assert sum("fused_forward_kernel is missing" in finding for finding in findings) == 1
    assert sum("rows_forward_kernel is missing" in finding for finding in findings) == 1
    assert sum("WgmmaScoresWork" in finding or "WgmmaValuesWork" in finding for finding in findings) == 4
    assert sum("WgmmaLinearWork" in finding for finding in findings) == 3
