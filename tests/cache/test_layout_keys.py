"""The text that carries a layout through a torch op."""

from dataclasses import replace

import torch
from small_layouts import LAYOUTS

from tamis.cache.fields import Field, from_key
from tamis.cache.layout import NAMES, Layout, index_fp8, index_mxfp4, named, v4_fp8, v32_fp8


def every_layout() -> list[Layout]:
    odd = Layout("odd/name, with+signs", 3, 0, torch.int8, 3, Field(torch.uint8, 3, 0, 3, 7), scale_floor=1 / 3)
    return [
        *(named(name) for name in NAMES),
        *LAYOUTS.values(),
        v32_fp8(scale_mode="exact"),
        v32_fp8(tile=64),
        v32_fp8(latent=128, rope=0),
        v4_fp8(rounding="none"),
        v4_fp8(page_align=1),
        v4_fp8(latent=128, rope=32, tile=32, page_align=512),
        index_fp8(dim=64, rounding="none"),
        index_mxfp4(dim=64, page_align=576),
        replace(v32_fp8(), scale_floor=1e-7),
        odd,
    ]


def test_a_layout_comes_back_from_its_key() -> None:
    layouts = every_layout()
    for layout in layouts:
        assert from_key(layout.key) == layout
        assert from_key(layout.key).key == layout.key
    different = set(layouts)
    assert len({layout.key for layout in layouts}) == len(different) > 20
