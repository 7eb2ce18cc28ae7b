"""Selections that an attached model records while it generates, and replays in training."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.layers.recording import Recording


@contextmanager
def recording(base: Any, into: Recording, requests: Sequence[Hashable]) -> Iterator[None]:
    """Record the selections of all layers with an indexer; see `tamis.integrations.transformers.recording`."""
    attachment = base._tamis
    _check(attachment.family, into)
    names = list(checks.sequence("requests", requests))

    def record(layer: int, plan: Any, positions: Tensor) -> None:
        into.record(layer, names, plan, positions)

    before, attachment.record = attachment.record, record
    try:
        yield
    finally:
        attachment.record = before


@contextmanager
def replaying(base: Any, recorded: Recording, requests: Sequence[Hashable]) -> Iterator[None]:
    """Attend to recorded positions; see `tamis.integrations.transformers.replaying`."""
    attachment = base._tamis
    training = attachment.training
    _check(attachment.family, recorded)
    if training.options.indexer == "warmup":
        remedy = "attach with indexer='sparse' or 'frozen'"
        raise checks.refuse("indexer", "one that selects", "'warmup', whose attention is dense", remedy)
    if training.options.teaches and recorded.kpool > 1:
        remedy = "attach with indexer='frozen'"
        raise checks.refuse("indexer", "'frozen' to replay selections of pooled keys", "'sparse'", remedy)
    names = list(checks.sequence("requests", requests))
    before, training.replay = training.replay, _replay(attachment.family.specs, recorded, names)
    try:
        yield
    finally:
        training.replay = before


def _replay(specs: list[Any], recorded: Recording, names: list[Hashable]) -> Callable[..., dict[int, Tensor]]:
    def rows(pack: Any, device: torch.device) -> dict[int, Tensor]:
        if pack is None:
            remedy = "replay without torch.compile"
            raise checks.refuse("replaying", "used eagerly: recordings are on the host", "a compiled model", remedy)
        own = [layer for layer, spec in enumerate(specs) if spec is not None and _selects(spec)]
        return {layer: recorded.packed(layer, names, pack).to(device) for layer in own}

    return rows


def _check(family: Any, given: Any) -> None:
    recorded = checks.instance("recording", given, Recording, "make one with Recording(topk=config.index_topk)")
    spec = next((spec for spec in family.specs if spec is not None and _selects(spec)), None)
    if spec is None:
        raise checks.refuse("model", "one with an indexer", "none in any layer", "there is nothing to record")
    ratio = spec.compress if spec.kind == "overlapping" else None
    wanted = (spec.topk, spec.kpool, ratio)
    given = (recorded.topk, recorded.kpool, recorded.ratio)
    if given != wanted:
        groups = "" if spec.kpool == 1 else f", kpool={spec.kpool}"
        remedy = f"make it with Recording(topk={spec.topk}{groups}{'' if ratio is None else f', ratio={ratio}'})"
        raise checks.refuse("recording", f"of {_described(*wanted)}, like the model", _described(*given), remedy)


def _described(topk: int, kpool: int, ratio: int | None) -> str:
    what = "positions" if ratio is None else f"entries of {ratio} tokens"
    return f"{topk} {what} per token{'' if kpool == 1 else f' in groups of {kpool}'}"


def _selects(spec: Any) -> bool:
    """Whether a layer has an indexer of its own."""
    return spec.topk is not None and not spec.reuse_topk
