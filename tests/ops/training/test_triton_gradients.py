"""The kernels of training against the reference in float64, interpreted on a CPU or compiled on a GPU."""

import bounds
import pytest
import torch
from torch import Tensor
from training import hostile_slots, normal, relative

from tamis.cache.selection import Rows
from tamis.ops.attention import gradients as attention
from tamis.ops.attention import triton_gradients as attention_kernels
from tamis.ops.attention.row_operations import AttendRows, AttendRowsBackward, IndexTarget
from tamis.ops.index import gradients as index
from tamis.ops.index import triton_gradients as index_kernels
from tamis.ops.index.loss_operations import IndexLoss
from tamis.ops.rows import torch_rows, triton_sums

MODES = pytest.mark.parametrize("deterministic", [False, True])
# Sums of at most 80 products, 40 columns and 20 heads in float32: the unit 2**-24, times the number of terms.
EXACT = 2.0**-24 * 80
# bf16 operands and results: errors of up to 2**-8 each that are evenly spread, in the 2-norm of hundreds of numbers.
ROUNDED = 2.0**-8


class Call:
    """One attention call and its backward pass, in the dtypes of kernels."""

    def __init__(
        self,
        *,
        tokens: int = 4,
        heads: int = 3,
        width: int = 24,
        value_dim: int = 16,
        columns: tuple[int, ...] = (21, 5),
        sink: bool = True,
        lse: bool = True,
        count: int = 19,
        dtype: torch.dtype = torch.float32,
        device: torch.device,
    ) -> None:
        self.dtype, self.value_dim, counts = dtype, value_dim, (count, 7)
        self.q = normal(tokens, heads, width, dtype=dtype).to(device)
        self.selections = [
            Rows(normal(n + 1, width, dtype=dtype).to(device)[:n], hostile_slots(tokens, k, n).to(device))
            for k, n in zip(columns, counts, strict=False)
        ]
        for selection in self.selections:
            # What lies after the rows is not theirs.
            selection.rows.as_strided((1, width), (width, 1), len(selection.rows) * width).fill_(torch.nan)
        if len(columns) == 1:
            lengths = torch.randint(0, columns[0] + 1, (tokens,), dtype=torch.int32)
            lengths[0] = columns[0]
            self.selections = [Rows(s.rows, s.slots, lengths.to(device)) for s in self.selections]
        self.sink = normal(heads, dtype=torch.float32).to(device) if sink else None
        self.dout = normal(heads, tokens, value_dim, dtype=dtype).to(device).transpose(0, 1)
        self.dlse = normal(tokens, heads, dtype=torch.float32).to(device) if lse else None

    def forward(self) -> AttendRows:
        return AttendRows(self.q, self.selections, 0.2, self.value_dim, self.sink, True, True, "auto")

    def backward(self, module, *, deterministic: bool, forward: AttendRows | None = None) -> tuple[Tensor, ...]:
        given = forward or self.forward()
        out, lse, _, rest = module.attend_rows(given)
        dout, dlse = (
            None if x is None else x.to(given.q.dtype if x is self.dout else lse.dtype) for x in (self.dout, self.dlse)
        )
        call = AttendRowsBackward(
            given.q, given.selections, 0.2, given.sink, out, rest, lse, dout, dlse, True, True, deterministic, "auto"
        )
        dq, drows, dsink = module.attend_rows_backward(call)
        return out, lse, dq, *drows, dsink

    def exact(self) -> tuple[Tensor, ...]:
        """The same on the host in float64."""
        selections = [
            Rows(s.rows.cpu().double(), s.slots.cpu(), None if s.lengths is None else s.lengths.cpu())
            for s in self.selections
        ]
        sink = None if self.sink is None else self.sink.cpu().double()
        call = AttendRows(self.q.cpu().double(), selections, 0.2, self.value_dim, sink, False, False, "auto")
        host = Call.__new__(Call)
        host.dout, host.dlse = self.dout.cpu(), None if self.dlse is None else self.dlse.cpu()
        return host.backward(attention, deterministic=False, forward=call)

    def check(self, *, deterministic: bool) -> tuple[Tensor, ...]:
        found = self.backward(attention_kernels, deterministic=deterministic)
        half = self.dtype == torch.bfloat16
        for one, other in zip(found, self.exact(), strict=True):
            one = one.cpu()
            assert torch.equal(one.isinf(), other.isinf())
            one, other = (x.double().nan_to_num(nan=torch.inf, neginf=0.0) for x in (one, other))
            if one.numel():
                error = float((one - other).norm() / other.norm().clamp_min(1e-30))
                assert error < (ROUNDED if half else EXACT)
        return found


