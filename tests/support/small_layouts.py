"""Every kind of layout, as small as it can be."""

import torch

from tamis.cache.layout import index_fp8, index_mxfp4, plain_fp8, rows, v4_fp8, v32_fp8, v41_fp4, v41_fp8

SMALL = {"latent": 32, "rope": 8}
LAYOUTS = {
    "fp32": rows(torch.float32, **SMALL),
    "bf16": rows(torch.bfloat16, latent=32, rope=0),
    "fp16": rows(torch.float16, **SMALL),
    "v32-fp8": v32_fp8(**SMALL, tile=16),
    "v32-fp8 exact": v32_fp8(**SMALL, tile=32, scale_mode="exact"),
    "v4-fp8": v4_fp8(**SMALL, tile=8),
    "plain-fp8": plain_fp8(**SMALL),
    "v41-fp8": v41_fp8(latent=56, rope=8),
    "v41-fp4": v41_fp4(latent=24, rope=8),
    "index-fp8": index_fp8(dim=40),
    "index-mxfp4": index_mxfp4(dim=64),
}
