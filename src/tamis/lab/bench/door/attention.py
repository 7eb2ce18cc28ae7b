"""The functions that attend over rows of a cache: the drop-ins, the layer's and the engine's doors, and `attend`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tamis.cache.selection import Selection
from tamis.integrations import flash_mla
from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.metadata import SparseMetadata
from tamis.lab.bench.door.cells import ATTEND, DROP_IN, ENGINE, LAYER, POSITIONS, PREFILL, Cell
from tamis.lab.bench.door.versions import OURS, Version, Versions
from tamis.lab.bench.inputs import AttendSet, prepare, worst_error
from tamis.lab.bench.peers import FlashMLA, Peer, Unsupported
from tamis.lab.bench.peers.gathered import gathered_rows
from tamis.lab.bench.random_inputs import SharedInputs
from tamis.layers.mla import SparseMLA
from tamis.model.spec import LayerSpec
from tamis.ops import attend
from tamis.step.batch import Batch, PageMap
from tamis.step.plan import Limits, Mode, Plan
from tamis.step.planner import Planner

Call = Callable[[], Any]


def attention_versions(cell: Cell, doors: Sequence[str], drawn: SharedInputs, peers: Sequence[Peer]) -> Versions:
    """The versions of a cell whose work is attention over selected rows."""
    # The prefill over 16-bit rows takes a list of the request's rows alone, and no pages of others.
    prepared = prepare(cell.job, drawn.device, drawn=None if PREFILL in cell.doors else drawn)
    items = [item for item in prepared.sets if isinstance(item, AttendSet)]
    if cell.prefill and drawn.device.type == "cpu":
        items = [_visible(item) for item in items]
    makers: dict[str, Callable[[AttendSet], Call]] = {
        DROP_IN: _decode_call,
        PREFILL: _prefill_call,
        POSITIONS: _positions_call,
        ENGINE: _engine_call,
        ATTEND: _attend_call,
    }
    found = [_ours(door, items, makers[door]) for door in cell.doors if door in doors and door in makers]
    if LAYER in cell.doors and LAYER in doors:
        found += _two_ways(items)
    theirs, missing = _peers(cell, items, peers)
    return Versions(found + theirs, len(items), missing)


def _ours(door: str, items: Sequence[AttendSet], make: Callable[[AttendSet], Call], name: str = OURS) -> Version:
    first = items[0]
    return Version(door, name, [make(item) for item in items], lambda r: _error(first, r), first.bound)


def _error(item: AttendSet, result: Any) -> float:
    """The error of a result whose first element is the output, of any arrangement of the same tokens."""
    out = result[0]
    return worst_error(item, out.reshape(len(item.q), -1, item.value_dim))


def _visible(item: AttendSet) -> AttendSet:
    """The set without positions after each token: on the host a layer refuses those, and its peers get the same."""
    (selection,) = item.selections
    positions = _positions(item)
    tokens, length = len(item.q), int(item.lengths[0])
    own = torch.arange(length - tokens, length, dtype=torch.int32, device=positions.device)
    slots = torch.where(positions <= own.unsqueeze(1), selection.slots, -1)
    return replace(item, selections=(Selection(selection.cache, slots),))


def _positions(item: AttendSet) -> Tensor:
    """The request-local positions of the selected slots, int32 [T, K]; -1 for none."""
    return gathered_rows(item, torch.zeros_like(item.lengths))


def _request_ids(item: AttendSet) -> Tensor:
    requests = torch.arange(len(item.lengths), dtype=torch.int32, device=item.q.device)
    return requests.repeat_interleave(item.queries or 1)


def _attend_call(item: AttendSet) -> Call:
    return partial(attend, item.q, list(item.selections), scale=item.scale, value_dim=item.value_dim)


def _decode_call(item: AttendSet) -> Call:
    queries = item.queries or 1
    requests = len(item.q) // queries
    first, *others = item.selections
    more: dict[str, Any] = {}
    for other in others:
        slots = other.slots.view(requests, queries, -1)
        more = {"extra_k_cache": other.cache.storage.unsqueeze(2), "extra_indices_in_kvcache": slots}
    return partial(
        flash_mla.flash_mla_with_kvcache,
        item.q.view(requests, queries, *item.q.shape[1:]),
        first.cache.storage.unsqueeze(2),
        None,
        None,
        item.value_dim,
        flash_mla.get_mla_metadata()[0],
        softmax_scale=item.scale,
        is_fp8_kvcache=True,
        indices=first.slots.view(requests, queries, -1),
        **more,
    )


def _prefill_call(item: AttendSet) -> Call:
    (selection,) = item.selections
    rows = selection.cache.storage.flatten(0, 1).unsqueeze(1)
    return partial(flash_mla.flash_mla_sparse_fwd, item.q, rows, selection.slots.unsqueeze(1), item.scale)


def _spec(item: AttendSet) -> LayerSpec:
    (selection,) = item.selections
    return LayerSpec(heads=item.q.shape[1], scale=item.scale, topk=selection.slots.shape[1])


def _positions_call(item: AttendSet) -> Call:
    (selection,) = item.selections
    layer = SparseMLA(_spec(item))
    given = (item.q, selection.cache, _positions(item), _request_ids(item), item.block_table)
    return partial(layer.attend_positions, *given)


def _engine_call(item: AttendSet) -> Call:
    """The method that vLLM calls, on the class that its plugin derives from; it does not need vLLM."""
    (selection,) = item.selections
    layout = selection.cache.layout
    impl = SparseImpl(
        item.q.shape[1],
        layout.width,
        item.scale,
        kv_cache_dtype="fp8_ds_mla",
        kv_lora_rank=layout.latent,
        qk_rope_head_dim=layout.rope,
        topk_indices_buffer=_positions(item),
    )
    tokens, requests = len(item.q), len(item.lengths)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=item.q.device) * (tokens // requests)
    metadata = SparseMetadata(
        num_reqs=requests,
        max_query_len=tokens // requests,
        max_seq_len=int(item.lengths.max()),
        num_actual_tokens=tokens,
        query_start_loc=starts,
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=item.q.device),
        block_table=item.block_table,
        req_id_per_token=_request_ids(item),
        seq_lens=item.lengths,
        block_size=selection.cache.page_size,
        topk_tokens=selection.slots.shape[1],
    )
    out = torch.empty(tokens, item.q.shape[1], layout.latent, dtype=item.q.dtype, device=item.q.device)
    return partial(impl.forward_mqa, item.q, selection.cache.storage, metadata, None, out)


def _two_ways(items: Sequence[AttendSet]) -> list[Version]:
    """A layer's call on a prompt whose rows are written: FP8 rows read directly, and gathered to 16 bits first."""
    automatic = _plan(items[0], "auto").mode
    found = []
    ways: tuple[tuple[Mode, str], ...] = (("mixed", "direct"), ("separate", "gathered"))
    for mode, name in ways:
        made = _ours(LAYER, items, partial(_layer_call, mode=mode), f"{OURS} {name}")
        found.append(replace(made, note="what auto takes" if mode == automatic else ""))
    return found


