"""Every backend returns lse and max_logits in the form that was asked for."""

import math

import pytest
import torch
from attention_calls import attend_call
from seeds import reseed

from tamis import PagedCache, Selection
from tamis.ops import write_kv
from tamis.ops.attention import reference, triton_kernels
from tamis.ops.attention.operations import attend
from tamis.ops.lse import LseForm

FORMS = [LseForm(), LseForm(1), LseForm(3), LseForm(2, plus_inf=True), LseForm(0, base_2=True), LseForm(6, True, True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", [reference, triton_kernels])
def test_the_lse_has_the_form_that_was_asked_for(kernels, form: LseForm) -> None:
    reseed(1)
    cache = PagedCache("v32-bf16", 4, 16)
    write_kv(torch.randn(64, 576), cache, torch.arange(64), backend="reference")
    slots = torch.randint(0, 64, (6, 9), dtype=torch.int32)
    slots[3] = -1
    call = attend_call(
        torch.randn(6, 5, 576), [Selection(cache, slots)], scale=0.05, out=torch.empty(6, 5, 512), lse_form=form
    )
    lse, max_logits = kernels.attend(call)
    natural, largest = reference.attend(call._replace(lse_form=LseForm()))
    assert lse.is_contiguous()
    assert lse.shape == max_logits.shape == call.fake()[0].shape
    for token in range(6):
        group = form.group or 1
        row = (token // group, slice(None), token % group) if form.group else token
        expected = natural[token] / math.log(2) if form.base_2 else natural[token]
        if token == 3:
            expected = torch.full((5,), torch.inf if form.plus_inf else -torch.inf)
        assert torch.allclose(lse[row], expected, atol=1e-3)
        assert torch.allclose(max_logits[row], largest[token], atol=1e-3)


def test_the_operation_keeps_the_form_while_compiling() -> None:
    cache, slots = PagedCache("v32-bf16", 1, 16), torch.zeros(4, 3, dtype=torch.int32)

    @torch.compile(backend="eager", fullgraph=True)
    def run(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = attend_call(q, [Selection(cache, slots)], scale=0.05, out=q[..., :512].clone(), lse_form=LseForm(2))
        return attend(given)

    assert run(torch.randn(4, 3, 576))[0].shape == (2, 3, 2)
