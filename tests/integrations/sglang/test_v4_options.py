"""Which options of SGLang choose tamis for DeepSeek-V4, and which models it refuses by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from tamis.integrations.sglang.v4_options import check_served, is_chosen


def kernel(own: str | None = None, prefill: str | None = None, decode: str | None = None) -> SimpleNamespace:
    options = SimpleNamespace(dsa_prefill_backend=prefill, dsa_decode_backend=decode)
    if own is not None:
        options.dsv4_attn_backend = own
    return options


def test_an_option_for_v4_decides_alone() -> None:
    assert is_chosen(kernel("tamis"))
    assert is_chosen(kernel("tamis", "tamis", "flashmla_kv"))
    assert not is_chosen(kernel("flashmla"))
    assert not is_chosen(kernel("trtllm", "fa3", "fa3"))


@pytest.mark.parametrize("phases", [("tamis", None), (None, "tamis"), ("tamis", "tamis")])
def test_options_without_effect_are_refused(phases: tuple[str | None, str | None]) -> None:
    flag = "--dsa-decode-backend" if phases[1] else "--dsa-prefill-backend"
    with pytest.raises(ValueError, match=f"{flag} tamis has no effect.*'flashmla'; give --dsv4-attn-backend tamis"):
        is_chosen(kernel("flashmla", *phases))


def test_without_an_option_for_v4_both_phases_decide() -> None:
    assert is_chosen(kernel(None, "tamis", "tamis"))
    assert not is_chosen(kernel(None, "fa3", None))
    assert not is_chosen(SimpleNamespace())
    with pytest.raises(ValueError, match="--dsa-decode-backend tamis was given without --dsa-prefill-backend tamis"):
        is_chosen(kernel(None, "fa3", "tamis"))
    with pytest.raises(ValueError, match="--dsa-prefill-backend tamis was given without --dsa-decode-backend tamis"):
        is_chosen(kernel(None, "tamis", None))


def pool(main: str = "v4", compressed: str = "v4", ratios: tuple[int, ...] = (0, 4, 128)) -> SimpleNamespace:
    return SimpleNamespace(
        present_ratios=ratios,
        get_swa_key_layout=lambda: SimpleNamespace(value=main),
        compressed_kv_layout=lambda ratio: SimpleNamespace(value=compressed),
    )


def backend(caches: Any = None, coordinator: Any = None, prefill: str = "auto", dcp: int | None = 1) -> SimpleNamespace:
    return SimpleNamespace(
        token_to_kv_pool=caches or pool(),
        hisparse_coordinator=coordinator,
        dsv4_prefill_backend=prefill,
        model_runner=SimpleNamespace(server_args=SimpleNamespace(dcp_size=dcp)),
    )


def test_usual_models_are_served() -> None:
    check_served(backend(), 1)
    check_served(backend(pool(ratios=(1, 2)), prefill="flashmla_sparse", dcp=None), 1)


def test_models_without_a_choice_of_layouts_are_served_if_their_rows_fit() -> None:
    old = SimpleNamespace(swa_kv_pool=SimpleNamespace(kv_cache_total_dim=584))
    served = SimpleNamespace(token_to_kv_pool=old, hisparse_coordinator=None, model_runner=SimpleNamespace())
    check_served(served, 1)
    old.swa_kv_pool.kv_cache_total_dim = 576
    with pytest.raises(ValueError, match="its rows have 576 bytes and not 584"):
        check_served(served, 1)


REFUSED = {
    "its window cache has 'v41' rows and not 'v4' rows; set SGLANG_DSV4_KV_LAYOUT=v4": (backend(pool("v41")), 1),
    "its entries of ratio 1 cache has 'v41_fp4' rows": (backend(pool("v4", "v41_fp4", (1, 2))), 1),
    "HiSparse keeps entries in host memory": (backend(coordinator=object()), 1),
    "context parallelism spreads its tokens over 4 ranks .--attn-cp-size": (backend(), 4),
    "context parallelism spreads its tokens over 2 ranks .--dcp-size": (backend(dcp=2), 1),
    "--dsv4-prefill-backend flashmla_sparse_q8 names another kernel": (backend(prefill="flashmla_sparse_q8"), 1),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_models_are_refused_by_name(reason: str) -> None:
    with pytest.raises(ValueError, match=f"tamis cannot run the attention of this DeepSeek-V4 model: {reason}"):
        check_served(*REFUSED[reason])


def test_every_reason_is_told() -> None:
    with pytest.raises(ValueError, match=r"'v41' rows.*HiSparse.*context parallelism"):
        check_served(backend(pool("v41"), coordinator=object()), 2)
