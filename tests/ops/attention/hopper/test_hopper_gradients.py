"""Gradients of attention in CUDA C++: the source runs on the host, warps in random order, against float64."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gradients_emulated import Emulated
from seeds import reseed
from torch import Tensor
from training import hostile_slots, normal

from tamis.cache.selection import Rows
from tamis.cuda.compiler import Program
from tamis.ops.attention import gradients as exact
from tamis.ops.attention import hopper
from tamis.ops.attention.hopper import gradients as kernels
from tamis.ops.attention.row_operations import AttendRows, AttendRowsBackward
from tamis.ops.attention.triton_gradients import Given, attend_rows_with
from tamis.ops.rows import ordered_sums
from tamis.ops.rows.ordered_sums import OrderedSums
from tamis.ops.rows.row_sums import natural_columns

SCALE = 0.06
# The table of errors: p and dz are rounded to bf16 as operands, and dq once more.
ERROR = 2.6e-3
# Where attention is peaked, and delta exact.
PEAKED = 3e-3


@pytest.fixture(scope="session")
def emulated(host_folder: Path) -> Callable[[Program], Emulated]:
    return functools.cache(lambda program: Emulated(host_folder, program))


class Call:
    """Arguments in bf16, and what must come out, in float64."""

    def __init__(
        self,
        *,
        heads: int,
        columns: int,
        tokens: int = 2,
        width: int = 576,
        count: int = 90,
        options: bool = False,
        amplitude: float = 1.0,
    ) -> None:
        reseed(heads + columns)
        self.q, self.rows = (normal(*s, dtype=torch.bfloat16) for s in ((tokens, heads, width), (count, width)))
        self.q *= amplitude
        slots = hostile_slots(tokens, columns, count)
        slots = slots if options else torch.where(slots < 0, 3, slots)
        lengths = torch.full((tokens,), max(0, columns - 3), dtype=torch.int32) if options else None
        self.selection = Rows(self.rows, slots, lengths)
        self.dout = normal(tokens, heads, 512, dtype=torch.bfloat16)
        self.dlse = normal(tokens, heads, dtype=torch.float32) if options else None
        self.sink = normal(heads, dtype=torch.float32) if options else None
        wide = Rows(self.rows.double(), slots, lengths)
        sink = None if self.sink is None else self.sink.double()
        forward = AttendRows(self.q.double(), [wide], SCALE, 512, sink, True, False, "")
        out, self.lse, _, rest = exact.attend_rows(forward)
        back = (forward.q, [wide], SCALE, sink, out, rest, self.lse, self.dout.double(), self.dlse)
        self.dq, (self.drows,), _ = exact.attend_rows_backward(AttendRowsBackward(*back, True, True, False, ""))
        self.delta = (out * self.dout.double()).sum(-1).float()

    @property
    def given(self) -> Given:
        lse = self.lse.float()
        return Given(self.q, self.selection, self.dout, lse, self.delta, self.dlse, self.sink, SCALE, 512)


def check(found: Tensor, expected: Tensor, error: float = ERROR) -> None:
    assert float((found.double() - expected).norm()) <= error * float(expected.norm())


CASES = [
    (64, {"columns": 130}),
    (9, {"columns": 70, "options": True}),
    (24, {"columns": 64, "options": True, "width": 512}),
    (70, {"columns": 5, "options": True, "tokens": 1}),
]


@pytest.mark.parametrize(("heads", "options"), CASES, ids=str)
def test_gradients_on_the_host(emulated, heads: int, options: dict) -> None:
    call = Call(heads=heads, **options)
    dq = torch.full_like(call.q, torch.nan)
    launch = emulated(kernels.program(call.q.shape[2], kernels.heads_of(heads), ordered=False))
    summed = kernels.add_at_once(call.given, dq, launch, wanted=True)
    check(dq, call.dq)
    check(natural_columns(summed, torch.float32), call.drows)


@pytest.mark.parametrize(("count", "amplitude"), [(90, 0.05), (90, 8.0), (1, 1.0)])
def test_peaked_and_flat_attention_on_the_host(emulated, count: int, amplitude: float) -> None:
    """The rows of the table of errors; a single row, which every column is, has no gradient through its weight."""
    call = Call(heads=9, columns=70, count=count, amplitude=amplitude, options=True)
    dq = torch.full_like(call.q, torch.nan)
    launch = emulated(kernels.program(576, kernels.heads_of(9), ordered=False))
    summed = natural_columns(kernels.add_at_once(call.given, dq, launch, wanted=True), torch.float32)
    largest = torch.exp(SCALE * torch.einsum("thd,nd->thn", call.q.double(), call.rows.double()) - call.lse[..., None])
    assert count == 1 or float(largest.amax(2).mean()) > 0.5 or amplitude < 1
    for one, other in ((dq, call.dq), (summed, call.drows)):
        check(one, other, PEAKED if amplitude > 1 else ERROR)


@pytest.mark.parametrize(("heads", "options"), CASES[1:], ids=str)
def test_ordered_gradients_on_the_host(emulated, heads: int, options: dict, monkeypatch) -> None:
    call = Call(heads=heads, **options)
    launch = emulated(kernels.program(call.q.shape[2], kernels.heads_of(heads), ordered=True))
    found = []
    for size in (1, 1 << 30):  # a token at a time, and all of them
        monkeypatch.setattr(ordered_sums, "PAIR_BYTES", size)
        monkeypatch.setattr(ordered_sums, "LISTED_PAIRS", size)
        dq = torch.full_like(call.q, torch.nan)
        sums = OrderedSums(call.rows, emulated(ordered_sums.program(kernels.pair_form(call.q))))
        found.append((dq, kernels.add_in_order(call.given, dq, launch, sums, sms=2)))
        check(dq, call.dq)
        check(found[-1][1], call.drows)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def on(place: torch.device, dtype: torch.dtype, selection: Rows) -> Rows:
    lengths = None if selection.lengths is None else selection.lengths.to(place)
    return Rows(selection.rows.to(place, dtype), selection.slots.to(place), lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(3, 576), (16, 512), (17, 576), (40, 576), (128, 576), (100, 512)])
def test_gradients_on_a_device(heads: int, width: int, deterministic: bool, device: torch.device) -> None:
    reseed(heads)
    tokens, half = 6, torch.bfloat16
    q, dout = normal(tokens, heads, width, dtype=half), normal(heads, tokens, 512, dtype=half)
    sink, dlse = normal(heads, dtype=torch.float32), normal(tokens, heads, dtype=torch.float32)
    lengths = torch.tensor([330, 64, 0, 65, 1, 200], dtype=torch.int32)
    selections = [
        Rows(normal(300, width, dtype=half), hostile_slots(tokens, 330, 300), lengths),
        Rows(normal(40, width, dtype=half), hostile_slots(tokens, 33, 40)),
    ]

    def run(module, place: torch.device, dtype: torch.dtype) -> list[Tensor]:
        some = [on(place, dtype, selection) for selection in selections]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        given, extra = q.to(place, dtype), sink.to(place, wide)
        forward = AttendRows(given, some, SCALE, 512, extra, True, deterministic, "auto")
        out, lse, _, rest = module.attend_rows(forward)
        upstream = dout.to(place, dtype).transpose(0, 1), dlse.to(place, wide)
        back = (given, some, SCALE, extra, out, rest, lse, *upstream, True, True, deterministic, "auto")
        dq, drows, dsink = module.attend_rows_backward(AttendRowsBackward(*back))
        return [out, lse, dq, *drows, dsink]

    found = run(kernels, device, half)
    for one, other in zip(found, run(exact, torch.device("cpu"), torch.float64), strict=True):
        one, other = (x.cpu().double().nan_to_num(nan=torch.inf, neginf=0.0) for x in (one, other))
        assert float((one - other).norm()) <= ERROR * float(other.norm())
    for _ in range(10 if deterministic else 0):
        assert all(torch.equal(one, other) for one, other in zip(found, run(kernels, device, half), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "tokens"), [(16, 700), (64, 300), (128, 3)])
def test_the_kernels_write_what_rounding_cuts_off(heads: int, tokens: int, device: torch.device) -> None:
    """The same bits as by a float32 output that is divided afterwards; tokens beyond whole waves are split."""
    reseed(heads)
    q, rows = (normal(*shape, dtype=torch.bfloat16).to(device) for shape in ((tokens, heads, 576), (500, 576)))
    call = AttendRows(
        q, [Rows(rows, hostile_slots(tokens, 200, 500).to(device))], SCALE, 512, None, True, False, "auto"
    )
    for one, other in zip(kernels.attend_rows(call), attend_rows_with(call, hopper.attend), strict=True):
        assert torch.equal(one, other)
