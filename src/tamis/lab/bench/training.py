"""`tamis bench train`: forward and backward passes of sparse attention, and the indexer's loss, beside TileLang's."""

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.backends import backend_for_stage
from tamis.cache.selection import Rows
from tamis.lab.bench.record import Machine, MachineRow, timestamp
from tamis.lab.bench.timing import Spread, time_in_turn
from tamis.ops.attention import gradients as exact_attention
from tamis.ops.attention.row_operations import (
    AttendRows,
    AttendRowsBackward,
    IndexTarget,
    attend_rows,
    attend_rows_backward,
    index_target,
)
from tamis.ops.index import gradients as exact_index
from tamis.ops.index.loss_operations import IndexLoss, index_loss

WIDTH, VALUE_DIM = 576, 512
"""Columns of a row of V3.2, and how many of them are its value."""
INDEX_HEADS, INDEX_DIM = 64, 128
CHECKED = 64
"""Tokens whose results are compared with float64."""
LARGEST_ERROR = 3e-3
"""The relative error of a gradient above which it counts as wrong: rounding explains 2.6e-3."""
TILELANG = "tilelang"


class Shape(NamedTuple):
    """Sizes of a measurement."""

    tokens: int
    rows: int
    topk: int
    heads: int

    @property
    def pairs(self) -> int:
        """Pairs of a token and a row."""
        return self.tokens * self.topk


def default_shapes(heads: list[int], topks: list[int], *, tiny: bool) -> list[Shape]:
    """The shapes of the suite: 4096 queries over 8K rows; on a CPU a few of each."""
    tokens, rows, topk = (16, 64, 32) if tiny else (4096, 8192, 2048)
    known = heads or ([4] if tiny else [16, 64, 128])
    return [Shape(tokens, max(rows, k), k, h) for h in known for k in (topks or [topk])]


@dataclass(frozen=True)
class TrainRow(MachineRow):
    """One measurement. Fields without a value are empty."""

    stage: str
    """What was timed: see `STAGES`."""
    version: str
    """`tamis` and its backend, or the peer."""
    build: str
    """The peer's distribution and version."""
    tokens: int
    rows: int
    topk: int
    heads: int
    repeats: int
    median_ms: float
    p10: float
    p90: float
    tflops: float
    """Operations of the products, each counted once, over the time."""
    peak_mb: float | None
    """Memory that the call took beside its arguments, at most."""
    error: float | None
    """The largest relative error of a result against float64, over the first tokens."""
    ratio: float | None = None
    """TileLang's time divided by ours: above 1, tamis is faster."""


TRAIN_COLUMNS = [field.name for field in fields(TrainRow)]


class Inputs:
    """Random queries, rows and upstream gradients of one shape; every slot exists, and no token has one twice."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        """Draw them."""
        self.shape, self.scale = shape, WIDTH**-0.5
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            drawn = torch.randn(sizes, dtype=torch.float32, device=device, generator=generator)
            return drawn.to(torch.bfloat16)

        self.q = normal(shape.tokens, shape.heads, WIDTH)
        self.rows = normal(shape.rows, WIDTH)
        self.dout = normal(shape.tokens, shape.heads, VALUE_DIM)
        self.index_q, self.index_keys = normal(shape.tokens, INDEX_HEADS, INDEX_DIM), normal(shape.rows, INDEX_DIM)
        self.weights = normal(shape.tokens, INDEX_HEADS).float() * (INDEX_HEADS * INDEX_DIM) ** -0.5
        order = torch.rand(shape.tokens, shape.rows, dtype=torch.float32, device=device, generator=generator)
        self.slots = order.argsort(1)[:, : shape.topk].sort(1).values.int()

    def first(self, tokens: int) -> "Inputs":
        """The same for the first tokens only."""
        found = Inputs.__new__(Inputs)
        found.shape, found.scale = self.shape._replace(tokens=min(tokens, self.shape.tokens)), self.scale
        found.rows, found.index_keys = self.rows, self.index_keys
        for name in ("q", "dout", "index_q", "weights", "slots"):
            setattr(found, name, getattr(self, name)[:tokens])
        return found

    @cached_property
    def attended(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Results of the forward pass, which the backward pass reads."""
        return attend_rows(self.forward("auto"))

    @cached_property
    def target(self) -> Tensor:
        """The indexer's target."""
        return index_target(IndexTarget(self.q, self.selections, self.attended[1], self.scale, None, True, "auto"))

    @property
    def selections(self) -> list[Rows]:
        """The selection of all tokens."""
        return [Rows(self.rows, self.slots)]

    def forward(self, backend: str) -> AttendRows:
        """The arguments of the forward pass."""
        return AttendRows(self.q, self.selections, self.scale, VALUE_DIM, None, True, False, backend)

    def backward(self, backend: str, *, deterministic: bool) -> AttendRowsBackward:
        """The arguments of the backward pass."""
        out, lse, _, rest = self.attended
        given = (self.q, self.selections, self.scale, None, out, rest, lse, self.dout, None)
        return AttendRowsBackward(*given, True, True, deterministic, backend)

    def loss(self, backend: str, *, deterministic: bool) -> IndexLoss:
        """The arguments of the indexer's loss, which computes its gradients as well."""
        given = (self.index_q, self.index_keys, self.weights, self.slots, self.target, None)
        return IndexLoss(*given, True, deterministic, backend)


