"""`choose`: the backend that runs a layer, with reasons, and what runs each stage."""

from dataclasses import replace

import pytest
import torch

from tamis import LayerSpec, PagedCache, Selection, choose
from tamis.backends import BACKENDS, STAGES, TRAINED, Backend
from tamis.cache.layout import named, v32_fp8
from tamis.choice import training_kernels

SPEC = LayerSpec(heads=16, topk=2048)
PICKY = Backend(
    "picky",
    "picky",
    "an imaginary kernel",
    devices=("cuda",),
    query_dtypes=(torch.bfloat16,),
    heads=(64, 128),
    max_latent=256,
    max_rope=32,
    power_of_two_tiles=True,
)
REFERENCE = BACKENDS[-1]
ANY_CPU = Backend("cpu-only", "reference", "for the host", devices=("cpu",))


def test_reference_runs_everything_on_a_cpu() -> None:
    for heads in (1, 7, 128):
        for layout in ("v32-fp8", "v32-bf16", "plain-fp8"):
            for page_size in (1, 61, 64):
                choice = choose(LayerSpec(heads=heads, topk=3), "cpu", layout=layout, page_size=page_size)
                assert choice.name == "reference"
                assert choice.rejected == {b: ["needs a cuda device, not cpu"] for b in ("hopper", "triton")}


def test_all_reasons_of_a_rejection_are_given() -> None:
    layout = v32_fp8(latent=480, rope=64, tile=96)
    spec = LayerSpec(heads=16, latent_dim=480, value_dim=480, topk=5)
    choice = choose(spec, "cpu", layout=layout, dtype=torch.float32, backends=(PICKY, *BACKENDS))
    assert choice.name == "reference"
    reasons = choice.rejected["picky"]
    for part in ("cuda device", "float32", "latent width 480", "rope width 64", "tiles of 96", "16 heads"):
        assert any(part in reason for reason in reasons), part
    assert "picky: rejected: needs a cuda device, not cpu; " in choice.explain()
    assert choice.explain().startswith("reference: chosen")


def test_first_that_fits_wins_and_the_rest_are_named() -> None:
    choice = choose(SPEC, "cpu", backends=(ANY_CPU, REFERENCE))
    assert choice.name == "cpu-only"
    assert choice.passed_over == ("reference",)
    assert "reference: possible" in choice.explain()
    assert choose(SPEC, "cpu", prefer="reference", backends=(ANY_CPU, *BACKENDS)).name == "reference"


def test_a_named_backend_runs_or_fails_with_its_reasons() -> None:
    refused = r"^backend 'picky' cannot run this layer on cpu: needs a cuda device, not cpu, .*; reference can$"
    with pytest.raises(ValueError, match=refused):
        choose(SPEC, "cpu", prefer="picky", backends=(PICKY, *BACKENDS))
    with pytest.raises(ValueError, match="prefer must be one of 'auto', 'hopper', 'triton', 'reference', got 'flash'"):
        choose(SPEC, "cpu", prefer="flash")
    with pytest.raises(
        ValueError, match=r"^no backend can run this layer on cpu \(picky: needs a cuda device, not cpu, .*\)$"
    ):
        choose(SPEC, "cpu", backends=(PICKY,))


def test_layout_must_match_the_spec() -> None:
    with pytest.raises(ValueError, match="layout must be 576 wide like the spec, got 512"):
        choose(SPEC, "cpu", layout="v4-fp8")
    with pytest.raises(ValueError, match="layout must be one of v32-bf16"):
        choose(SPEC, "cpu", layout="v33")
    with pytest.raises(ValueError, match="page_size must be >= 1"):
        choose(SPEC, "cpu", page_size=0)


def explained(heads: int, layout: str, dtype: torch.dtype = torch.bfloat16, value_dim: int = 512) -> dict[str, str]:
    """The explanation of each stage of a layer on Hopper."""
    made = named(layout)
    spec = LayerSpec(heads, made.latent, made.rope, value_dim, topk=2048)
    text = choose(spec, "cuda", layout=made, dtype=dtype, capability=(9, 0)).explain()
    assert text.startswith("hopper: chosen")
    return dict(line.strip().split(": ", 1) for line in text.splitlines() if line.startswith("  "))


@pytest.mark.parametrize(
    ("heads", "layout", "runs"),
    [
        (1, "v32-fp8", "few_heads.cu for up to 264 tokens, heads_as_columns.cu for more"),
        (16, "v32-bf16", "few_heads.cu"),
        (
            24,
            "v32-fp8",
            "few_heads.cu for up to 22 tokens, heads_as_columns.cu for up to 66 tokens, "
            "few_heads.cu for up to 75 tokens, heads_as_columns.cu for more",
        ),
        (64, "v32-fp8", "few_heads.cu for up to 4 tokens, many_heads.cu for more"),
        (128, "v32-bf16", "few_heads.cu for up to 2 tokens, many_heads_bf16.cu for more"),
        (8, "v4-fp8", "many_heads.cu"),
        (128, "v4-fp8", "many_heads.cu"),
    ],
)
def test_an_explanation_names_the_source_that_attends(heads: int, layout: str, runs: str) -> None:
    stages = explained(heads, layout)
    assert list(stages) == list(STAGES)
    assert stages["attend"] == runs
    assert (
        stages["index"]
        == "topk_rows.cu and topk.cu select; fp8_scores.cu and scores.cu score 16, 32 or 64 heads of 128, triton others"
    )
    assert stages["write"] == stages["combine"] == "triton"


