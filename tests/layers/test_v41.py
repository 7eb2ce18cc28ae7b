"""`SparseV41` against a slow definition of the model's attention in float64, for steps of all kinds.

Selections are compared through the definition's own scores: what a layer selected must be the best up to rounding. Then
the definition attends to what the layer selected, so that a tie within rounding is no difference.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from bounds import relative_error
from seeds import seed_of, seeded
from torch import Tensor
from v41_model import CONFIG, Definition, Stored, table_of, weights_of

from tamis import Batch, LayerSpec, Limits, PagePool, SparseV4, V4Caches, V4Planner
from tamis.cache.layout import named, rows
from tamis.lab.testing.cases import to_device
from tamis.layers import v41
from tamis.layers.v41 import SparseV41, V41Selection
from tamis.model.v41 import Candidates, sharing
from tamis.ops.index import reference
from tamis.ops.index.block_operations import IndexTopkAndBlocks
from tamis.step.v4_plan import V4Plan

LAYERS = CONFIG["num_hidden_layers"]
SPECS = [LayerSpec.from_hf(CONFIG, layer) for layer in range(LAYERS)]
TOKENS = 61
PAGE, WINDOW_PAGE, STATE_PAGE = 16, 5, 4


class Served:
    """All layers of the tiny model on tamis, fed step by step. Each layer has inputs of its own."""

    def __init__(self, *, fp8: bool = False, device: str = "cpu", **options: Any) -> None:
        layout = named("v4-fp8", latent=24, rope=8, tile=8) if fp8 else rows(torch.float32, latent=24, rope=8)
        index = named("index-fp8", dim=16) if fp8 else rows(torch.float32, latent=16, rope=0)
        self.pool = PagePool(24, PAGE, seed=seed_of(7))
        sizes = {"window": WINDOW_PAGE, "state2": STATE_PAGE}
        self.others = {name: PagePool(60, size, seed=seed_of(8)) for name, size in sizes.items()}
        self.device = torch.device(device)
        self.planner = V4Planner(SPECS, Limits(3 * TOKENS, 3, 128, PAGE, sizes), self.device, layout=layout)
        self.caches: list[V4Caches] = []
        for layer, spec in enumerate(SPECS):
            made = V4Caches.allocate(
                spec,
                pages=24,
                window_pages=60,
                state_pages=60,
                page_size=PAGE,
                window_page_size=WINDOW_PAGE,
                state_page_size=STATE_PAGE,
                layout=layout,
                index_layout=index,
                source=self.caches[sharing(CONFIG, layer).entries_of] if spec.reuse_entries else None,
                device=self.device,
            )
            self.caches.append(made)
        for caches in self.caches:
            for held in (caches.window, caches.entries, caches.index):
                if held is not None:
                    held.storage.view(torch.uint8).fill_(0xFF)  # NaN in every format
        self.layers = [
            SparseV41(spec, *to_device([weights_of(CONFIG, layer), table_of(CONFIG, layer)], self.device), **options)
            for layer, spec in enumerate(SPECS)
        ]

    def plan(self, *pieces: tuple[int, int, int], padding: int = 0) -> V4Plan:
        """The plan of a step with tokens start..end of some requests."""
        new, ends = [end - start for _, start, end in pieces], [end for _, _, end in pieces]
        names = [request for request, _, _ in pieces]
        batch = Batch.build(new, ends, self.pool, requests=names, other_pools=self.others)
        pages, others = to_device((batch.pages, dict(batch.other_pages)), self.device)
        padded = sum(new) + padding
        return self.planner.plan(replace(batch, pages=pages, other_pages=others, padded_tokens=padded))

    @torch.no_grad()
    def step(self, hidden: Tensor, *pieces: tuple[int, int, int], padding: int = 0) -> list["Piece"]:
        """What each layer returned for each piece, given hidden states [layers, requests, tokens, hidden]."""
        plan = self.plan(*pieces, padding=padding)
        sizes, selection, found = [end - start for _, start, end in pieces], None, [Piece() for _ in pieces]
        for layer, caches, states in zip(self.layers, self.caches, hidden, strict=True):
            given = [states[request, start:end] for request, start, end in pieces]
            before = selection
            out, selection = layer(torch.cat((*given, states[0, :padding])).to(self.device), caches, plan, selection)
            if layer.spec.kind == "window" or layer.spec.reuse_topk:
                assert selection is before
            assert not out[sum(sizes) :].any()
            for piece, part in zip(found, out[: sum(sizes)].split(sizes), strict=True):
                piece.outputs.append(part.cpu())
            for piece, at in zip(found, _starts(sizes), strict=True):
                piece.keep(selection, at)
        return found

    def stored(self, layer: int) -> Stored:
        """What the caches hold of request 0."""
        caches, spec, tokens = self.caches[layer], SPECS[layer], torch.arange(TOKENS)
        window = self.others["window"].block_table([0])[0].long()
        where = window[tokens // WINDOW_PAGE] * WINDOW_PAGE + tokens % WINDOW_PAGE
        raw = caches.window.read(where.to(self.device)).cpu()
        if spec.kind == "window" or spec.reuse_entries:
            return Stored(raw, None, None)
        assert caches.entries is not None
        assert caches.index is not None
        numbers, page = torch.arange(TOKENS // spec.compress), PAGE // spec.compress
        slots = self.pool.block_table([0])[0].long()[numbers // page] * page + numbers % page
        entries, keys = (cache.read(slots.to(self.device)).cpu() for cache in (caches.entries, caches.index))
        return Stored(raw, entries, keys)


class Piece:
    """The results of some tokens of a request: outputs, selections and candidate blocks by layer."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.entries: list[Tensor | None] = []
        self.candidates: list[Tensor | None] = []

    def keep(self, selection: V41Selection | None, at: slice) -> None:
        self.entries.append(None if selection is None else selection.entries[at].cpu())
        held = None if selection is None else selection.candidates
        self.candidates.append(None if held is None else held[at].cpu())