class Stage(NamedTuple):
    """A call that is timed."""

    function: str
    """The function of `tamis.train` whose backend runs it."""
    stage: str
    call: Callable[[Inputs, str], Any]
    operations: Callable[[Shape], float]


def _forward_operations(shape: Shape) -> float:
    return 2.0 * shape.pairs * shape.heads * (WIDTH + VALUE_DIM)


def _backward_operations(shape: Shape) -> float:
    return 2.0 * shape.pairs * shape.heads * (3 * WIDTH + 2 * VALUE_DIM)


def _target(inputs: Inputs, backend: str) -> Tensor:
    lse = inputs.attended[1]
    return index_target(IndexTarget(inputs.q, inputs.selections, lse, inputs.scale, None, True, backend))


STAGES = {
    "forward": Stage("attend_rows", "attend", lambda x, b: attend_rows(x.forward(b)), _forward_operations),
    "backward": Stage(
        *("attend_rows", "attend", lambda x, b: attend_rows_backward(x.backward(b, deterministic=False))),
        _backward_operations,
    ),
    "backward, deterministic": Stage(
        *("attend_rows", "attend", lambda x, b: attend_rows_backward(x.backward(b, deterministic=True))),
        _backward_operations,
    ),
    "target": Stage("index_target", "attend", _target, lambda shape: 2.0 * shape.pairs * shape.heads * WIDTH),
    "index loss": Stage(
        *("index_loss", "index", lambda x, b: index_loss(x.loss(b, deterministic=False))),
        lambda shape: 6.0 * shape.pairs * INDEX_HEADS * INDEX_DIM,
    ),
    "index loss, deterministic": Stage(
        *("index_loss", "index", lambda x, b: index_loss(x.loss(b, deterministic=True))),
        lambda shape: 6.0 * shape.pairs * INDEX_HEADS * INDEX_DIM,
    ),
}


class TrainBench:
    """Times all stages of one shape after another, ours and TileLang's in turn."""

    def __init__(self, device: torch.device, backend: str, repeats: int, machine: Machine, peer: bool) -> None:
        """Measure on a device, with TileLang if `peer` is set."""
        self.device, self.backend, self.repeats, self.machine, self.peer = device, backend, repeats, machine, peer

    def measure(self, shape: Shape, stage: str) -> tuple[list[TrainRow], list[str]]:
        """The rows of one stage, and a line if its results are wrong."""
        inputs = self._inputs(shape)
        call = STAGES[stage].call
        found = backend_for_stage(STAGES[stage].stage, self.backend, self.device, STAGES[stage].function).name
        error = self._error(inputs.first(CHECKED), stage)
        if not error < LARGEST_ERROR:
            return [], [f"{stage} of {shape.heads} heads by {found}: error {error:.2g} is above {LARGEST_ERROR}"]
        peer = self._peer(inputs) if self.peer and stage in ("forward", "backward") else None
        versions: list[tuple[list[Callable[[], object]], bool]] = [([partial(call, inputs, self.backend)], False)]
        versions += [] if peer is None else [([peer.calls[stage]], False)]
        peak = self._peak(versions[0][0][0])
        ours, *theirs = time_in_turn(versions, self.device, self.repeats)
        ratio = theirs[0].median_us / ours.median_us if theirs else None
        rows = [self._row(shape, stage, f"tamis {found}", "", ours, error, peak, ratio)]
        if peer is not None:
            rows.append(self._row(shape, stage, TILELANG, peer.build, theirs[0], peer.error, None, None))
        return rows, []

    def _inputs(self, shape: Shape) -> Inputs:
        # Inputs of one shape are several gigabytes, so only the last are kept.
        kept: tuple[Shape, Inputs] | None = getattr(self, "_kept", None)
        if kept is None or kept[0] != shape:
            self._kept = kept = (shape, Inputs(shape, self.device, 0))
            self._known_peer: Peer | None = None
        return kept[1]

    def _peer(self, inputs: Inputs) -> "Peer":
        if self._known_peer is None:
            self._known_peer = Peer(inputs)
        return self._known_peer

    def _error(self, inputs: Inputs, stage: str) -> float:
        """The largest relative error of any result."""
        found = _tensors(STAGES[stage].call(inputs, self.backend))
        return max(relative_error(one, other) for one, other in zip(found, _exact(inputs, stage), strict=True))

    def _peak(self, call: Callable[[], object]) -> float | None:
        if self.device.type != "cuda":
            return None
        call()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 1e6

    def _row(
        self,
        shape: Shape,
        stage: str,
        name: str,
        build: str,
        times: Spread,
        error: float | None,
        peak: float | None,
        ratio: float | None,
    ) -> TrainRow:
        return TrainRow(
            time=timestamp(),
            **asdict(self.machine),
            stage=stage,
            version=name,
            build=build,
            **shape._asdict(),
            repeats=self.repeats,
            median_ms=times.median_us / 1e3,
            p10=times.p10 / 1e3,
            p90=times.p90 / 1e3,
            tflops=STAGES[stage].operations(shape) / times.median_us / 1e6,
            peak_mb=peak,
            error=error,
            ratio=ratio,
        )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected; NaN is infinite."""
    error = float((found.double() - expected).norm() / expected.norm().clamp_min(1e-300))
    return error if error == error else inf


def _tensors(found: Any) -> list[Tensor]:
    """The results that count: no statistics beside the forward pass's output, no empty gradient."""
    if isinstance(found, Tensor):
        return [found]
    flat = [x for part in found for x in (part if isinstance(part, list) else [part])]
    return [x for x in flat if x.numel()] if len(found) != 4 or found[0].dim() == 0 else flat[:2]