def _layer_call(item: AttendSet, *, mode: Mode) -> Call:
    (selection,) = item.selections
    layer = SparseMLA(_spec(item))
    return partial(layer, item.q, None, selection.cache, _plan(item, mode), positions=_positions(item))


def _plan(item: AttendSet, mode: Mode) -> Plan:
    (selection,) = item.selections
    tokens, size = len(item.q), selection.cache.page_size
    lengths = item.lengths.cpu()
    own = torch.arange(int(lengths[0]) - tokens, int(lengths[0]), dtype=torch.int64, device=item.q.device)
    slots = item.block_table[0].long()[own // size] * size + own % size
    starts = torch.tensor([0, tokens], dtype=torch.int32, device="cpu")
    limits = Limits(tokens, 1, int(lengths[0]), size)
    planner = Planner(_spec(item), limits, item.q.device, layout=selection.cache.layout, mode=mode)
    return planner.plan(Batch(starts, lengths, PageMap(item.block_table, slots, page_size=size)))


def _peers(cell: Cell, items: Sequence[AttendSet], peers: Sequence[Peer]) -> tuple[list[Version], dict[str, str]]:
    found: list[Version] = []
    missing: dict[str, str] = {}
    first, door = items[0], PREFILL if cell.job.layout == "v32-bf16" else DROP_IN
    for peer in peers:
        if not isinstance(peer, FlashMLA):
            continue
        try:
            bound = peer.bound(cell.job, items)
        except Unsupported as reason:
            missing[peer.name] = str(reason)
            continue
        padded = 64 if first.q.shape[1] <= 64 else 128
        note = "" if padded == first.q.shape[1] else f"heads padded to {padded} before its time"
        output = bound[0].output
        found.append(
            Version(
                door,
                peer.name,
                [one.call for one in bound],
                partial(_peer_error, first, output),
                first.bound,
                build=peer.build,
                note=note,
            )
        )
    return found, missing


def _peer_error(item: AttendSet, output: Callable[[Any], Tensor], result: Any) -> float:
    return worst_error(item, output(result))