def _starts(sizes: list[int]) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def inputs(requests: int = 1) -> Tensor:
    return torch.randn(LAYERS, requests, TOKENS, CONFIG["hidden_size"], generator=seeded(5))


def joined(pieces: list[Piece]) -> Piece:
    """The pieces of one request, one after another."""
    whole = Piece()
    for layer in range(LAYERS):
        whole.outputs.append(torch.cat([piece.outputs[layer] for piece in pieces]))
        for name in ("entries", "candidates"):
            parts = [getattr(piece, name)[layer] for piece in pieces]
            getattr(whole, name).append(None if parts[0] is None else torch.cat(parts))
    return whole


def is_best(scores: Tensor, chosen: list[int], allowed: set[int], count: int, slack: float) -> None:
    """That `chosen` are `count` of the highest finite scores among `allowed`, up to rounding, in ascending order."""
    known = [number for number in sorted(allowed) if scores[number] > -torch.inf]
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(known)
    assert len(chosen) == min(count, len(known))
    left = [float(scores[number]) for number in known if number not in set(chosen)]
    if left and chosen:
        assert min(float(scores[number]) for number in chosen) >= max(left) - slack


def check_request(found: Piece, hidden: Tensor, served: Served | None = None) -> None:
    """All layers' selections and outputs of a request against the definition, with the rows that `served` stored of
    request 0 if it is given."""
    bound, slack = 1e-4, 1e-4
    definition, size, blocks = Definition(CONFIG), CONFIG["candidate_block_size"], CONFIG["candidate_topk_blocks"]
    for number, spec in enumerate(SPECS):
        layer = definition.layer(number, hidden[number], None if served is None else served.stored(number))
        entries = found.entries[number]
        chosen = [[]] * TOKENS if entries is None else [[n for n in row if n >= 0] for row in entries.tolist()]
        if spec.kind == "indexed" and not spec.reuse_topk:
            scale = float(layer.scores[layer.scores > -torch.inf].abs().max())
            for token in range(TOKENS):
                complete = (token + 1) // spec.compress
                scores, allowed = layer.scores[token], set(range(complete))
                if spec.candidates is not None:
                    held = found.candidates[number]
                    assert held is not None
                    candidates = [n for n in held[token].tolist() if n >= 0]
                    if spec.candidates.source and complete:
                        tops = torch.stack([part.max() for part in scores[:complete].split(size)])
                        tops[-1] = torch.inf
                        is_best(tops, candidates, set(range(len(tops))), blocks, slack * scale)
                    if not spec.candidates.source:
                        allowed = {n for n in allowed if n // size in candidates}
                is_best(scores, chosen[token], allowed, CONFIG["index_topk"], slack * scale)
        expected = layer.output(chosen)
        assert relative_error(found.outputs[number], expected) < bound
        assert (found.outputs[number] - expected).abs().max() < bound * expected.abs().max()


on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def test_entries_are_scored_in_the_columns_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace of one token makes layers look for fewer columns than the planner's table has."""
    usual, hidden, seen = reference.index_topk_and_blocks, inputs(), []

    def watched(call: IndexTopkAndBlocks) -> None:
        seen.append(call.block_table.shape[1])
        usual(call)

    monkeypatch.setattr(reference, "index_topk_and_blocks", watched)
    found = []
    for room in (v41.WORKSPACE_BYTES, 1):
        monkeypatch.setattr(v41, "WORKSPACE_BYTES", room)
        found.append(Served().step(hidden, (0, 0, 40))[0])
    for name in ("outputs", "entries", "candidates"):
        for one, other in zip(getattr(found[0], name), getattr(found[1], name), strict=True):
            assert one is other or torch.equal(one, other)
    # The pages of 128 tokens, and those of 40.
    assert set(seen) == {8, 3}


@on_both
@pytest.mark.parametrize("chunk", [TOKENS, 9, 1])
def test_every_layer_in_chunks(chunk: int, device: str) -> None:
    """Prefill at once, in chunks that end inside spans and blocks, and token by token. On a GPU, steps that are alike
    are remembered."""
    served, hidden = Served(device=device), inputs()
    spans = [(start, min(start + chunk, TOKENS)) for start in range(0, TOKENS, chunk)]
    found = joined([served.step(hidden, (0, *span))[0] for span in spans])
    check_request(found, hidden[:, 0])
    known = [len(layer._checks._known._known) for layer in served.layers]
    assert all(known) == (device == "cuda")
    assert chunk > 1 or max(known) < len(spans)


@on_both
def test_mixed_batches_with_padding(device: str) -> None:
    """Requests of other lengths beside, decodes and prefills in one step, and rows of padding."""
    served, hidden = Served(device=device), inputs(3)
    first = served.step(hidden, (0, 0, 20), (1, 0, 33))
    second = served.step(hidden, (0, 20, 21), (1, 33, 34), (2, 0, TOKENS), padding=3)
    third = served.step(hidden, (1, 34, 35), (0, 21, TOKENS))
    fourth = served.step(hidden, (1, 35, TOKENS), padding=1)
    check_request(joined([first[0], second[0], third[1]]), hidden[:, 0])
    check_request(joined([first[1], second[1], third[0], fourth[0]]), hidden[:, 1])
    check_request(second[2], hidden[:, 2])


def test_tokens_that_run_again() -> None:
    """Rejected drafts overwrite what they wrote: state, entries and index keys depend on positions alone."""
    served, hidden = Served(), inputs()
    other = inputs() + 1.0
    parts = [served.step(hidden, (0, 0, 30))[0]]
    served.step(other, (0, 30, 35))
    parts += [served.step(hidden, (0, 30, 33))[0], served.step(hidden, (0, 33, TOKENS))[0]]
    check_request(joined(parts), hidden[:, 0])


@on_both
def test_fp8_caches(device: str) -> None:
    """Rows in V4's FP8 format and keys in FP8: what is stored is right to within its rounding, and what is selected and
    attended to follows from it."""
    served, hidden = Served(fp8=True, device=device), inputs()
    found = joined([served.step(hidden, (0, 0, 40))[0], served.step(hidden, (0, 40, TOKENS))[0]])
    check_request(found, hidden[:, 0], served)


def test_layers_of_the_config() -> None:
    shares = [sharing(CONFIG, layer) for layer in range(LAYERS)]
    assert [share.ratio for share in shares] == [0, 1, 1, 1, 2, 2, 2, 0]
    assert [share.entries_of for share in shares] == [0, 1, 1, 1, 4, 4, 4, 7]
    assert [share.selection_of for share in shares] == [0, 1, 1, 3, 4, 5, 5, 7]
    assert [spec.kind for spec in SPECS] == ["window", *["indexed"] * 6, "window"]
    assert [spec.candidates for spec in SPECS[3:7]] == [None, Candidates(3, 4, True), Candidates(3, 4, False), None]
    assert LayerSpec.from_hf(CONFIG, LAYERS).kind == "window"  # a speculative layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 1, 1, 1, 4, 2, 2, 0]}, "compress_ratios.4. must be 0, 1 or 2"),
        ({"kv_source_layer_ids": [4]}, "kv_source_layer_ids must be one with a layer up to 1"),
        ({"kv_source_layer_ids": [1]}, "kv_source_layer_ids must be of layers with the ratio 2"),
        ({"index_source_layer_ids": [1, 3, 5]}, "index_source_layer_ids must be of layers with the ratio 2"),
        ({"candidate_source_layer_id": 1}, "candidate_source_layer_id must be a layer of the ratio 2"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks"),
    ],
)
def test_configs_that_cannot_share(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        [LayerSpec.from_hf(CONFIG | change, layer) for layer in range(LAYERS)]


def test_refusals_leave_the_caches_as_they_were() -> None:
    """A selection that is missing, or of another step, is refused before anything is written."""
    served, hidden = Served(), inputs()
    plan = served.plan((0, 0, 8))
    bad = V41Selection(torch.zeros(5, 7, dtype=torch.int32), torch.zeros(5, 3, dtype=torch.int32))
    unsorted = V41Selection(torch.zeros(8, 7, dtype=torch.int32), torch.zeros(8, 3, dtype=torch.int32))
    unseen = V41Selection(torch.arange(8, dtype=torch.int32).unsqueeze(1).expand(8, 7).contiguous(), None)
    unseen.entries[4] += 1
    with pytest.raises(TypeError, match=r"caches\.index must be a PagedCache"):
        served.layers[2](hidden[2, 0, :8], replace(served.caches[2], index=3), plan, unseen)
    for layer, selection, message in (
        (2, None, "takes the selection of an earlier one"),
        (5, None, "takes the candidate blocks"),
        (5, V41Selection(bad.entries, None), "selection.candidates"),
        (2, bad, "selection.entries"),
        (5, bad, "selection.candidates"),
        (5, unsorted, "selection.candidates must be in ascending order"),
        (2, unseen, r"selection.entries must be below 5, the number of entries that token 4 sees, got 5"),
    ):
        caches = served.caches[layer]
        held = [cache for cache in (caches.window, caches.entries, caches.index) if cache is not None]
        before = [cache.storage.view(torch.uint8).clone() for cache in held]
        with pytest.raises((ValueError, TypeError), match=message), torch.no_grad():
            served.layers[layer](hidden[layer, 0, :8], caches, plan, selection)
        assert all(
            torch.equal(c.storage.view(torch.uint8), b.view(torch.uint8)) for c, b in zip(held, before, strict=True)
        )


def test_a_step_without_requests() -> None:
    served = Served()
    plan = served.planner.plan(replace(Batch.build([], [], served.pool, other_pools=served.others), padded_tokens=2))
    selection = None
    for layer, caches in zip(served.layers, served.caches, strict=True):
        out, selection = layer(torch.ones(2, CONFIG["hidden_size"]), caches, plan, selection)
        assert not out.any()
    assert selection is not None
    assert selection.entries.eq(-1).all()
    assert selection.candidates is not None
    assert selection.candidates.eq(-1).all()


def test_layers_and_modes_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="use SparseV41"):
        SparseV4(SPECS[1], weights_of(CONFIG, 1).attention, table_of(CONFIG, 1))
    with pytest.raises(ValueError, match="mode must be 'mixed'"):
        V4Planner(SPECS, Limits(8, 2, 64, PAGE, {"window": 5, "state2": 4}), mode="separate")
    with pytest.raises(ValueError, match="source"):
        V4Caches.allocate(SPECS[2], pages=2, window_pages=2, state_pages=2, page_size=PAGE)
    with pytest.raises(ValueError, match=r"weights\.indexer"):
        SparseV41(SPECS[1], replace(weights_of(CONFIG, 1), indexer=None), table_of(CONFIG, 1))
