"""Makes random weights for a tiny DeepSeek-V4 whose tokens are decided by attention and seldom by rounding.

The same idea as in `vllm_model.py`: every matrix is random, but its few large directions fit together.

- An embedding is the sum of a constant, one of `CANDIDATES` classes, a code near that of its class, and filler. Some
  tokens are salient. Attention, the indexer and the compressors' gates all look for salient tokens, so that attention's
  weight is well inside the selection of the indexer and none at its border.
- A layer with a window only finds salient tokens at distances that differ between heads, and writes a mixture of their
  codes. Layers with compressed entries look for salient tokens and entries by their code; their queries are what
  earlier layers found for the current token. They write a mixture of codes for the next layer, and sum the classes of
  what they find. These sums are the logits of one candidate per class.
- A salient token of a group of four is in two entries, which carry different classes, so that the overlap matters.

Candidates are not salient, and a token's own embedding only affects what later tokens find in their window. One changed
token does not change all tokens after it.

`quantised` gives block-FP8 weights as vLLM reads them; `fill` writes everything into a constructed vLLM model.
"""

import math
import random
import re
from collections.abc import Mapping
from typing import Any

import torch
from random_weights import Drawn
from torch import Tensor

CANDIDATES, CODE, SALIENT_ONE_IN = 12, 8, 16
# Lengths of the terms of an embedding, of what a layer adds to it, and of the rotated part of a row.
CONSTANT, SALIENCE, KEY, CLASS, FILLER, FOUND, ROTATED = 10.0, 16.0, 20.0, 8.0, 14.0, 10.0, 12.0
# Terms of a score in nats, in layers with a window only and in the others: salience, one frequency, the standard
# deviation of content.
SALIENCE_NATS, ROTATION_NATS, CONTENT_NATS = (8.0, 9.0), (1.2, 0.35), (0.0, 6.0)
# By how much heads differ in what they look for, and the weights of the classes that the last layer and those before it
# find. Classes nearly tie where heads, or layers of equal weight, find different ones.
HEAD_SPREAD, LAST_VOTES, EARLIER_VOTES = 0.2, 3.0, 1.0
# By how much a compressor's gate prefers a salient token, and the standard deviation of its preference by code.
GATE_NATS = {4: (4.0, 0.5), 128: (7.0, 2.0)}
SINK, ENTRY_SALIENCE = 12.0, 2.6  # The second lets entries with other classes outweigh the window.
# The fastest frequencies, which YaRN leaves as they are.
FREQUENCIES = 10
KEY_GAIN = 2.0
LOGIT = 16.0
NOISE = 0.02
BLOCK = 128
E4M3 = torch.float8_e4m3fn


