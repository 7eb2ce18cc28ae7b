"""A V4 layer stack in plain torch around `tamis.layers.v4.SparseV4`: random weights, norms, MLP.

The weights behave like trained ones where selection needs it, as in `tamis.lab.demo.weights`: heads share most of
their queries, and the last channels of a key are the largest. The indexer sees only these channels: its keys are pooled
from them with the same scores, and its queries are the same channels of the heads' queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tamis.cache.v4_caches import V4Caches
from tamis.lab.demo.shape import V4Shape
from tamis.lab.demo.weights import HEAD_SPREAD, RandomWeights
from tamis.layers.v4 import SparseV4
from tamis.layers.v4_weights import CompressorWeights, IndexerWeights, V4Weights
from tamis.model.rope import rms_norm
from tamis.step.v4_plan import V4Plan

SHARPNESS = 3.0
"""Standard deviation of the attention logits, set by the gains of the norms."""
LOUD = 3.0
"""Factor by which the last channels of rows are larger than the others."""

Observer = Callable[[int, Tensor, Callable[[], Tensor | None], Tensor], None]
"""Called after each layer's attention with its number, its input, a function that repeats its selection, and its
output."""


@dataclass(frozen=True, eq=False)
class V4LayerWeights:
    """One layer, in the dtype of the attention, with the MLP in float32."""

    attention: V4Weights
    gate_up: Tensor
    down: Tensor


class V4Model:
    """A model with random weights. It is stateless: caches and plan are arguments."""

    def __init__(self, shape: V4Shape, *, max_length: int, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        """Make weights and rotary tables; `dtype` is that of the attention layers, everything else is float32."""
        random = RandomWeights(shape.hidden, device, seed)
        embedding = random.normal(shape.vocab, shape.hidden)
        embedding[:, 0] = 4.0
        self.shape, self.dtype = shape, dtype
        self.layers = [_layer(random, shape, number, dtype) for number in range(shape.layers)]
        self.embedding, self.head = embedding.to(device), random.reader(shape.vocab).to(device)
        self.attention = [
            SparseV4(shape.spec(number), layer.attention, shape.rotary(number).cos_sin_table(max_length, device))
            for number, layer in enumerate(self.layers)
        ]

    def forward(
        self,
        tokens: Tensor,
        plan: V4Plan,
        caches: Sequence[V4Caches],
        logit_rows: Tensor,
        observe: Observer | None = None,
    ) -> Tensor:
        """Run the new tokens of a step through all layers and return logits [len(logit_rows), vocab].

        Args:
            tokens: int64 [T], in the order of the plan.
            plan: the plan of this step.
            caches: the caches of each layer, which are written to.
            logit_rows: int64, the rows of the tokens whose logits are returned.
            observe: called after each layer's attention.
        """
        x = self.embedding[tokens]
        for number, (layer, own) in enumerate(zip(self.layers, caches, strict=True)):
            given = rms_norm(x, None).to(self.dtype)
            attended = self.attention[number](given, own, plan)
            if observe is not None:
                observe(number, given, partial(self._select, number, given, own, plan), attended)
            x = x + attended.float()
            gate, up = linear(rms_norm(x, None), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        return linear(rms_norm(x[logit_rows], None), self.head)

    def _select(self, number: int, given: Tensor, caches: V4Caches, plan: V4Plan) -> Tensor | None:
        """The entries that a layer attends to; None if it attends to all."""
        layer = self.attention[number]
        if layer.spec.kind != "overlapping":
            return None
        # Writing the same rows again changes nothing and returns the indexer's queries.
        index_q = layer.write(given, caches, plan).index_q
        assert index_q is not None
        return layer.select(given, index_q, caches, plan)


def _layer(random: RandomWeights, shape: V4Shape, number: int, dtype: torch.dtype) -> V4LayerWeights:
    spec, width, narrow = shape.spec(number), shape.width, shape.index_dim
    volume = torch.ones(width, 1, dtype=torch.float32, device="cpu")
    volume[-narrow:] = LOUD
    gain = torch.full((width,), SHARPNESS, dtype=torch.float32, device="cpu")
    q_b = random.related(shape.heads, width, shape.q_lora, HEAD_SPREAD) / shape.q_lora**0.5 * volume
    compressor = indexer = None
    if spec.kind != "window":
        series = 2 if spec.kind == "overlapping" else 1
        values = (random.reader(series * width).unflatten(0, (series, width)) * volume).flatten(0, 1)
        scores, bias = random.reader(series * width), random.normal(spec.compress, series * width) * 0.5
        compressor = CompressorWeights(values, scores, bias, gain)
    if compressor is not None and spec.kind == "overlapping":
        last = torch.cat(
            [torch.arange(width - narrow, width, dtype=torch.int64, device="cpu") + part * width for part in (0, 1)]
        )
        own = CompressorWeights(
            values[last],
            scores[last],
            bias[:, last].contiguous(),
            torch.ones(narrow, dtype=torch.float32, device="cpu"),
        )
        heads = torch.arange(shape.index_heads, dtype=torch.int64, device="cpu") % shape.heads
        weights = random.reader(shape.index_heads) * 0.1
        weights[:, 0] = 1.0
        indexer = IndexerWeights(q_b[heads][:, -narrow:].flatten(0, 1), weights, own)
    attention = V4Weights(
        q_a=random.reader(shape.q_lora),
        q_norm=torch.ones(shape.q_lora, dtype=torch.float32, device="cpu"),
        q_b=q_b.flatten(0, 1),
        kv=random.reader(width) * volume,
        kv_norm=gain,
        sink=random.normal(shape.heads),
        o_a=random.normal(shape.o_groups, shape.o_lora, shape.heads // shape.o_groups * width) / width**0.5,
        o_b=random.writer(shape.o_groups * shape.o_lora, 0.5),
        compressor=compressor,
        indexer=indexer,
    )
    gate_up, down = random.reader(2 * shape.mlp), random.writer(shape.mlp, 1.0)
    moved = attention.to(random.device, dtype)
    return V4LayerWeights(moved, gate_up.to(random.device), down.to(random.device))
