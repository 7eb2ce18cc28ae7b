"""Random weights that behave like trained ones where sparse attention needs it.

With independent random weights attention would be nearly uniform, so that no few positions could replace all of them,
and the indexer's scores would be unrelated to attention. Training makes attention peaked and distils the indexer from
it. Here both properties are built in:

* Queries are scaled by `SHARPNESS`, the standard deviation of the attention logits, so that attention is peaked.
* Heads share most of their query and key projections (`HEAD_SPREAD` is the share that differs). All heads of a layer
  attend to one selection, which covers their attention only if they largely agree.
* Keys use a small subspace of the latent vector, apart from `LEAK`. The indexer's keys are that subspace and the rotary
  columns, both linear in the layer's input, and its queries are the attention's queries projected onto the same. Its
  scores therefore follow the logits without equalling them: it sees another norm (LayerNorm over all its dimensions
  instead of RMSNorm over the latent), no leak, a sum over heads after a ReLU, and FP8 keys.
* Channel 0 of the residual stream is constant. Only the indexer's head weights read it, which keeps them positive.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.lab.demo.shape import ModelShape
from tamis.model.absorb import AbsorbedWeights

SHARPNESS = 3.0
HEAD_SPREAD = 0.1
LEAK = 0.1


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The float32 weights of one layer, named as in checkpoints; matrices are [out, in]. Norm gains are one."""

    q_a: Tensor
    q_b: Tensor
    kv_a: Tensor
    absorbed: AbsorbedWeights
    """`kv_b_proj`, split per head."""
    o: Tensor
    index_q: Tensor
    index_k: Tensor
    index_norm_bias: Tensor
    index_weights: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """All weights of a model."""

    embedding: Tensor
    layers: list[LayerWeights]
    head: Tensor


class RandomWeights:
    """Normal matrices from one generator on the host, so that a seed gives the same weights for every device."""

    def __init__(self, hidden: int, device: torch.device, seed: int) -> None:
        """Seed the generator; the residual stream has `hidden` channels."""
        self.hidden, self.device = hidden, device
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *size: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*size, generator=self.generator, dtype=torch.float32, device="cpu")

    def reader(self, out: int) -> Tensor:
        """A matrix that reads the residual stream, except its constant channel."""
        weight: Tensor = self.normal(out, self.hidden) / self.hidden**0.5
        weight[:, 0] = 0.0
        return weight

    def writer(self, width: int, gain: float) -> Tensor:
        """A matrix that writes to the residual stream, except to its constant channel."""
        weight: Tensor = self.normal(self.hidden, width) * (gain / width**0.5)
        weight[0] = 0.0
        return weight

    def related(self, count: int, rows: int, columns: int, spread: float) -> Tensor:
        """[count, rows, columns] with unit variance; the share `spread` of it differs between matrices."""
        common, own = self.normal(1, rows, columns), self.normal(count, rows, columns)
        mixed: Tensor = (1 - spread) ** 0.5 * common + spread**0.5 * own
        return mixed


def make_weights(shape: ModelShape, device: torch.device, seed: int) -> ModelWeights:
    """All weights of a model, the same for the same seed."""
    random = RandomWeights(shape.hidden, device, seed)
    embedding = random.normal(shape.vocab, shape.hidden)
    embedding[:, 0] = 4.0
    layers = [_layer(random, shape) for _ in range(shape.layers)]
    head = random.reader(shape.vocab)
    return ModelWeights(embedding.to(device), layers, head.to(device))


def _layer(random: RandomWeights, shape: ModelShape) -> LayerWeights:
    narrow = shape.index_dim - shape.rope
    q_a, kv_a = random.reader(shape.q_lora), random.reader(shape.latent + shape.rope)
    q_b = random.related(shape.heads, shape.nope + shape.rope, shape.q_lora, HEAD_SPREAD)
    # The standard deviation of a logit is the root of its number of terms, times the softmax scale.
    spread = shape.spec.scale * (shape.nope + shape.rope) ** 0.5
    q_b *= SHARPNESS / spread / shape.q_lora**0.5
    # Orthonormal rows span the subspace of the latent vector that keys use.
    used = torch.linalg.qr(random.normal(shape.latent, narrow)).Q.T
    up = random.related(shape.heads, shape.nope, narrow, HEAD_SPREAD) / narrow**0.5
    leak = random.normal(shape.heads, shape.nope, shape.latent) / shape.latent**0.5
    key = (1 - LEAK) ** 0.5 * (up @ used) + LEAK**0.5 * leak
    value = random.normal(shape.heads, shape.value, shape.latent) * (2 / shape.latent**0.5)
    absorbed = AbsorbedWeights.split(
        torch.cat((key, value), dim=1).flatten(0, 1).to(random.device),
        heads=shape.heads,
        nope_dim=shape.nope,
        value_dim=shape.value,
        latent_dim=shape.latent,
    )
    # The indexer rotates pairs (i, i + R/2) where attention rotates (2i, 2i + 1): the same pairs in another order.
    halves = torch.cat(
        (
            torch.arange(0, shape.rope, 2, dtype=torch.int64, device="cpu"),
            torch.arange(1, shape.rope, 2, dtype=torch.int64, device="cpu"),
        )
    )
    index_k = torch.cat((kv_a[shape.latent :][halves], used @ kv_a[: shape.latent]))
    heads = torch.arange(shape.index_heads, dtype=torch.int64, device="cpu") % shape.heads
    q_nope, q_rope = q_b[heads].split([shape.nope, shape.rope], dim=1)
    index_q = torch.cat((q_rope[:, halves], up[heads].transpose(1, 2) @ q_nope), dim=1)
    index_weights = random.reader(shape.index_heads) * 0.1
    index_weights[:, 0] = 1.0
    on_device = {
        "q_a": q_a,
        "q_b": q_b.flatten(0, 1),
        "kv_a": kv_a,
        "o": random.writer(shape.heads * shape.value, 1.0),
        "index_q": index_q.flatten(0, 1),
        "index_k": index_k,
        "index_norm_bias": random.normal(shape.index_dim) * 0.02,
        "index_weights": index_weights,
        "gate_up": random.reader(2 * shape.mlp),
        "down": random.writer(shape.mlp, 1.0),
    }
    return LayerWeights(absorbed=absorbed, **{name: weight.to(random.device) for name, weight in on_device.items()})
