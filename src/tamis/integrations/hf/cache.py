"""`TamisCache`: paged caches behind the `Cache` interface of Hugging Face transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe
from tamis.step.batch import Batch, PageMap

MAIN_POOL = ""
"""The pool that `Batch.pages` describes; others go to `Batch.other_pages` by name."""


@dataclass(frozen=True)
class Pool:
    """Pages that hold the same tokens in several layers."""

    page_size: int
    """Tokens per page."""
    keep: int | None = None
    """How many of a request's last tokens are still needed; None if all are."""

    def pages(self, cached: int, length: int) -> range:
        """Numbers of the pages in use while a request with `cached` tokens grows to `length`."""
        first = 0 if self.keep is None else max(0, cached - self.keep)
        return range(first // self.page_size, ceil_div(length, self.page_size))


@dataclass(frozen=True)
class Held:
    """The description of one cache of a layer."""

    pool: str
    layout: Layout
    page_rows: int
    recipe: IndexRecipe | None = None

    def allocate(self, pages: int, device: torch.device) -> PagedCache:
        """This cache with zeroed pages."""
        return PagedCache(self.layout, pages, self.page_rows, device, recipe=self.recipe)


@dataclass(frozen=True)
class CacheShape:
    """The caches of a model."""

    pools: Mapping[str, Pool]
    layers: Sequence[Mapping[str, Held]]
    """For each layer, its caches under the field names of `Caches` or `V4Caches`."""
    device: torch.device
    linear: tuple[int, ...] = ()
    """The numbers of the layers of linear attention, which keep states of their own and no pages."""


class TamisCache(Cache):
    """The caches of an attached model, for one generation.

    Columns are counted as transformers counts them, with padding; only real tokens take room in the pages. Page
    `number` of request `row` is page `(number % depth) * requests + row` of the pool. So requests that grow together
    need no allocator, and pages that are no longer needed are overwritten by later ones.
    """

    def __init__(self, shape: CacheShape) -> None:
        """Start empty; pages are allocated by the first step and grow with the requests."""
        super().__init__(layers=[])
        self.shape = shape
        self.kept: Tensor | None = None
        """bool [requests, columns] on the host: which columns are real tokens."""
        self.depths = dict.fromkeys(shape.pools, 0)
        """Pages per request, by pool."""
        self.paged: list[dict[str, PagedCache]] = [{} for _ in shape.layers]
        self.states = _linear_states(shape.linear)
        """The states of layers of linear attention, which the model itself reads and writes."""

    @property
    def batch_size(self) -> int:
        """How many requests there are; -1 before the first step."""
        return -1 if self.kept is None else self.kept.shape[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many columns have run, padding included."""
        return 0 if self.kept is None else self.kept.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, since there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of a mask over all columns."""
        return self.get_seq_length() + query_length, 0

    @property
    def is_compileable(self) -> bool:
        """False: pages are allocated as tokens arrive."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether a step has run."""
        return self.kept is not None

    @property
    def is_croppable(self) -> bool:
        """Whether every token's rows are still there, and no layer has only a state of all tokens."""
        return not self.states and all(pool.keep is None for pool in self.shape.pools.values())

    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer: transformers need not know which tokens have left a window."""
        return [False] * len(self.shape.layers)

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.shape.layers)

    def __repr__(self) -> str:
        """Only sizes, no values."""
        return f"TamisCache(requests={self.batch_size}, columns={self.get_seq_length()}, layers={len(self)})"

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always refused: only attached models write to the pages."""
        raise checks.refuse("past_key_values", "a transformers cache", "a TamisCache", "attach the model, or drop it")

    def update_indexer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always refused, like `update`."""
        self.update()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution before linear attention; None before the first step."""
        state = self.states[layer_idx]
        return state.conv_states[state_idx] if state.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of linear attention; None before the first step."""
        state = self.states[layer_idx]
        return state.recurrent_states[state_idx] if state.has_previous_state[state_idx] else None

    # States made inside inference_mode could not be written outside of it.
    @torch.inference_mode(False)
    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the last inputs of a convolution, and return them with the new ones."""
        found: Tensor = self.states[layer_idx].update_conv_state(conv_states, state_idx, **kwargs)
        return found

    @torch.inference_mode(False)
    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep the state of linear attention."""
        found: Tensor = self.states[layer_idx].update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return found

    def reset(self) -> None:
        """Forget all tokens and free all pages."""
        self.kept = None
        self.depths = dict.fromkeys(self.depths, 0)
        self.paged = [{} for _ in self.paged]
        self.states = _linear_states(self.shape.linear)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns. As in transformers, the argument is negative."""
        checks.integer("tokens_to_remove", tokens_to_remove, low=-self.get_seq_length(), high=0)
        if tokens_to_remove == 0 or self.kept is None:
            return
        if not self.is_croppable:
            remedy = "what the model kept of earlier tokens (windows, states) is gone, so start again"
            raise checks.refuse("tokens_to_remove", "0 for this model", tokens_to_remove, remedy)
        self.kept = self.kept[:, :tokens_to_remove]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let request i continue request `beam_idx[i]` (beam search)."""
        self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each request."""
        self._take(torch.arange(max(self.batch_size, 0), dtype=torch.int64, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the requests with these numbers."""
        self._take(torch.arange(max(self.batch_size, 0), dtype=torch.int64, device="cpu")[indices.cpu()])

    def new_tokens(self, rows: int, columns: int, attention_mask: Tensor | None) -> Tensor:
        """Which of a step's tokens are real: bool [rows, columns] on the host.

        For cached columns, the mask must say what it said when they ran.
        """
        seen = self.get_seq_length()
        if self.kept is not None and rows != self.kept.shape[0]:
            raise checks.refuse("input_ids", f"of {self.kept.shape[0]} rows, like the cache", rows, "use another cache")
        if attention_mask is None:
            if self.kept is not None and not bool(self.kept.all()):
                raise checks.refuse("attention_mask", "given for a cache with padding", None, "pass it for all columns")
            return torch.ones(rows, columns, dtype=torch.bool, device="cpu")
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != (rows, seen + columns):
            expected = f"of shape [{rows}, {seen + columns}] (cached and new columns)"
            remedy = "pass a padding mask; a causal mask is not needed"
            raise checks.refuse("attention_mask", expected, checks.describe(attention_mask), remedy)
        mask = attention_mask.detach().cpu() != 0
        if self.kept is not None and not torch.equal(mask[:, :seen], self.kept):
            remedy = "cached tokens cannot be masked or unmasked later"
            raise checks.refuse("attention_mask", "unchanged for cached columns", "another one", remedy)
        return mask[:, seen:]

    def batch(self, new: Tensor) -> Batch:
        """The step with these new tokens, with pages for all of them. `commit` counts them as cached afterwards."""
        cached = torch.zeros(len(new), dtype=torch.int64, device="cpu") if self.kept is None else self.kept.sum(1)
        counts = new.sum(1)
        lengths = cached + counts
        self._make_room(cached.tolist(), lengths.tolist())
        starts = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), counts.cumsum(0)))
        request = torch.arange(len(new), dtype=torch.int64, device="cpu").repeat_interleave(counts)
        position = torch.arange(len(request), dtype=torch.int64, device="cpu") - starts[request] + cached[request]
        pages = {name: self._pages(name, request, position, cached, lengths) for name in self.shape.pools}
        main = pages.pop(MAIN_POOL)
        return Batch(starts.int(), lengths.int(), main, other_pages=pages)

    def commit(self, new: Tensor) -> None:
        """Count a step's tokens as cached, after all layers have written them."""
        self.kept = new if self.kept is None else torch.cat((self.kept, new), dim=1)

    def _pages(self, name: str, request: Tensor, position: Tensor, cached: Tensor, lengths: Tensor) -> PageMap:
        pool, depth, requests = self.shape.pools[name], self.depths[name], len(lengths)
        number = position // pool.page_size
        slots = ((number % depth) * requests + request) * pool.page_size + position % pool.page_size
        used = [pool.pages(*ends) for ends in zip(cached.tolist(), lengths.tolist(), strict=True)]
        columns = torch.arange(max(1, *(pages.stop for pages in used)), dtype=torch.int64, device="cpu")
        table = (columns % depth) * requests + torch.arange(requests, dtype=torch.int64, device="cpu").unsqueeze(1)
        first = torch.tensor([pages.start for pages in used], dtype=torch.int64, device="cpu").unsqueeze(1)
        end = torch.tensor([pages.stop for pages in used], dtype=torch.int64, device="cpu").unsqueeze(1)
        return PageMap(torch.where((columns >= first) & (columns < end), table, -1).int(), slots)

    def _make_room(self, cached: list[int], lengths: list[int]) -> None:
        for name, pool in self.shape.pools.items():
            needed = max(1, *(len(pool.pages(*ends)) for ends in zip(cached, lengths, strict=True)))
            old = self.depths[name]
            if needed <= old:
                continue
            # Grow by a quarter at least: growing page by page would copy the whole pool each time.
            self.depths[name] = depth = max(needed, old + old // 4) if old else needed
            count = len(lengths)
            moves = [
                ((page % old) * count + row, (page % depth) * count + row)
                for row, length in enumerate(cached)
                for page in pool.pages(length, length)
                if old
            ]
            self._move(name, moves, depth * count)

    def _take(self, rows: Tensor) -> None:
        """Replace the requests by copies of those with the numbers `rows`."""
        if self.kept is None:
            return
        taken: list[int] = rows.tolist()
        before = self.kept.shape[0]
        if taken == list(range(before)):
            return
        for name, depth in self.depths.items():
            moves = [
                (page * before + old, page * len(taken) + row) for row, old in enumerate(taken) for page in range(depth)
            ]
            self._move(name, moves, depth * len(taken))
        with torch.inference_mode(False):
            for state in self.states.values():
                state.reorder_cache(rows)
        self.kept = self.kept[rows.cpu()]

    def _move(self, pool: str, moves: list[tuple[int, int]], pages: int) -> None:
        """Allocate new storage for a pool, and copy pages from their old to their new numbers."""
        device = self.shape.device
        source, target = torch.tensor(moves, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        for held, paged in zip(self.shape.layers, self.paged, strict=True):
            for name, rows in held.items():
                if rows.pool != pool:
                    continue
                fresh = rows.allocate(pages, device)
                if moves:
                    fresh.storage.view(torch.uint8)[target] = paged[name].storage.view(torch.uint8)[source]
                paged[name] = fresh


def _linear_states(layers: Sequence[int]) -> dict[int, Any]:
    """Empty states of transformers for layers of linear attention."""
    if not layers:
        return {}
    from transformers.cache_utils import LinearAttentionLayer  # older versions have none, and no model that needs it

    return {layer: LinearAttentionLayer() for layer in layers}
