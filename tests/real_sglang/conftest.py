"""Tests inside the real SGLang, on a machine without a GPU, in an environment of their own: `make test-sglang`.

SGLang's Triton kernels run in Triton's interpreter, so its pools and metadata are its own.
"""

import os

os.environ["SGLANG_PLUGINS"] = "tamis"
os.environ["TRITON_INTERPRET"] = "1"
# The newer top-k kernel is compiled with nvcc, for a GPU.
os.environ["SGLANG_OPT_USE_TOPK_V2"] = "0"

import pytest
import shims  # noqa: F401  before the first import of SGLang
import torch
from sglang.srt.plugins import load_plugins


@pytest.fixture(autouse=True, scope="session")
def plugins() -> None:
    """What SGLang does first in every process."""
    load_plugins()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang asks of a GPU before it constructs a backend."""
    from sglang.srt.layers.attention import dsa_backend

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # Its kernel is Triton's, but refuses tensors that are not on a GPU.
    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", _expanded)


def _expanded(new: torch.Tensor, seen: torch.Tensor, total: int, _longest: int) -> torch.Tensor:
    """The length that each new token sees."""
    pairs = zip(new.tolist(), seen.tolist(), strict=True)
    found = torch.cat([torch.arange(length - count + 1, length + 1) for count, length in pairs]).int()
    assert len(found) == total
    return found
