"""Machine code that uses registers of a product which still runs is found, on made-up code and on kernels."""

import re

import pytest

from tamis.cuda.compiler import compiled
from tamis.cuda.nvrtc import has_nvrtc
from tamis.lab.offline import cuda
from tamis.lab.offline.attend import many_heads_cases
from tamis.lab.offline.cuda import CudaCase, compile_case, cuobjdump
from tamis.lab.offline.operands import Instruction, disassembled, early_uses, functions

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R200, gdesc[UR8].tnspB, R24, gsb0"
OTHER = "HGMMA.64x64x16.F32 R88, R204, gdesc[UR8].tnspB, R88, gsb0"
WAIT, WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def found(*texts: str) -> list[int]:
    """The numbers of the instructions that are refused. Branches go to the addresses 16 times a number."""
    refused = early_uses([Instruction(16 * number, text) for number, text in enumerate((*texts, "EXIT"))])
    return [int(text.split()[0], 16) // 16 for text in refused]


@pytest.mark.parametrize(
    "text",
    [
        "MOV R200, R5",
        "@!P0 IMAD.MOV.U32 R203, RZ, RZ, R7",
        "LDS.128 R200, [R8]",
        "LDS.128 R197, [R8]",  # 197 to 200
        "LDS.64 R202, [R8+0x40]",
        "LD.E.64 R199, desc[UR4][R8.64]",
        "SHFL.BFLY PT, R201, R9, 0x1, 0x1f",
        "LOP3.LUT P2, R200, R54, 0x80008000, R47, 0xc8, !PT",
        "CS2R R202, SRZ",
        "IMAD.WIDE.U32 R202, R27, R12, RZ",
        "HGMMA.64x64x16.F32 R180, gdesc[UR8], RZ, !UPT",  # 180 to 211
        "FADD R3, R24, R4",
        "FMUL R151, R151, R9",
        "STS [R9], R87",
        "HGMMA.64x64x16.F32 R104, R84, gdesc[UR8].tnspB, R104",  # an operand is an accumulator of the first
    ],
)
def test_a_product_keeps_its_registers_until_a_wait(text: str) -> None:
    uses_accumulators = "R151" in text
    before = "HGMMA.64x256x16.F32.BF16 R24, R200, gdesc[UR8].tnspB, R24, gsb0" if uses_accumulators else PRODUCT
    assert found(before, text, WAIT, text) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "FADD R3, R200, R4",  # operands may be read
        "STS.128 [R200], R204",
        "LDS.64 R198, [R8]",  # 198 and 199
        "LDS.128 R196, [R200]",
        "ISETP.GE.AND P1, PT, R200, R23, PT",
        "FSETP.GEU.AND P3, PT, R201, 6.103515625e-05, PT",
        "VOTE.ANY P1, P1",
        "R2UR UR4, R200",
        "LDGSTS.E.BYPASS.128 [R200+0x100], desc[UR16][R12.64], P2",
        "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R200+URZ+0x8], RZ",
        "HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0",
        PRODUCT,
    ],
)
def test_other_uses_are_no_conflict(text: str) -> None:
    assert found(PRODUCT, text, WAIT) == []


def test_a_wait_counts_groups() -> None:
    first, second = "MOV R200, R5", "MOV R204, R5"
    assert found(PRODUCT, OTHER, first, second, WAIT) == [2, 3]
    assert found(PRODUCT, OTHER, WAIT_FOR_ALL_BUT_ONE, first, second) == [4]
    assert found(PRODUCT, OTHER, WAIT, first, second) == []
    # A product without a group of its own belongs to the next one.
    assert found(PRODUCT.removesuffix(", gsb0"), OTHER, WAIT_FOR_ALL_BUT_ONE, first) == [3]
    assert found(PRODUCT.removesuffix(", gsb0"), OTHER, WAIT, first) == []


def test_branches_are_followed() -> None:
    assert found("MOV R200, R5", PRODUCT, "@P0 BRA 0x0", WAIT) == [0]
    assert found("MOV R200, R5", PRODUCT, WAIT, "@P0 BRA 0x0") == []
    assert found(PRODUCT, OTHER, "@P0 BRA 0x0", WAIT_FOR_ALL_BUT_ONE, "MOV R200, R5", "MOV R204, R5") == [5]
    assert found(PRODUCT, "@P0 BRA 0x40", WAIT, "BRA 0x50", "MOV R200, R5", "MOV R201, R5") == [4, 5]
    assert found(PRODUCT, "BRA.U UP0, 0x40", WAIT, "BRA 0x50", "MOV R200, R5", "MOV R201, R5") == [4, 5]
    assert found(PRODUCT, "BRA 0x30", "MOV R200, R5", WAIT) == []
    assert found(PRODUCT, "CALL.REL.NOINC 0x40", WAIT, "EXIT", "MOV R200, R5", "RET.REL.NODEC R4 0x0") == [4]
    assert found("BRX R4, 0x20") == [0]


@pytest.fixture(scope="module")
def case() -> CudaCase:
    if not has_nvrtc() or cuobjdump() is None:
        pytest.skip("NVRTC or cuobjdump is missing")
    return next(case for case in many_heads_cases() if "v4-bf16, selections: 1" in case.label)


def test_a_kernel_without_a_wait_is_refused(case: CudaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = cuobjdump()
    assert tool is not None
    listing = disassembled(tool, compiled(case.program, "sm_90a"))
    ((name, code),) = functions(listing)
    assert name == "attend_many_heads"
    assert sum(step.is_product for step in code) == 136
    assert early_uses(code) == []
    assert compile_case(case, "sm_90a")[0].early_uses == ()
    waits = re.findall(r"/\*([0-9a-f]{4,})\*/ +WARPGROUP.DEPBAR", listing)
    assert len(waits) == 13
    needed = [at for at in waits if early_uses([step for step in code if step.address != int(at, 16)])]
    assert len(needed) >= 5  # others stand directly before one that waits for more
    without = [step for step in code if step.address != int(needed[0], 16)]
    monkeypatch.setattr(cuda, "functions", lambda listing: iter([(name, without)]))
    with pytest.raises(RuntimeError, match=r"registers of products too early, 0x.* use another version of NVRTC"):
        compile_case(case, "sm_90a")