def tiny_config(heads: int, ratios: tuple[int, ...] = (0, 4, 128)) -> dict[str, Any]:
    """The config.json of a tiny model with a layer per ratio."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": 1024,
        "hidden_size": 1024,
        "num_hidden_layers": len(ratios),
        "compress_ratios": list(ratios),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 512,
        "o_groups": min(8, heads),
        "o_lora_rank": 256,
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 2,
        "hc_eps": 1e-6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "num_hash_layers": 0,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": None,
        "hidden_act": "silu",
        "expert_dtype": "fp8",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "max_position_embeddings": 32768,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }


class Weights(Drawn):
    """The tensors of a model in fp32, by vLLM's names without their prefix; expert tensors are stacked."""

    def __init__(self, config: Mapping[str, Any], seed: int = 20) -> None:
        super().__init__(seed)
        self.config = config
        self.hidden, self.ratios = config["hidden_size"], config["compress_ratios"]
        basis = self.orthonormal(self.hidden, self.hidden)
        widths = [1, 1, CODE, CANDIDATES, *[CODE] * len(self.ratios), CANDIDATES]
        parts = basis.split([*widths, self.hidden - sum(widths)], dim=1)
        self.constant, self.salience, self.key, self.classes, *self.found, self.votes, self.filler = parts
        self.order = torch.randperm(config["vocab_size"] - 2, generator=self.generator) + 2
        self.preferred = self.directions(1, CODE)[0]

    @property
    def salient(self) -> list[int]:
        """The salient tokens."""
        found: list[int] = self.order[: self.config["vocab_size"] // SALIENT_ONE_IN].tolist()
        return found

    @property
    def plain(self) -> list[int]:
        """All other tokens but the first two, which are special. The last ones are the candidates."""
        found: list[int] = self.order[self.config["vocab_size"] // SALIENT_ONE_IN :].tolist()
        return found

    def length(self, number: int) -> float:
        """Approximate norm of an ordinary token's hidden state before a layer."""
        return math.hypot(CONSTANT, KEY, CLASS, FILLER, FOUND * (2 * number) ** 0.5)

    def tensors(self) -> dict[str, Tensor]:
        vocabulary, layers = self.config["vocab_size"], len(self.ratios)
        head = torch.zeros(vocabulary, self.hidden)
        head[self.order[-CANDIDATES:]] = self.votes.T * (LOGIT * self.length(layers) / FOUND * self.hidden**-0.5)
        streams = self.config["hc_mult"]
        named = {
            "embed_tokens.weight": self.embeddings(),
            "norm.weight": torch.ones(self.hidden),
            "lm_head.weight": head,
            "hc_head_fn": self.matrix(streams, streams * self.hidden, 0.2),
            "hc_head_base": 0.3 * self.normal(streams),
            "hc_head_scale": torch.ones(1),
        }
        for number, ratio in enumerate(self.ratios):
            parts = self.attention(number, ratio) | self.experts() | self.connections()
            named |= {f"layers.{number}.{name}": tensor for name, tensor in parts.items()}
        return named

    def embeddings(self) -> Tensor:
        vocabulary = self.config["vocab_size"]
        salience, classes = torch.zeros(vocabulary, 1), torch.zeros(vocabulary, CANDIDATES)
        salience[self.salient] = 1 + 0.05 * self.normal(len(self.salient), 1)
        classes[self.order, torch.arange(len(self.order)) % CANDIDATES] = 1
        # Tokens of a class have similar codes, as similar keys have similar values in a trained model.
        centres = self.orthonormal(CANDIDATES, CODE)
        centres = torch.nn.functional.normalize(centres - centres.mean(0), dim=1)
        codes = torch.nn.functional.normalize(classes @ centres + 0.5 * self.directions(vocabulary, CODE), dim=1)
        embeddings: Tensor = (
            CONSTANT * self.constant.T
            + SALIENCE * salience @ self.salience.T
            + KEY * codes @ self.key.T
            + CLASS * classes @ self.classes.T
            + FILLER * self.directions(vocabulary, self.filler.shape[1]) @ self.filler.T
        )
        return embeddings

    def connections(self) -> dict[str, Tensor]:
        """Hyper-connections whose mixtures differ between streams and, a little, between tokens."""
        streams = self.config["hc_mult"]
        rows, named = (2 + streams) * streams, {}
        for part in ("attn", "ffn"):
            named[f"{part}_norm.weight"] = torch.ones(self.hidden)
            named[f"hc_{part}_fn"] = self.matrix(rows, streams * self.hidden, 0.2)
            named[f"hc_{part}_base"] = 0.3 * self.normal(rows)
            named[f"hc_{part}_scale"] = torch.ones(3)
        return named

    def experts(self) -> dict[str, Tensor]:
        """Experts that add little."""
        inner, count = self.config["moe_intermediate_size"], self.config["n_routed_experts"]
        return {
            "ffn.gate.weight": self.matrix(count, self.hidden),
            "ffn.gate.e_score_correction_bias": torch.zeros(count),
            "ffn.experts.w13_weight": torch.stack([self.matrix(2 * inner, self.hidden) for _ in range(count)]),
            "ffn.experts.w2_weight": torch.stack([self.matrix(self.hidden, inner, 0.05) for _ in range(count)]),
            "ffn.shared_experts.gate_up_proj.weight": self.matrix(2 * inner, self.hidden),
            "ffn.shared_experts.down_proj.weight": self.matrix(self.hidden, inner, 0.05),
        }

    def attention(self, number: int, ratio: int) -> dict[str, Tensor]:
        """The weights of attention, and of the compressor and indexer where the layer has them.

        A row holds salience, code, class and, rotated, a constant; the compressed query holds the constant and what
        earlier layers found, each in random directions.
        """
        config = self.config
        rank, width, heads = config["q_lora_rank"], config["head_dim"], config["num_attention_heads"]
        rope, groups, low = config["qk_rope_head_dim"], config["o_groups"], config["o_lora_rank"]
        kind, votes = min(number, 1), LAST_VOTES if number == len(self.ratios) - 1 else EARLIER_VOTES
        row = torch.cat([self.salience, self.key, self.classes], 1)
        query = torch.cat([self.constant, *self.found[:number]], 1)
        in_row, in_query = self.orthonormal(width - rope, row.shape[1] + 1), self.orthonormal(rank, query.shape[1])
        in_row, unseen = in_row[:, :-1], in_row[:, -1]
        code, count = slice(1, 1 + CODE), slice(1 + CODE, 1 + CODE + CANDIDATES)
        # A component of the row after its norm, per length before it.
        unit = KEY_GAIN * width**0.5 / math.hypot(SALIENCE, KEY, CLASS, ROTATED)
        constant, asked = CONSTANT, FOUND * max(number, 1) ** 0.5

        # Terms of a query of length sqrt(width), so that its norm changes little; a score is divided by as much.
        nats = width**0.5
        wanted = [self.orthonormal(CODE, CODE) for _ in range(max(number, 1))]
        q_b = torch.zeros(heads, width, rank)
        out_a, out_b = torch.zeros(groups, low, heads // groups, width), torch.zeros(config["hidden_size"], groups, low)
        frames = [self.orthonormal(low, CODE + CANDIDATES) for _ in range(groups)]
        for head in range(heads):
            terms = torch.zeros(width, query.shape[1])
            salience = nats * SALIENCE_NATS[kind] / (SALIENCE * unit)
            distances = self.distance(head, number, ratio, rope) * (nats / (ROTATED * unit * FREQUENCIES**-0.5))
            content = 0.0
            terms[: width - rope, 0] = in_row[:, 0] * (salience / constant)
            if number:
                content = nats * CONTENT_NATS[kind] * CODE**0.5 / (KEY * unit)
                for earlier in range(number):
                    columns = slice(1 + CODE * earlier, 1 + CODE * (earlier + 1))
                    terms[: width - rope, columns] = in_row[:, code] @ self.varied(wanted[earlier]) * (content / asked)
            terms[width - rope :, 0] = distances / constant
            rest = width - salience**2 - content**2 - float(distances.square().sum())
            terms[: width - rope, 0] += unseen * (max(rest, 1.0) ** 0.5 / constant)
            q_b[head] = terms @ in_query.T
            group, place = divmod(head, heads // groups)
            taken = torch.zeros(CODE + CANDIDATES, width)
            taken[:CODE, : width - rope] = self.matrix(CODE, CODE, 1.5 * FOUND / (KEY * unit * heads**0.5)) @ (
                in_row[:, code].T
            )
            if number:
                taken[CODE:, : width - rope] = in_row[:, count].T * (votes * FOUND / (heads * CLASS * unit))
            out_a[group, :, place] = frames[group] @ taken
            out_b[:, group] = torch.cat([self.found[number], self.votes], 1) @ frames[group].T

        rotated = torch.zeros(rope, self.hidden)
        rotated[0 : 2 * FREQUENCIES : 2] = self.constant.T * (ROTATED * FREQUENCIES**-0.5 / CONSTANT)
        wkv = torch.cat([in_row @ row.T, rotated]) + self.matrix(width, self.hidden, NOISE)
        wq_a = in_query @ query.T + self.matrix(rank, self.hidden, NOISE)
        named = {
            "attn.fused_wqa_wkv.weight": torch.cat([wq_a, wkv]),
            "attn.q_norm.weight": torch.ones(rank),
            "attn.kv_norm.weight": torch.full((width,), KEY_GAIN),
            "attn.wq_b.weight": q_b.flatten(0, 1),
            "attn.wo_a.weight": out_a.flatten(2).flatten(0, 1),
            "attn.wo_b.weight": out_b.flatten(1),
            "attn.attn_sink": SINK + self.normal(heads),
        }
        if ratio > 1:
            # Entries of 128 vote for other classes than the window, as do tokens of the group before in those of four.
            shifted = torch.cat([ENTRY_SALIENCE * self.salience, self.key, self.classes.roll(5, 1)], 1)
            parts = [row, shifted] if ratio == 4 else [shifted]
            values = torch.cat([torch.cat([in_row @ part.T, rotated]) for part in reversed(parts)])
            compressor = self.compressor(values, ratio) | {"norm.weight": torch.full((width,), KEY_GAIN)}
            named |= {f"attn.compressor.{name}": tensor for name, tensor in compressor.items()}
        if ratio == 4:
            named |= self.index(in_query, wanted[-1], ratio)
        return named

    def compressor(self, values: Tensor, ratio: int) -> dict[str, Tensor]:
        """A compressor of these values, whose gate prefers salient tokens, and among them some codes."""
        salient, by_code = GATE_NATS[ratio]
        # The norm before the projections turns a length into sqrt(hidden).
        unit = self.hidden**0.5 / self.length(1)
        code = self.key @ self.preferred * (by_code * CODE**0.5 / (KEY * unit))
        gate = self.salience[:, 0] * (salient / (SALIENCE * unit)) + code
        varied = 1 + 0.1 * self.normal(len(values), 1)
        return {
            "fused_wkv_wgate.weight": torch.cat([values, varied * gate + self.matrix(len(values), self.hidden, 0.1)]),
            "ape": 0.2 * self.normal(ratio, len(values)),
        }

    def index(self, in_query: Tensor, wanted: Tensor, ratio: int) -> dict[str, Tensor]:
        """The weights of the indexer, which looks for entries of salient tokens with the codes attention looks for."""
        heads, width, rope = (self.config[name] for name in ("index_n_heads", "index_head_dim", "qk_rope_head_dim"))
        nope = width - rope
        keys = torch.cat([self.constant, self.salience, self.key], 1) * torch.tensor([1.5, 2.0] + [0.4] * CODE)
        in_key = self.orthonormal(nope, keys.shape[1])
        values = self.matrix(2 * width, self.hidden, 0.1)
        for part in values.view(2, width, self.hidden):
            part[:nope] += in_key @ keys.T
        wq_b = self.matrix(heads * width, in_query.shape[0], 0.1)
        for queries in wq_b.view(heads, width, -1):
            asks = torch.zeros(keys.shape[1], in_query.shape[1])
            asks[1, 0] = 1
            asks[2:, -CODE:] = self.varied(wanted) * 0.1
            queries[:nope] += in_key @ asks @ in_query.T
        weights = (1 + 0.3 * self.normal(heads, 1)) * self.constant.T + self.matrix(heads, self.hidden, 0.05)
        compressor = self.compressor(values, ratio) | {"norm.weight": torch.ones(width)}
        return {
            "attn.indexer.wq_b.weight": wq_b,
            "attn.indexer.weights_proj.weight": weights,
            **{f"attn.indexer.compressor.{name}": tensor for name, tensor in compressor.items()},
        }

    def varied(self, shared: Tensor) -> Tensor:
        """A copy of `shared` per head, with a random difference."""
        other = self.normal(*shared.shape) * shared.shape[1] ** -0.5
        copy: Tensor = (1 - HEAD_SPREAD**2) ** 0.5 * shared + HEAD_SPREAD * other
        return copy

    def distance(self, head: int, number: int, ratio: int, width: int) -> Tensor:
        """The rotary dimensions of a query that looks for keys at a random distance, small in every fourth head."""
        near = head % 4 == 0 or ratio <= 1
        distance = torch.randint(1, 100 if near else 2500, (), generator=self.generator)
        theta = self.config["compress_rope_theta" if ratio > 1 else "rope_theta"]
        angles = -distance * theta ** (-torch.arange(FREQUENCIES) * 2 / width)
        pairs = torch.zeros(width // 2, 2)
        pairs[:FREQUENCIES] = torch.stack([angles.cos(), angles.sin()], 1) * ROTATION_NATS[min(number, 1)]
        return pairs.flatten()


def prompt(weights: Weights, length: int, choice: random.Random) -> list[int]:
    """Random tokens, of which few enough are salient that an indexer can select all of their entries.

    The last ones are salient more often, so that the window has some at any length.
    """
    salient, plain = weights.salient, weights.plain[:-CANDIDATES]
    rare = min(1 / SALIENT_ONE_IN, 140 / length)
    shares = [1 / SALIENT_ONE_IN if place >= length - 192 else rare for place in range(length)]
    return [choice.choice(salient if choice.random() < share else plain) for share in shares]


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values and the scales of their blocks of 128 by 128, which are powers of two."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape[-2:])
    padded = torch.zeros(*weight.shape[:-2], rows * BLOCK, columns * BLOCK, device=weight.device)
    padded[..., : weight.shape[-2], : weight.shape[-1]] = weight
    blocks = padded.unflatten(-2, (rows, BLOCK)).unflatten(-1, (columns, BLOCK))
    most = blocks.abs().amax((-3, -1)).clamp(min=2.0**-40)
    scales = torch.exp2(torch.ceil(torch.log2(most / 448)))
    values = (blocks / scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2, -1)
    return values[..., : weight.shape[-2], : weight.shape[-1]].to(E4M3), scales


def restored(values: Tensor, scales: Tensor) -> Tensor:
    """What block-FP8 values stand for."""
    wide = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return values.float() * wide[..., : values.shape[-2], : values.shape[-1]]


def fill(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write the weights into a constructed vLLM model, quantised where its parameters are."""
    parameters = dict(model.named_parameters())
    missing = [name for name in parameters if plain_name(name).removesuffix("_scale_inv") not in tensors]
    if missing:
        raise KeyError(f"no weights for {', '.join(missing)}")
    for name, parameter in parameters.items():
        known = plain_name(name)
        source = known.removesuffix("_scale_inv")
        tensor, values = tensors[source].to(parameter.device), parameter.data
        if known.endswith("attn_sink"):
            # vLLM's own class may have more rows than heads; those stay without a sink.
            values.fill_(-math.inf)
            values[: len(tensor)] = tensor
            continue
        if known != source:
            tensor = quantised(tensor)[1]
        elif parameter.dtype == E4M3:
            tensor = quantised(tensor)[0]
        if tensor.shape != values.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, its weights {tuple(tensor.shape)}")
        values.copy_(tensor)


def plain_name(name: str) -> str:
    """The name in `Weights.tensors` of a parameter of vLLM, which may put modules between experts and their weights."""
    name = name.removeprefix("model.")
    name = re.sub(r"\.ffn\..*\b(shared_experts|gate)\.", r".ffn.\1.", name)
    return re.sub(r"\.experts\.(?:.*\.)?(w13|w2)_weight", r".experts.\1_weight", name)