@MODES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sink": False, "lse": False},
        {"columns": (21,)},  # with lengths
        {"width": 16, "value_dim": 16},  # no tail
        {"width": 20, "value_dim": 20, "columns": (3,)},  # a tail that is part of the value
        {"heads": 20, "columns": (17,)},  # two blocks of heads
        {"tokens": 1, "columns": (1,)},
        {"columns": (9, 2), "count": 1},
        {"width": 5, "value_dim": 2, "columns": (16,)},
    ],
    ids=str,
)
def test_gradients_of_attention(options: dict, deterministic: bool, device: torch.device) -> None:
    Call(**options, device=device).check(deterministic=deterministic)


@MODES
def test_16_bit_gradients_of_attention(deterministic: bool, device: torch.device) -> None:
    Call(dtype=torch.bfloat16, device=device).check(deterministic=deterministic)


def test_rows_that_nobody_chose_and_infinite_sinks(device: torch.device) -> None:
    call = Call(device=device)
    expected = call.exact()
    chosen = torch.cat([call.selections[0].slots.flatten(), torch.arange(19, 40, device=device).int()]).unique()
    for row in set(range(19)) - set(chosen.tolist()):
        call.selections[0].rows[row] = torch.nan
    found = call.check(deterministic=False)
    assert all(not x.isnan().any() for x in found)
    assert relative(found[2].cpu(), expected[2]) < EXACT
    call.sink[:2] = torch.tensor([torch.inf, -torch.inf])
    found = call.check(deterministic=True)
    assert (found[0][:, 0] == 0).all()
    assert (found[-1][:2] == 0).all()


@MODES
def test_upstream_gradients_of_any_strides(deterministic: bool, device: torch.device) -> None:
    """A sum has an upstream gradient that is one number, expanded. Those of empty rows may be NaN."""
    call = Call(columns=(9,), device=device)
    found = []
    for dout in (torch.tensor(0.7, device=device).expand(4, 3, 16), torch.full((4, 3, 16), 0.7, device=device)):
        call.dout = dout
        found.append(call.backward(attention_kernels, deterministic=deterministic))
    empty = found[0][1].isinf().all(1)
    assert empty.any()
    call.dout = torch.where(empty.view(-1, 1, 1), torch.nan, call.dout)
    call.dlse = torch.where(empty.view(-1, 1), torch.nan, call.dlse)
    found.append(call.backward(attention_kernels, deterministic=deterministic))
    for one, *others in zip(*found, strict=True):
        assert all(torch.allclose(one, other, rtol=EXACT, atol=EXACT) for other in others)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_grids(sizes: tuple[int, int, int], device: torch.device) -> None:
    tokens, columns, count = sizes
    call = Call(columns=(1,), device=device)
    slots = torch.zeros(tokens, columns, dtype=torch.int32, device=device)
    call.q, call.dout, call.dlse = call.q[:tokens], call.dout[:tokens], None
    call.selections = [Rows(call.selections[0].rows[:count], slots)]
    for deterministic in (False, True):
        out, lse, dq, drows, dsink = call.backward(attention_kernels, deterministic=deterministic)
        assert (lse == -torch.inf).all()
        assert all((x == 0).all() for x in (out, dq, drows, dsink))