def _exact(inputs: Inputs, stage: str) -> list[Tensor]:
    """The same results in float64, from the same rounded inputs."""
    q, rows = inputs.q.double(), Rows(inputs.rows.double(), inputs.slots)
    attended = exact_attention.attend_rows(AttendRows(q, [rows], inputs.scale, VALUE_DIM, None, True, False, ""))
    out, lse, _, rest = attended
    if stage == "forward":
        return [out, lse]
    if stage == "target":
        return [exact_attention.index_target(IndexTarget(q, [rows], lse, inputs.scale, None, True, ""))]
    if stage.startswith("index"):
        given = inputs.loss("", deterministic=False)
        call = given._replace(
            index_q=given.index_q.double(),
            index_keys=given.index_keys.double(),
            weights=given.weights.double(),
            target=given.target.double(),
        )
        return list(exact_index.index_loss(call))
    given_back = (q, [rows], inputs.scale, None, out, rest, lse, inputs.dout.double(), None, True, True, False, "")
    return _tensors(exact_attention.attend_rows_backward(AttendRowsBackward(*given_back)))


class Peer:
    """TileLang's example `deepseek_v32`, whose files `sparse_mla_fwd.py` and `sparse_mla_bwd.py` must be importable.

    It takes no row after a token's own number, and its time does not depend on which columns it takes, so it is timed
    on the inputs of ours and checked on others.
    """

    def __init__(self, inputs: Inputs) -> None:
        """Compile the kernels for a shape, and compare their results with ours on rows that it takes."""
        forward, backward = (importlib.import_module(f"sparse_mla_{name}") for name in ("fwd", "bwd"))
        self.build = _build()
        q, rows, dout = (x.unsqueeze(0) for x in (inputs.q, inputs.rows.unsqueeze(1), inputs.dout))

        def attend(slots: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = forward.sparse_mla_fwd_interface(q, rows, slots)
            return found

        def differentiate(slots: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = backward.sparse_mla_bwd(q, rows, out, dout, slots, lse)
            return found

        self.error = self._check(inputs, attend, differentiate)
        slots = inputs.slots.view(1, inputs.shape.tokens, 1, -1)
        out, lse = attend(slots)
        self.calls = {"forward": partial(attend, slots), "backward": partial(differentiate, slots, out, lse)}

    def _check(self, inputs: Inputs, attend: Callable[..., Any], differentiate: Callable[..., Any]) -> float:
        """The error of the queries' gradient for the last tokens, over rows up to their own numbers."""
        tokens, topk, device = inputs.shape.tokens, inputs.shape.topk, inputs.q.device
        own = torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(1)
        slots = torch.arange(topk, dtype=torch.int32, device=device).expand(tokens, topk)
        seen = torch.where(slots <= own, slots, -1)
        # A row that it masks, in place of a number that it would read before the tensor.
        whole = torch.where(slots <= own, slots, inputs.shape.rows - 1).view(1, tokens, 1, topk)
        dq, _ = differentiate(whole, *attend(whole))
        last = Inputs.__new__(Inputs)
        last.__dict__ |= inputs.first(CHECKED).__dict__
        last.q, last.dout, last.slots = inputs.q[-CHECKED:], inputs.dout[-CHECKED:], seen[-CHECKED:]
        return relative_error(dq[0, -CHECKED:], _exact(last, "backward")[0])


def _build() -> str:
    try:
        return f"{TILELANG} {version(TILELANG)}"
    except PackageNotFoundError:
        return TILELANG


def find_peer() -> str | None:
    """Why TileLang cannot be timed, or None if it can."""
    for name in (TILELANG, "sparse_mla_fwd", "sparse_mla_bwd"):
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
    return None
