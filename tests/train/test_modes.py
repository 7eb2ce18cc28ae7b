"""Training in programs that also serve in inference mode, or that run under autocast."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from training import normal, relative

from tamis import IndexRecipe
from tamis.layers.recording import Recording
from tamis.train import (
    Entries,
    Pack,
    Rows,
    attend_rows,
    compress_rows,
    fake_quantise,
    index_loss,
    index_target,
    select_rows,
    warmup_loss,
)

pytestmark = pytest.mark.own_settings("changes settings itself")
BOUNDS, TOPK = [0, 2, 6], 3
RECIPE = IndexRecipe(rope_dim=4)


class Given:
    """Leaves of autograd, and everything that a program may make of them in a rollout."""

    def __init__(self) -> None:
        shapes = ((6, 2, 8), (6, 8), (6, 2, 8), (6, 8), (6, 2), (2, 8), (2,))
        self.leaves = [normal(*shape, dtype=torch.float32).requires_grad_() for shape in shapes]
        self.q, self.rows, *self.index, self.bias, self.sink = self.leaves

    def constants(self) -> tuple[Pack, Entries, Tensor, Tensor, Tensor]:
        """The pack, its entries, the selection as replayed, its target, and a table of angles."""
        pack, recording = Pack.of(BOUNDS), Recording(TOPK)
        slots = select_rows(*self.index, pack.starts, pack.ends, TOPK)
        positions = torch.where(slots >= 0, slots - pack.starts.unsqueeze(1), -1)
        for name, own in (("a", slice(0, 2)), ("b", slice(2, 6))):
            recording.load(0, name, positions[own])
        lse = attend_rows(self.q, Rows(self.rows, slots), scale=0.3, value_dim=8).lse
        target = index_target(self.q, Rows(self.rows, slots), lse, scale=0.3)
        angles = torch.linspace(0, 1, 24).view(6, 4)
        return pack, pack.entries(2), recording.packed(0, ["a", "b"], pack), target, angles

    def results(self, pack: Pack, spans: Entries, slots: Tensor, target: Tensor, angles: Tensor) -> list[Tensor]:
        """What every function of `tamis.train` gives, with these constants."""
        turned = {"positions": pack.positions, "cos_sin": angles}
        rows = fake_quantise(self.rows, "index-fp8", RECIPE, **turned)
        entries = compress_rows(rows, rows * 0.5, self.bias, spans)
        lengths = torch.full((6,), TOPK, dtype=torch.int32)
        selections = [Rows(rows, slots, lengths), Rows(entries, spans.slots())]
        found = attend_rows(self.q, selections, scale=0.3, value_dim=8, sink=self.sink)
        sparse = index_loss(*self.index, slots, target)
        dense = warmup_loss(self.q, self.rows, None, *self.index, pack.starts, pack.ends, scale=0.3)
        return [entries, found.out, found.lse, sparse, dense]


def test_numbers_in_inference_mode_are_those_of_training() -> None:
    given = Given()
    expected = given.results(*given.constants())
    with torch.inference_mode():
        found = given.results(*given.constants())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(other.requires_grad and not one.requires_grad for one, other in zip(found, expected, strict=True))


def test_what_a_rollout_made_in_inference_mode_is_trained_with() -> None:
    """Autograd saves no tensor of inference mode; those of a rollout are constants, whose copies it may save."""
    given = Given()
    with torch.inference_mode():
        rollout = given.constants()
        sink, keys = given.sink.clone(), given.rows.clone()
    assert all(x.is_inference() for x in (rollout[0].starts, rollout[1].spans, *rollout[2:], sink, keys))
    results = [given.results(*constants) for constants in (given.constants(), rollout)]
    results += [
        [attend_rows(given.q, Rows(k, rollout[2]), scale=0.3, value_dim=8, sink=s).out]
        for s, k in ((given.sink.detach(), given.rows.detach()), (sink, keys))
    ]
    gradients = [torch.autograd.grad(sum(x.sum() for x in found), given.leaves, allow_unused=True) for found in results]
    for one, other in (gradients[:2], gradients[2:]):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)


def mixed(run: Callable[[Tensor, Tensor], Tensor], one: Tensor, other: Tensor) -> list[Tensor]:
    """A result and its gradients with the second argument in bf16 under autocast, and with its numbers in float32."""
    found = []
    for narrow in (True, False):
        leaves = [one.detach().clone().requires_grad_(), other.detach().bfloat16().float().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            result = run(leaves[0], leaves[1].bfloat16() if narrow else leaves[1])
        gradients = torch.autograd.grad(result.sum(), leaves) if result.requires_grad else ()
        found.append(torch.cat([x.detach().double().flatten() for x in (result, *gradients)]))
    return found


def test_autocast_widens_what_is_computed_in_float32() -> None:
    """Norms give float32 under autocast and projections bf16. Without it, the mixture is refused by name."""
    given, pack = Given(), Pack.of(BOUNDS)
    q, keys, weights = (x.detach() for x in given.index)
    entries, bias = pack.entries(2), given.bias.detach()
    found, expected = mixed(lambda k, q: select_rows(q, k, weights, pack.starts, pack.ends, 2), keys, q)
    assert torch.equal(found, expected)
    found, expected = mixed(lambda v, s: compress_rows(v, s, bias, entries), keys, keys * 2)
    assert relative(found, expected) < 2.0**-8  # the scores' gradient is rounded to bf16 on its way
    with pytest.raises(TypeError, match=r"index_keys must be bfloat16 like index_q, got float32; .*torch.autocast"):
        select_rows(q.bfloat16(), keys, weights, pack.starts, pack.ends, 2)
    with pytest.raises(TypeError, match=r"scores must be float32 like values, got bfloat16; .*torch.autocast"):
        compress_rows(keys, keys.bfloat16(), bias, entries)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="values must be bfloat16 or"):
        compress_rows(keys.long(), keys, bias, entries)


def test_forward_mode_and_transforms_are_refused() -> None:
    """Torch drops the tangents of an op that records no gradient, so the derivative would be zero without an error; and
    of torch.func it says that a static method is missing."""
    given = Given()
    pack, spans, slots, target, _ = given.constants()
    q, rows, sink, *rest = (x.detach() for x in (given.q, given.rows, given.sink, given.bias, *given.index))
    bias, *index = rest

    def attention(*x: Tensor) -> Tensor:
        return attend_rows(x[0], Rows(x[1], slots), scale=0.3, value_dim=8, sink=x[2]).out

    def dense(*x: Tensor) -> Tensor:
        return warmup_loss(q, rows, None, *x, pack.starts, pack.ends, scale=0.3)

    functions = {
        "attend_rows": (attention, {"q": q, r"selections\[0\].rows": rows, "sink": sink}),
        "compress_rows": (lambda *x: compress_rows(*x, spans), {"values": rows, "scores": rows, "bias": bias}),
        "fake_quantise": (lambda x: fake_quantise(x, "index-fp8"), {"x": rows}),
        "index_loss": (
            lambda *x: index_loss(*x, slots, target),
            dict(zip(("index_q", "index_keys", "weights"), index, strict=True)),
        ),
        "warmup_loss": (dense, dict(zip(("index_q", "index_keys", "weights"), index, strict=True))),
    }
    with forward_ad.dual_level():
        for function, (run, arguments) in functions.items():
            for number, name in enumerate(arguments):
                values = list(arguments.values())
                values[number] = forward_ad.make_dual(values[number], torch.ones_like(values[number]))
                with pytest.raises(ValueError, match=f"{name} must be without a tangent.*{function} has a backward"):
                    run(*values)
                values = list(arguments.values())
                refused = f"must be without a transform of torch.func.*differentiate {function} with"
                with pytest.raises(ValueError, match=refused):
                    torch.func.grad(lambda *x: run(*x).sum(), argnums=number)(*values)  # noqa: B023
        # A target is a constant, whose derivative is zero.
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert (index_target(dual, Rows(rows, slots), torch.zeros(6, 2), scale=0.3) > 0).any()