def test_chunks_and_runs_have_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(tokens=6, columns=(9,), sink=False, device=device)
    expected = call.backward(attention_kernels, deterministic=True)
    for tokens in (1, 4, 6):
        monkeypatch.setattr(attention_kernels, "PAIR_BYTES", tokens * 9 * 24 * 4)
        found = call.backward(attention_kernels, deterministic=True)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_sums_by_row_have_the_bits_of_the_definition(device: torch.device) -> None:
    slots = torch.where(torch.rand(900) < 0.7, 0, torch.randint(0, 5, (900,))).int().to(device)
    values = torch.randn(900, 20).to(device)
    ours, defined = (
        triton_sums.RowSums(torch.zeros(4, 20, device=device)),
        torch_rows.RowSums(torch.zeros(4, 20), torch.float32, deterministic=True),
    )
    for some in torch.arange(900).split([1, 254, 2, 300, 343]):
        part = slice(int(some[0]), int(some[-1]) + 1)
        ours.add(slots[part], values[part].contiguous())
        defined.add(slots[part].cpu().long(), values[part].cpu())
    assert int((slots == 0).sum()) > 2 * triton_sums.BLOCK
    assert torch.equal(ours.result().cpu(), defined.result())


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_targets(normalise: bool, sink: bool, device: torch.device) -> None:
    call = Call(columns=(21,), heads=18, sink=sink, device=device)
    _, lse, _, _ = attention_kernels.attend_rows(call.forward())
    given = IndexTarget(call.q, call.selections, lse, 0.2, call.sink, normalise, "auto")
    found = attention_kernels.index_target(given).cpu()
    selection = call.selections[0]
    host = [Rows(selection.rows.cpu().double(), selection.slots.cpu(), selection.lengths.cpu())]
    logit = None if call.sink is None else call.sink.cpu().double()
    exact = attention.index_target(
        IndexTarget(call.q.cpu().double(), host, lse.cpu().double(), 0.2, logit, normalise, "auto")
    )
    assert relative(found, exact) < EXACT


def index_call(
    device: torch.device, *, gradients: bool = True, deterministic: bool = False, dtype: torch.dtype = torch.float32
) -> IndexLoss:
    q, keys, weights = (normal(*s, dtype=dtype).to(device) for s in ((5, 3, 12), (9, 12), (5, 3)))
    keys[4] = 0.0  # its products are zero, where the ReLU has no slope
    slots, target = hostile_slots(5, 19, 9), torch.rand(5, 19)
    slots[1, 7] = 4
    target[3] = 0.0
    target /= target.sum(1, keepdim=True).clamp_min(1e-30)
    return IndexLoss(
        q,
        keys,
        weights,
        slots.to(device),
        target.to(device),
        torch.rand(5).to(device),
        gradients,
        deterministic,
        "auto",
    )


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_sparse_loss(
    dtype: torch.dtype, deterministic: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = index_call(device, deterministic=deterministic, dtype=dtype)
    found = index_kernels.index_loss(call)
    wide = [x.cpu().double() if x.is_floating_point() else x.cpu() for x in call[:6]]
    for one, other in zip(found, index.index_loss(IndexLoss(*wide, True, False, "auto")), strict=True):
        # 16-bit gradients are rounded once; everything else is float32. Terms of the loss are as large as scores.
        size = other.abs().max() + (0.0 if one.dim() else 10.0)
        bounds.agree(one, other, EXACT * size, one.dtype if one.dim() else None)
    monkeypatch.setattr(index_kernels, "PAIR_BYTES", 2 * 19 * 12 * 4)
    again = index_kernels.index_loss(call)
    assert deterministic is False or all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_the_loss_alone(device: torch.device) -> None:
    call = index_call(device)
    loss, *gradients = index_kernels.index_loss(call._replace(gradients=False))
    assert torch.equal(loss, index_kernels.index_loss(call)[0])
    assert [x.numel() for x in gradients] == [0, 0, 0]
    empty = call._replace(slots=call.slots[:, :0], target=call.target[:, :0])
    assert float(index_kernels.index_loss(empty)[0]) == 0.0


def test_what_the_kernels_refuse(device: torch.device) -> None:
    wide = Call(width=16, columns=(3,), device=device).forward()
    with pytest.raises(TypeError, match="q must be at most float32 for the triton backend, got float64"):
        attention_kernels.check_attend_rows(wide._replace(q=wide.q.double()))
    with pytest.raises(ValueError, match="q must be at most 768 wide for the triton backend, got 800"):
        attention_kernels.check_attend_rows(wide._replace(q=torch.zeros(1, 1, 800)))
    call = index_call(device)
    with pytest.raises(ValueError, match="index_q must be at most 128 heads of 256 and 16384 numbers"):
        index_kernels.check_index_loss(call._replace(index_q=torch.zeros(1, 128, 256)))
    with pytest.raises(TypeError, match="index_q must be at most float32"):
        index_kernels.check_index_loss(call._replace(index_q=call.index_q.double()))
