"""One training step of an attached model: what its tokens see, what its layers selected, and what its indexers lose."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from tamis import checks
from tamis.integrations.hf.layers import Family
from tamis.train import Entries, Pack
from tamis.train.pack import window_slots

T = TypeVar("T")
Stage = Literal["frozen", "warmup", "sparse"]
"""What an indexer does in training: "frozen" only selects, "warmup" learns from dense attention over everything that is
visible, "sparse" learns from attention over what it selected."""
Teachers = Literal["own", "readers"]
"""Whose attention teaches an indexer that several layers share: that of its own layer, or that of all its readers."""


@dataclass(frozen=True)
class Options:
    """The arguments of `attach` that concern training."""

    indexer: Stage
    index_loss: float
    deterministic: bool | None
    keep_selections: bool | None
    teachers: Teachers
    backend: str

    @property
    def teaches(self) -> bool:
        """Whether steps have a loss for their indexers."""
        return self.indexer != "frozen" and self.index_loss > 0


class IndexTensors(NamedTuple):
    """An indexer's rotated queries [T, H, D] and keys [N, D], and its weights [T, H] with all constant factors."""

    q: Tensor
    keys: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Sight:
    """The rows that each of a step's T tokens sees."""

    starts: Tensor
    """int32 [T], the first one; on the host unless the step is being compiled."""
    ends: Tensor
    """int32 [T], one past the last; equal to the start for padding."""
    longest: int
    """At least the number of tokens of the longest request."""
    real: Tensor | int
    """The number of tokens that are not padding."""
    requests: list[tuple[int, int]] | None
    """First row and length of each request; None if only the device knows."""
    pack: Pack | None
    """The same on the host; None while the step is being compiled."""
    packed: bool = False
    """Whether a row of the batch is known to hold more than one request."""

    @classmethod
    def of(
        cls, rows: int, columns: int, mask: Tensor | None, position_ids: Tensor | None, device: torch.device
    ) -> "Sight":
        """From a padding mask and `position_ids` [rows, columns], both optional, of tokens on a device."""
        if torch.compiler.is_compiling():
            return cls._traced(rows, columns, mask, position_ids, device)
        if position_ids is not None:
            pack = Pack.of_positions(position_ids.expand(rows, columns).cpu(), None if mask is None else mask.cpu())
        elif mask is not None:
            pack = Pack.of_mask(mask.cpu())
        else:
            pack = Pack.of([columns * row for row in range(rows + 1)])
        requests = list(zip(pack.first_rows, pack.lengths, strict=True))
        packed = len({first // columns for first in pack.first_rows}) < len(requests)
        longest = max(pack.lengths, default=0)
        return cls(pack.starts, pack.ends, longest, sum(pack.lengths), requests, pack, packed)

    @classmethod
    def _traced(
        cls, rows: int, columns: int, mask: Tensor | None, position_ids: Tensor | None, device: torch.device
    ) -> "Sight":
        """The same from operations on the device alone, since a trace has no values."""
        own = torch.arange(rows * columns, dtype=torch.int32, device=device).view(rows, columns)
        begins = own % columns == 0
        mask, position_ids = (None if given is None else given.to(device) for given in (mask, position_ids))
        if position_ids is not None:
            begins[:, 1:] |= position_ids[..., 1:] != position_ids[..., :-1] + 1
        if mask is not None:
            begins[:, 1:] |= mask[:, :-1] == 0
        starts = torch.where(begins, own, -1).cummax(1).values
        if mask is None:
            requests = [(row * columns, columns) for row in range(rows)] if position_ids is None else None
            return cls(starts.flatten(), own.flatten() + 1, columns, rows * columns, requests, None)
        ends = torch.where(mask != 0, own + 1, starts)
        return cls(starts.flatten(), ends.flatten(), columns, (mask != 0).sum(), None, None)


class TrainStep:
    """One forward pass with gradients, as the attention modules receive it in place of a mask.

    A layer that is checkpointed runs twice. What it leaves here the first time stays, and the second pass reads it.
    This is no dataclass: FSDP2 takes dataclasses among a layer's arguments apart, and passes a copy on.
    """

    def __init__(
        self,
        family: Family,
        options: Options,
        sight: Sight,
        *,
        records: bool,
        token_weight: Tensor | None = None,
        keep: bool = False,
        frees_weights: bool = False,
        replayed: dict[int, Tensor] | None = None,
    ) -> None:
        """Start with nothing selected and nothing lost.

        Args:
            family: the model's.
            options: those of `attach`.
            sight: what the tokens see.
            records: whether the pass was started with gradients enabled.
            token_weight: the factor of every token's index loss: the coefficient over the number of tokens. None if
                there is no loss.
            keep: whether selections are kept for layers that run a second time.
            frees_weights: whether a layer's weights are freed after its forward pass until its output's gradient comes.
            replayed: int32 [T, K] by layer, rows that were selected in an earlier run.
        """
        self.family, self.options, self.sight, self.records = family, options, sight, records
        self.token_weight, self.keep, self.frees_weights, self.replayed = token_weight, keep, frees_weights, replayed
        self.kept: dict[int, Tensor] = {}
        """int32 [T, K] by layer: selections of layers that will run again."""
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        """The rows [T, L] and [T, R] by layer that later layers attend to as well; without a graph after the pass."""
        self.sources: dict[int, IndexTensors] = {}
        """What an indexer made, by its layer, for the layers that share its selection; likewise."""
        self.losses: dict[tuple[int, int], Tensor | None] = {}
        """Losses by the layer of the indexer and the layer whose attention teaches it; None once they are taken."""
        self._shared: dict[Hashable, Any] = {}

    def finish(self) -> None:
        """End the forward pass. Layers that run again need the values of what other layers left here, and not its
        graph, which the first pass has recorded. Through that graph a step would hold itself, a cycle that Python
        cannot collect: the graph of checkpointed layers holds the step for their second pass."""
        self.rows = {layer: (_leaf(latent), _leaf(rope)) for layer, (latent, rope) in self.rows.items()}
        self.sources = {layer: IndexTensors(*map(_leaf, found)) for layer, found in self.sources.items()}

    def window_slots(self, window: int, device: torch.device) -> Tensor:
        """int32 [T, window]: the rows of the last tokens that each token sees, then -1."""
        return self.remembered(("window", window), lambda: window_slots(*self._bounds(device), window))

    def entries(self, ratio: int, device: torch.device) -> Entries:
        """The entries of spans of `ratio` tokens (V4)."""
        return self.remembered(("entries", ratio), lambda: self._entries(ratio, device))

    def _entries(self, ratio: int, device: torch.device) -> Entries:
        if self.sight.pack is None:
            return Entries.traced(*self._bounds(device), ratio, self.sight.longest)
        return self.sight.pack.to(device).entries(ratio)

    def _bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.sight.starts.to(device), self.sight.ends.to(device)

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What all layers of a step share, made by the first one that needs it."""
        if key not in self._shared:
            self._shared[key] = make()
        found: T = self._shared[key]
        return found

    def source(self, layer: int) -> int:
        """The layer whose indexer selects for a layer."""
        specs = self.family.specs
        while specs[layer] is None or specs[layer].reuse_topk:
            layer -= 1
        return layer

    def readers(self, source: int) -> int:
        """How many layers use the selection of a layer's indexer, itself included."""
        later = range(source, len(self.family.specs))
        return sum(self.family.specs[number] is not None and self.source(number) == source for number in later)

    def teaches(self, layer: int) -> bool:
        """Whether a layer's attention teaches an indexer."""
        own = not self.family.specs[layer].reuse_topk
        return self.token_weight is not None and (own or self.options.teachers == "readers")

    def weights_of_tokens(self, layer: int, like: Tensor) -> Tensor:
        """The factors [T] of a layer's index loss, in the dtype in which that of queries `like` is summed."""
        assert self.token_weight is not None
        share = self.readers(self.source(layer)) if self.options.teachers == "readers" else 1
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return (self.token_weight.to(dtype) / share).expand(len(like))

    def add_loss(self, layer: int, loss: Tensor, out: Tensor) -> None:
        """Keep a layer's index loss, unless the layer runs for the second time.

        Args:
            layer: the layer's number.
            loss: its loss.
            out: its attention's output.
        """
        if self.frees_weights and self.records and not out.requires_grad:
            # The backward pass of the indexer would read weights that fully_shard has freed.
            remedy = "call model.gradient_checkpointing_enable()"
            expected = "checkpointed if its layers are sharded and only indexers learn"
            raise checks.refuse("model", expected, "sharded layers without checkpointing", remedy)
        self.losses.setdefault((self.source(layer), layer), loss)


class Collected:
    """The index losses of the last step, with their graph until somebody adds them to the language loss."""

    def __init__(self) -> None:
        """Start without any."""
        self._pending: dict[tuple[int, int], Tensor | None] = {}
        self._values: dict[int, Tensor] = {}
        self._scale: Any = 1.0

    @property
    def unused(self) -> bool:
        """Whether the last step's losses were neither added nor taken."""
        return bool(self._pending)

    def forget(self) -> None:
        """Forget the last step."""
        _let_go(self._pending)
        self._pending, self._values = {}, {}

    def start(self, step: TrainStep) -> None:
        """Forget the last step; the losses of the new one will be found in its own dictionary."""
        self.forget()
        self._pending = step.losses
        self._scale = None if step.token_weight is None else (step.token_weight, step.sight.real)

    def take(self) -> Tensor | None:
        """The sum of the step's losses, with its graph, once; None if there are none."""
        losses, self._pending = self._pending, {}
        found = {key: loss for key, loss in losses.items() if loss is not None}
        if not found:
            return None
        weight, real = self._scale
        for (source, _), loss in found.items():
            mean = loss.detach() / (weight * real)
            self._values[source] = self._values[source] + mean if source in self._values else mean
        _let_go(losses)
        return torch.stack(list(found.values())).sum()

    def means(self) -> dict[int, float]:
        """The last step's losses per token, by the layer of the indexer."""
        if self._pending:
            raise checks.refuse(
                "model", "asked after its loss", "losses that nobody has used", "pass labels, or call take_index_loss"
            )
        return {layer: float(value) for layer, value in self._values.items()}


def _leaf(x: Tensor) -> Tensor:
    """The same values without their graph. Whether they require a gradient decides what a second pass saves."""
    return x.detach().requires_grad_(x.requires_grad)


def _let_go(losses: dict[tuple[int, int], Tensor | None]) -> None:
    """Drop the losses of a step. Through the graph of checkpointed layers they hold the step that holds them, a cycle
    that Python cannot collect unless a backward pass frees the graph. The keys stay, for layers that run again."""
    losses.update(dict.fromkeys(losses))
