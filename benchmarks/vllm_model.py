"""Makes a random DeepSeek-V3.2 checkpoint whose tokens are decided by attention and seldom by rounding.

With Gaussian weights rounding decides many tokens: the indexer is unrelated to attention, so that the last keys of a
selection have as much weight as the first, and hundreds of logits differ by a few units in the last place of 16 bits.
vLLM's FLASHMLA_SPARSE, eager and with graphs, then agreed with itself on half of the tokens. Here every matrix is
random as well, but its few large directions fit together, as in a trained model:

- An embedding is the sum of a constant, one of `CANDIDATES` classes, a code near that of its class, and noise. One
  token in `SALIENT_ONE_IN` is salient. Both the indexer and attention look for salient tokens, so that all attention
  weight is well inside the selection and none at its border.
- The first layer finds salient tokens at distances that differ between heads. The next layers look for salient tokens
  by their code and by the earlier layers' results for them; their queries are the earlier layers' results for the
  current token. The last layer sums the classes of the tokens that it finds, weighted by attention. The sums are the
  logits of one candidate per class.

A token's own embedding only affects distances, so that one changed token does not change all tokens after it. Scores
depend on few directions of wide vectors, over which independent rounding errors average out.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from random_weights import Drawn
from safetensors.torch import save_file
from torch import Tensor

CANDIDATES, CODE, SALIENT_ONE_IN = 12, 8, 16
# Lengths of the terms of an embedding, and of what a layer adds to it.
CONSTANT, SALIENCE, KEY, CLASS, FILLER, FOUND = 10.0, 16.0, 20.0, 8.0, 14.0, 10.0
# Terms of a score in nats, in the first and later layers: salience, one frequency, the standard deviation of content.
SALIENCE_NATS, ROTATION_NATS, CONTENT_NATS = (10.0, 8.0), (1.3, 0.2), (0.0, 1.2, 2.4)
# The fastest frequencies, which YaRN leaves as they are.
FREQUENCIES = 10
LOGIT = 16.0
NOISE = 0.02


def write_checkpoint(source: Path, folder: Path, seed: int = 20) -> None:
    """Write a bf16 checkpoint for the config in `source`, and copy the config."""
    shutil.copytree(source, folder)
    folder.chmod(0o755)
    config = json.loads((folder / "config.json").read_text())
    save_file(Weights(config, seed).tensors(), folder / "model.safetensors", metadata={"format": "pt"})


class Weights(Drawn):
    """The tensors of a checkpoint, by their names."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        super().__init__(seed)
        self.config = config
        self.hidden, self.layers = config["hidden_size"], config["num_hidden_layers"]
        basis = self.orthonormal(self.hidden, self.hidden)
        widths = [1, 1, CODE, CANDIDATES, *[CODE] * (self.layers - 1), CANDIDATES]
        parts = basis.split([*widths, self.hidden - sum(widths)], dim=1)
        self.constant, self.salience, self.key, self.classes, *self.found, self.filler = parts

    def tensors(self) -> dict[str, Tensor]:
        vocabulary = self.config["vocab_size"]
        order = torch.randperm(vocabulary, generator=self.generator)
        embeddings = self.embeddings(order)
        head = torch.zeros(vocabulary, self.hidden)
        head[order[:CANDIDATES]] = self.found[-1].T * (LOGIT * self.length(self.layers) / FOUND * self.hidden**-0.5)
        wide = {"embed_tokens": embeddings, "norm": torch.ones(self.hidden)}
        named = {f"model.{name}.weight": tensor for name, tensor in wide.items()} | {"lm_head.weight": head}
        for number in range(self.layers):
            parts = self.mlp() | self.attention(number)
            named |= {f"model.layers.{number}.{name}": tensor for name, tensor in parts.items()}
        return {name: t.float() if "k_norm" in name else t.bfloat16().contiguous() for name, t in named.items()}

    def embeddings(self, order: Tensor) -> Tensor:
        vocabulary = len(order)
        salience = torch.zeros(vocabulary, 1)
        salient = order[: vocabulary // SALIENT_ONE_IN]
        salience[salient] = 1 + 0.05 * self.normal(len(salient), 1)
        classes = torch.zeros(vocabulary, CANDIDATES)
        classes[order, torch.arange(vocabulary) % CANDIDATES] = 1
        # Tokens of a class have similar codes, as similar keys have similar values in a trained model.
        centres = self.orthonormal(CANDIDATES, CODE)
        centres = torch.nn.functional.normalize(centres - centres.mean(0), dim=1)
        codes = classes @ centres + 0.5 * self.directions(vocabulary, CODE)
        codes = torch.nn.functional.normalize(codes, dim=1)
        embeddings: Tensor = (
            CONSTANT * self.constant.T
            + SALIENCE * salience @ self.salience.T
            + KEY * codes @ self.key.T
            + CLASS * classes @ self.classes.T
            + FILLER * self.directions(vocabulary, self.filler.shape[1]) @ self.filler.T
        )
        return embeddings

    def length(self, number: int) -> float:
        """Approximate norm of an ordinary token's hidden state before a layer."""
        return math.hypot(CONSTANT, KEY, CLASS, FILLER, FOUND * number**0.5)

    def mlp(self) -> dict[str, Tensor]:
        inner = self.config["intermediate_size"]
        return {
            "input_layernorm.weight": torch.ones(self.hidden),
            "post_attention_layernorm.weight": torch.ones(self.hidden),
            "mlp.gate_proj.weight": self.matrix(inner, self.hidden),
            "mlp.up_proj.weight": self.matrix(inner, self.hidden),
            "mlp.down_proj.weight": self.matrix(self.hidden, inner, 0.05),
        }

    def attention(self, number: int) -> dict[str, Tensor]:
        """The weights of attention and its indexer.

        The latent row holds salience, code, class and the earlier layers' results; the compressed query holds the
        constant and the earlier layers' results, each in random directions. All weights are defined by these.
        """
        config, last = self.config, number == self.layers - 1
        q_rank, latent, heads = config["q_lora_rank"], config["kv_lora_rank"], config["num_attention_heads"]
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
        earlier = self.found[:number]
        row = torch.cat([self.salience, self.key, self.classes, *earlier], 1)
        query = torch.cat([self.constant, *earlier], 1)
        in_row, in_query = self.orthonormal(latent, row.shape[1]), self.orthonormal(q_rank, query.shape[1])

        # Lengths after the norms.
        row_unit = latent**0.5 / math.hypot(SALIENCE, KEY, CLASS, FOUND * number**0.5)
        query_unit = q_rank**0.5 / math.hypot(CONSTANT, FOUND * number**0.5)
        constant, asked = CONSTANT * query_unit, FOUND * number**0.5 * query_unit
        nats = 1 / self.softmax_scale()

        code, count = slice(1, 1 + CODE), slice(1 + CODE, 1 + CODE + CANDIDATES)
        content = torch.cat([torch.arange(1, 1 + CODE), torch.arange(1 + CODE + CANDIDATES, row.shape[1])])
        # Orthogonal, so that no code is looked for more often than others.
        wanted = self.orthonormal(len(content), CODE * number).T * len(content) ** 0.5
        q_b, kv_b = torch.zeros(heads, nope + rope, q_rank), torch.zeros(heads, nope + value, latent)
        out = torch.zeros(self.hidden, heads, value)
        for head in range(heads):
            scores = torch.zeros(query.shape[1], row.shape[1])
            scores[0, 0] = nats * SALIENCE_NATS[min(number, 1)] / (constant * SALIENCE * row_unit)
            if number:
                strength = nats * CONTENT_NATS[min(number, 2)] / (asked * row_unit)
                scores[1:, content] = self.varied(wanted) * strength
                # Mostly by the token's own code, since results of earlier layers carry their errors.
                scores[1:, code] *= 0.9 / KEY
                scores[1:, count.stop :] *= 0.44 / (FOUND * number**0.5)
            frame = self.orthonormal(nope, row.shape[1])
            kv_b[head, :nope] = frame @ in_row.T
            q_b[head, :nope] = frame @ scores.T @ in_query.T
            q_b[head, nope:] = self.distance(head, number, rope)[:, None] * in_query[:, 0] * (nats / constant)
            if last:
                taken, mixed = in_row[:, count], torch.eye(CANDIDATES) * (2 * FOUND / (heads * CLASS * row_unit))
            else:
                taken = in_row[:, content]
                mixed = self.matrix(CODE, len(content), 1.5 * FOUND / (KEY * row_unit * heads**0.5))
            frame = self.orthonormal(value, taken.shape[1])
            kv_b[head, nope:] = frame @ taken.T
            out[:, head] = self.found[number] @ mixed @ frame.T

        rotated = torch.zeros(rope, self.hidden)
        rotated[0 : 2 * FREQUENCIES : 2] = self.constant.T * (self.length(number) / CONSTANT * self.hidden**-0.5)
        kv_a = in_row @ row.T + self.matrix(latent, self.hidden, NOISE)
        return {
            "self_attn.q_a_proj.weight": in_query @ query.T + self.matrix(q_rank, self.hidden, NOISE),
            "self_attn.q_a_layernorm.weight": torch.ones(q_rank),
            "self_attn.q_b_proj.weight": q_b.flatten(0, 1),
            "self_attn.kv_a_proj_with_mqa.weight": torch.cat([kv_a, rotated]),
            "self_attn.kv_a_layernorm.weight": torch.ones(latent),
            "self_attn.kv_b_proj.weight": kv_b.flatten(0, 1),
            "self_attn.o_proj.weight": out.flatten(1),
            **self.index(index_heads, index_width, in_query, wanted[:, :CODE], constant / max(asked, 1.0)),
        }

    def index(self, heads: int, width: int, in_query: Tensor, wanted: Tensor, ratio: float) -> dict[str, Tensor]:
        """The weights of the indexer, which looks for salient tokens with the codes that attention looks for."""
        half = width // 2
        keys = torch.cat([self.constant, self.salience, self.key], 1) * torch.tensor([1.5, 2.0] + [0.4] * CODE)
        in_key = self.orthonormal(half, keys.shape[1])
        wk, wq_b = self.matrix(width, self.hidden, 0.1), self.matrix(heads * width, in_query.shape[0], 0.1)
        wk[half:] += in_key @ keys.T
        for queries in wq_b.view(heads, width, -1):
            asks = torch.zeros(keys.shape[1], in_query.shape[1])
            asks[1, 0] = 1
            asks[2:, 1:] = self.varied(wanted).T * (0.1 * ratio)
            queries[half:] += in_key @ asks @ in_query.T
        weights = (1 + 0.3 * self.normal(heads, 1)) * self.constant.T + self.matrix(heads, self.hidden, 0.05)
        return {
            "self_attn.indexer.wq_b.weight": wq_b,
            "self_attn.indexer.wk.weight": wk,
            "self_attn.indexer.k_norm.weight": torch.ones(width),
            "self_attn.indexer.k_norm.bias": torch.zeros(width),
            "self_attn.indexer.weights_proj.weight": weights,
        }

    def varied(self, shared: Tensor) -> Tensor:
        """A copy of `shared` per head, with a random difference."""
        return 0.9 * shared + 0.44 * self.normal(*shared.shape)

    def distance(self, head: int, number: int, width: int) -> Tensor:
        """The rotary dimensions of a query that looks for keys at a random distance, small in every fourth head."""
        low, high = (1, 16) if head % 4 == 0 else (33, 2500)
        distance = torch.randint(low, high, (), generator=self.generator)
        angles = -distance * self.config["rope_theta"] ** (-torch.arange(FREQUENCIES) * 2 / width)
        pairs = torch.zeros(width // 2, 2)
        pairs[:FREQUENCIES] = torch.stack([angles.cos(), angles.sin()], 1) * ROTATION_NATS[min(number, 1)]
        return pairs.flatten()

    def softmax_scale(self) -> float:
        config = self.config
        scaling = config.get("rope_scaling") or {"factor": 1.0}
        growth = 0.1 * scaling.get("mscale_all_dim", 0.0) * math.log(scaling["factor"]) + 1
        return float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * growth**2)