def test_an_explanation_says_why_portable_kernels_run_where_hopper_has_some() -> None:
    few, many = "few heads: ", "; many heads: "
    fp32, fp16 = "queries are float32, not bfloat16", "queries are float16, not bfloat16"
    for heads in (16, 64):
        found = explained(heads, "v32-fp8", torch.float32)["attend"]
        assert found in (
            f"triton, because {few}{fp32} or float16{many}{fp32}",
            f"triton, because many heads: {fp32}; {few}{fp32} or float16",
        )
    assert explained(24, "v4-fp8", torch.float16)["attend"] == (
        f"triton, because {few}rows are v4-fp8, not v32-fp8 or v32-bf16{many}{fp16}"
    )
    found = explained(16, "v32-bf16", torch.float16)["attend"]
    assert found == f"triton, because {few}{fp16}, over v32-bf16 rows{many}{fp16}"
    found = explained(16, "v32-bf16", value_dim=256)["attend"]
    assert found == f"triton, because {few}values are 256 wide, not 512{many}values are 256 wide, not 512"
    found = explained(16, "v32-fp16")["attend"]
    rows = "v32-fp16, not all v32-fp8, all v4-fp8, all v32-bf16, or all v4-bf16"
    assert found == f"triton, because {few}rows are v32-fp16, not v32-fp8 or v32-bf16{many}caches are {rows}"
    # fp16 queries over V3.2's FP8 rows are for those of few heads, however many there are.
    found = explained(128, "v32-fp8", torch.float16)["attend"]
    assert found == (
        "few_heads.cu for up to 5 tokens, heads_as_columns.cu for up to 16 tokens, "
        "few_heads.cu for up to 18 tokens, heads_as_columns.cu for more"
    )


@pytest.mark.parametrize("layout", ["v32-fp8", "v32-bf16", "v4-fp8", "plain-fp8", "v32-fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [1, 16, 17, 32, 33, 64, 128])
def test_an_explanation_is_the_decision(heads: int, dtype: torch.dtype, layout: str) -> None:
    """For every number of tokens the kernels that a call gets are those that the explanation names."""
    from tamis.ops.attention import hopper, triton_kernels

    cache, told = PagedCache(layout, 2, 64, "meta"), explained(heads, layout, dtype)["attend"]
    names = told.split(", because")[0].split(", ")
    for tokens in (1, 2, 3, 4, 5, 8, 9, 16, 17, 22, 23, 32, 33, 66, 67, 75, 76, 132, 133, 264, 265, 600, 4096):
        q = torch.empty(tokens, heads, cache.layout.width, dtype=dtype, device="meta")
        selections = [Selection(cache, torch.empty(tokens, 2048, dtype=torch.int32, device="meta"))]
        kernels = hopper.kernels_for(q, selections, 512, None)
        expected = next(n for n in names if " up to " not in n or tokens <= int(n.split(" up to ")[1].split()[0]))
        found = "triton" if kernels is triton_kernels else kernels.source(q, selections, 132)
        assert expected.split(" for ")[0] == found


def test_backends_with_one_kind_of_kernels_and_unknown_ones_have_no_more_to_say() -> None:
    ours = replace(PICKY, base="triton", stages=("attend",), max_latent=None, max_rope=None)
    choice = choose(
        LayerSpec(64, topk=4), "cuda", capability=(9, 0), backends=(replace(ours, heads=(1, 128)), *BACKENDS)
    )
    assert [str(k) for k in choice.kernels][-3:] == ["attend: picky", "combine: triton", "output: triton"]
    assert "\n  " not in choose(SPEC, "cpu").explain()
    assert {k.runs for k in choose(SPEC, "cpu").kernels} == {"reference"}


def test_what_trains_on_a_device_and_why_the_rest_does_not() -> None:
    hopper, triton, reference = training_kernels(torch.device("cuda"), (8, 0))
    missing = "no kernels with gradients for index_target, warmup_loss, compress_rows, fake_quantise"
    assert str(hopper) == f"hopper: nothing (compute capability 8.0 is not one of 9.x; {missing})"
    assert triton.runs == ("attend_rows", "index_target", "index_loss")
    assert triton.reasons == ("no kernels with gradients for warmup_loss, compress_rows, fake_quantise",)
    assert reference.runs == ("warmup_loss", "compress_rows", "fake_quantise")
    assert reference.reasons == ()
    found = training_kernels(torch.device("cpu"), None)
    assert [one.runs for one in found] == [(), (), TRAINED]
    assert str(found[1]).startswith("triton: nothing (needs a cuda device, not cpu; no kernels with")
