"""`Recording`: the positions that layers selected, kept by request and token for another run over the same tokens."""

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tamis import checks
from tamis.step.lease import needs_latest_plan
from tamis.step.plan import Plan

if TYPE_CHECKING:
    from tamis.train.pack import Pack


class Recording:
    """The selections of a run, on the host, to be replayed in another run over the same tokens.

    They are kept by layer, request and position, not by step: what was recorded in chunks and decode steps can be
    replayed in one prefill, and the other way round. Recording a position again replaces the earlier selection, as is
    needed after a rejected speculative token. `record` and `replay` check every row, so that a selection of another
    step, or an incomplete one, is refused.
    """

    def __init__(self, topk: int, kpool: int = 1, ratio: int | None = None) -> None:
        """Start empty, for the selections of layers with these numbers.

        Args:
            topk: how many positions a token selects, as in `LayerSpec.topk`.
            kpool: `LayerSpec.kpool`, the tokens per pooled index key.
            ratio: for layers that select compressed entries (V4), the tokens per entry: what is kept are numbers of
                entries in the request then. None for layers that select tokens.
        """
        self.topk, self.kpool = checks.integer("topk", topk, low=1), checks.integer("kpool", kpool, low=1)
        self.ratio = None if ratio is None else checks.integer("ratio", ratio, low=1)
        self.columns = self.topk + self.kpool - 1
        """The most positions of a token, as `LayerSpec.columns`."""
        self._rows: dict[tuple[int, Hashable], Tensor] = {}

    # The rows outlive the call. Made inside inference_mode, they could not be written to outside of it.
    @torch.inference_mode(False)
    @needs_latest_plan
    def record(self, layer: int, requests: Sequence[Hashable], plan: Plan, positions: Tensor) -> None:
        """Keep what a layer selected in a step. Copying it to the host synchronises with the device.

        Args:
            layer: the layer's number. Layers that share a selection need not be recorded.
            requests: the names of the plan's requests, in the plan's order.
            plan: the step's plan; of a `V4Plan`, its `step`.
            positions: int32 [rows, columns], from a `LayerOutput`, or what `SparseV4` wrote to `selected`.
        """
        checks.integer("layer", layer, low=0)
        remedy = f"record selections of {self.columns} positions"
        checks.tensor("positions", positions, f"rows {self.columns}", (torch.int32,), rows=plan.rows, remedy=remedy)
        if positions.device.type == "meta":
            raise checks.refuse("positions", "a tensor with values", "one on meta", "record what a layer selected")
        chosen = positions.cpu()
        step = [(request, chosen[tokens], own) for request, tokens, own in _tokens(requests, plan)]
        for request, found, own in step:
            self._complete(request, found, own)
        for request, found, own in step:
            self._keep(layer, request, found, own)

    @torch.inference_mode(False)
    def load(self, layer: int, request: Hashable, positions: Tensor, first: int = 0) -> None:
        """Keep selections that an engine captured for consecutive tokens of a request.

        Args:
            layer: the layer's number.
            request: the request's name.
            positions: int32 [tokens, columns], positions (or numbers of entries) in the request in any order, -1 where
                there are fewer.
            first: the position of the first of these tokens.
        """
        checks.integer("layer", layer, low=0)
        checks.hashable("request", request)
        checks.integer("first", first, low=0)
        remedy = f"pass selections of {self.columns} positions"
        checks.tensor("positions", positions, f"tokens {self.columns}", (torch.int32,), remedy=remedy)
        if positions.device.type == "meta":
            raise checks.refuse("positions", "a tensor with values", "one on meta", "pass what an engine captured")
        # A copy: what is kept must not change with the caller's tensor.
        found = positions.detach().to("cpu", copy=True)
        own = torch.arange(first, first + len(found), dtype=torch.int64, device="cpu")
        self._complete(request, found, own)
        if len(found):
            self._keep(layer, request, found, own)

    @needs_latest_plan
    def replay(self, layer: int, requests: Sequence[Hashable], plan: Plan) -> Tensor:
        """Positions int32 [rows, columns] for a step of the same requests, on the plan's device; -1 for padded rows.

        A step with a token that was never recorded is refused.
        """
        result = torch.full((plan.rows, self.columns), -1, dtype=torch.int32, device="cpu")
        for request, tokens, own in _tokens(requests, plan):
            result[tokens] = self._known(layer, request, own)
        return result.to(plan.positions.device)

    def packed(self, layer: int, requests: Sequence[Hashable], pack: "Pack") -> Tensor:
        """Row numbers int32 [T, columns] for `tamis.train`: the same selections in a pack of whole requests, on its
        device; -1 for padding. Of entries, they are numbers among `Pack.entries(ratio)`.

        Args:
            layer: the layer's number.
            requests: the names of the pack's requests, in its order.
            pack: the requests from their first token on. A token that was never recorded is refused.
        """
        from tamis.train.pack import Pack

        checks.instance("pack", pack, Pack)
        _check_names(requests, len(pack.lengths), "pack")
        result = torch.full((pack.tokens, self.columns), -1, dtype=torch.int32, device="cpu")
        bases = pack.first_rows
        if self.ratio is not None:
            bases = (0, *accumulate(length // self.ratio for length in pack.lengths))[: len(pack.lengths)]
        for request, first, base, length in zip(requests, pack.first_rows, bases, pack.lengths, strict=True):
            if length:
                found = self._known(layer, request, torch.arange(length, dtype=torch.int64, device="cpu"))
                result[first : first + length] = torch.where(found >= 0, found + base, -1)
        return result.to(pack.starts.device)

    def forget(self, request: Hashable) -> None:
        """Drop what was recorded of a request in all layers, if anything was."""
        for key in [key for key in self._rows if key[1] == request]:
            del self._rows[key]

    def _keep(self, layer: int, request: Hashable, found: Tensor, own: Tensor) -> None:
        """Keep the selections of tokens at these positions."""
        key = (layer, request)
        known = self._rows.get(key, found.new_full((0, self.columns), -1, dtype=found.dtype))
        missing = int(own.max()) + 1 - len(known)
        if missing > 0:
            known = torch.cat((known, known.new_full((missing, self.columns), -1, dtype=known.dtype)))
        known[own] = found
        self._rows[key] = known

    def _known(self, layer: int, request: Hashable, own: Tensor) -> Tensor:
        """The selections of tokens at these positions; refused if one of them was never recorded."""
        known = self._rows.get((layer, request))
        if known is None or int(own.max()) >= len(known):
            there = 0 if known is None else len(known)
            received = f"{there} tokens of {request!r} in layer {layer}"
            raise checks.refuse("recording", f"at least {int(own.max()) + 1} tokens long", received, "record them")
        found = known[own]
        self._complete(request, found, own)
        return found

    def _complete(self, request: Hashable, rows: Tensor, own: Tensor) -> None:
        """Refuse rows that are not complete selections: as many distinct visible positions as there can be."""
        visible = (own + 1) // (self.ratio or 1)
        wanted = (visible - visible % self.kpool).clamp_max(self.topk) + visible % self.kpool
        ordered = rows.sort(dim=1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
        wrong = ((rows >= 0).sum(1) != wanted) | (rows >= visible.unsqueeze(1)).any(1) | twice
        if bool(wrong.any()):
            at = int(own[wrong][0])
            last, kind = int(visible[wrong][0]) - 1, "positions" if self.ratio is None else "entries"
            expected = f"{int(wanted[wrong][0])} different {kind} up to {last} for token {at} of {request!r}"
            raise checks.refuse(
                "positions", expected, rows[wrong][0].tolist()[:8], "pass what a layer selected in this step"
            )


def _tokens(requests: Sequence[Hashable], plan: Plan) -> list[tuple[Hashable, Tensor, Tensor]]:
    """Each request of a step with its token rows and their positions, without padding."""
    _check_names(requests, plan.requests, "plan")
    ids, own = plan.request_ids.cpu(), plan.positions.cpu().long()
    found = []
    for number, request in enumerate(requests):
        tokens = ((ids == number) & (own >= 0)).nonzero().flatten()
        if len(tokens):
            found.append((request, tokens, own[tokens]))
    return found


def _check_names(requests: Sequence[Hashable], count: int, of: str) -> None:
    for name in checks.sequence("requests", requests):
        checks.hashable("requests", name)
    if len(requests) != count or len(set(requests)) != len(requests):
        expected = f"{count} different names, one per request of the {of}"
        raise checks.refuse("requests", expected, list(requests), f"name them in the {of}'s order")
