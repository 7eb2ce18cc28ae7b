"""The indexer's loss and its gradients on Hopper: launches of `index_loss.cu`, otherwise the portable kernel."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.selection import Rows
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index, sm_count
from tamis.cuda.launch import Launch, kernel
from tamis.cuda.params import Int, Long, Pointer, aligned, params_bytes, pointer
from tamis.ops.attention.triton_gradients import contiguous_columns, counted_slots
from tamis.ops.index import triton_gradients
from tamis.ops.index.loss_operations import IndexLoss
from tamis.ops.rows import ordered_sums
from tamis.ops.rows.ordered_sums import OrderedSums, PairForm, sum_in_order
from tamis.ops.rows.row_sums import natural_columns

HEADS, DIM = 64, 128
"""The most index heads that the kernel takes, and their width."""
THREADS = 256
FIXED_BYTES, BLOCK_KEYS, BLOCK_BYTES = 83136, 64, 768
"""Shared memory of a CTA: for all calls, and for each block of keys. Two CTAs share an SM up to 2624 selected keys."""
MOST_BYTES = 227 * 1024
REGISTERS = (("COMPUTE_REGISTERS", 216), ("GATHER_REGISTERS", 40))
"""Per thread of the roles. A computing warpgroup and a gathering one may have 256 together, with two CTAs on an SM."""
FORM = PairForm(DIM, DIM, 1)

check_index_loss = triton_gradients.check_index_loss


class IndexLossParams(NamedTuple):
    """The parameters of `index_loss.cu`."""

    q: Pointer
    keys: Pointer
    weights: Pointer
    slots: Pointer
    target: Pointer
    token_weights: Pointer
    losses: Pointer
    dq: Pointer
    dweights: Pointer
    dkeys: Pointer
    pairs: Pointer
    pair_scales: Pointer
    q_token_stride: Long
    q_head_stride: Long
    key_stride: Long
    slots_token_stride: Long
    slots_column_stride: Long
    target_stride: Long
    heads: Int
    columns: Int
    key_count: Int
    first_token: Int


Launcher = Callable[[tuple[int, int, int], IndexLossParams], None]


def index_loss(call: IndexLoss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `gradients.index_loss`."""
    if refusal(call) is not None or call.slots.numel() == 0 or len(call.index_keys) == 0:
        return triton_gradients.index_loss(call)
    ordered, device = call.gradients and call.deterministic, device_index(call.index_q.device)
    launch = on_device(ordered, shared_bytes(call.slots.shape[1]), device)
    if not ordered:
        return run_at_once(call, launch)
    sums = OrderedSums(call.index_keys, ordered_sums.on_device(FORM, device))
    return run_in_order(call, launch, sums, sm_count(call.index_q.device))


def refusal(call: IndexLoss) -> str | None:
    """Why the kernel does not take a call, or None if it does."""
    _, heads, dim = call.index_q.shape
    if call.index_q.dtype != torch.bfloat16:
        return f"queries are {checks.dtype_name(call.index_q.dtype)}, not bfloat16"
    if heads > HEADS or dim != DIM:
        return f"there are {heads} heads of {dim}, not at most {HEADS} of {DIM}"
    if shared_bytes(call.slots.shape[1]) > MOST_BYTES:
        most = (MOST_BYTES - FIXED_BYTES) // BLOCK_BYTES * BLOCK_KEYS
        return f"{call.slots.shape[1]} keys are selected, not at most {most}"
    return None


def shared_bytes(columns: int) -> int:
    """Shared memory of a CTA for so many selected keys."""
    return FIXED_BYTES + ceil_div(columns, BLOCK_KEYS) * BLOCK_BYTES


class Prepared:
    """Arguments as the kernel reads them, and its results."""

    def __init__(self, call: IndexLoss) -> None:
        """Make both."""
        tokens, heads, _ = call.index_q.shape
        device = call.index_q.device
        self.q, self.keys = (aligned(x.detach()) for x in (call.index_q, call.index_keys))
        self.weights = call.weights.detach().to(torch.float32).contiguous()
        self.target, self.slots = contiguous_columns(call.target), call.slots
        self.token_weights = None if call.token_weights is None else call.token_weights.contiguous()
        self.losses = torch.empty(tokens, dtype=torch.float32, device=device)
        self.dq = torch.empty(self.q.shape if call.gradients else 0, dtype=self.q.dtype, device=device)
        self.dweights = torch.empty((tokens, heads) if call.gradients else 0, dtype=torch.float32, device=device)

    def params(
        self,
        dkeys: Tensor | None,
        first_token: int = 0,
        pairs: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> IndexLossParams:
        """The parameters of a launch for the tokens from `first_token` on."""
        q, slots = self.q, self.slots
        return IndexLossParams(
            q=pointer(q),
            keys=pointer(self.keys),
            weights=pointer(self.weights),
            slots=pointer(slots),
            target=pointer(self.target),
            token_weights=pointer(self.token_weights),
            losses=pointer(self.losses),
            dq=pointer(self.dq) if self.dq.numel() else 0,
            dweights=pointer(self.dweights),
            dkeys=pointer(dkeys),
            pairs=pointer(pairs),
            pair_scales=pointer(scales),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            key_stride=self.keys.stride(0),
            slots_token_stride=slots.stride(0),
            slots_column_stride=slots.stride(1),
            target_stride=self.target.stride(0),
            heads=q.shape[1],
            columns=slots.shape[1],
            key_count=len(self.keys),
            first_token=first_token,
        )

    def results(self, call: IndexLoss, dkeys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss and gradients in the dtypes of their arguments."""
        dtypes = call.index_keys.dtype, call.weights.dtype
        return self.losses.sum(), self.dq, dkeys.to(dtypes[0]), self.dweights.to(dtypes[1])


def run_at_once(call: IndexLoss, launch: Launcher) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients if they are wanted, with sums over tokens in no particular order."""
    prepared = Prepared(call)
    shape = call.index_keys.shape if call.gradients else 0
    dkeys = torch.zeros(shape, dtype=torch.float32, device=call.index_keys.device)
    launch((len(prepared.q), 1, 1), prepared.params(dkeys if call.gradients else None))
    return prepared.results(call, natural_columns(dkeys, call.index_keys.dtype) if call.gradients else dkeys)


def run_in_order(
    call: IndexLoss, launch: Launcher, sums: OrderedSums, sms: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with sums in one order."""
    prepared = Prepared(call)

    def store(start: int, end: int, pairs: Tensor, scales: Tensor) -> None:
        launch((end - start, 1, 1), prepared.params(None, start, pairs, scales))

    slots = counted_slots(Rows(call.index_keys, call.slots))
    return prepared.results(call, sum_in_order(sums, FORM, slots, store, sms))


def program(*, ordered: bool) -> Program:
    """The source."""
    return Program.packaged(
        __package__,
        "index_loss.cu",
        ORDERED=int(ordered),
        THREADS=THREADS,
        FIXED_BYTES=FIXED_BYTES,
        BLOCK_BYTES=BLOCK_BYTES,
        PARAMS_BYTES=params_bytes(IndexLossParams),
        **dict(REGISTERS),
    )


@cache
def on_device(ordered: bool, shared: int, device: int) -> Launch:
    """The kernel, ready to launch with so much shared memory."""
    loaded = kernel(program(ordered=ordered), "index_loss", device)
    return Launch(loaded, IndexLossParams, threads=THREADS, shared=shared)
