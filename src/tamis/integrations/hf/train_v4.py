"""The attention of DeepSeek-V4 in training: the model's own modules around `tamis.train`.

Windows, spans and positions count each request's own tokens. So packed sequences give what they give alone, and padding
is not compressed, as it is in an untouched model.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tamis.integrations.hf.layers import Step
from tamis.integrations.hf.train_selection import check_pass, index_rows, rotated, select, teach
from tamis.integrations.hf.train_step import IndexTensors, TrainStep
from tamis.integrations.hf.v4_layers import v4_forward
from tamis.model.recipe import IndexRecipe
from tamis.train import Entries, Rows, attend_rows, compress_rows, index_target, warmup_loss

SLOTS = 2**24
"""How many entries are listed at once in the warm-up, in which tokens attend to all that are visible."""


def v4_train_forward(
    self: Any,
    hidden_states: Tensor,
    *,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    attention_mask: Step | TrainStep,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replaces `DeepseekV4Attention.forward` of a model that is attached for training."""
    if isinstance(attention_mask, Step):
        return v4_forward(self, hidden_states, attention_mask=attention_mask)
    step = attention_mask
    check_pass(step)
    hidden, spec = hidden_states.flatten(0, 1), step.family.specs[self.layer_idx]
    halves = (half.expand(*hidden_states.shape[:2], -1) for half in position_embeddings[self.rope_layer_type])
    angles = torch.cat(tuple(halves), dim=-1).flatten(0, 1)
    recipe = IndexRecipe(angles.shape[-1], interleaved=True, rope_first=False)
    residual = self.q_a_norm(self.q_a_proj(hidden))
    q = self.q_b_norm(self.q_b_proj(residual).unflatten(1, (spec.heads, spec.head_dim)))
    q = rotated(q, angles, recipe)
    kv = rotated(self.kv_norm(self.kv_proj(hidden)), angles, recipe).to(q.dtype)
    out = _Attention(self, step, q, kv, recipe).attend(hidden, residual, angles)
    out = rotated(out, angles, recipe, inverse=True)
    grouped = self.o_a_proj(out.flatten(1).unflatten(1, (self.config.o_groups, -1))).flatten(1)
    return self.o_b_proj(grouped).view(hidden_states.shape), None


class _Attention:
    """One layer's attention over window and entries."""

    def __init__(self, module: Any, step: TrainStep, q: Tensor, kv: Tensor, recipe: IndexRecipe) -> None:
        self.module, self.step, self.q, self.recipe = module, step, q, recipe
        self.spec = step.family.specs[module.layer_idx]
        self.sink = module.sinks if q.dtype == torch.float64 else module.sinks.float()
        self.window = Rows(kv, step.window_slots(self.spec.window, q.device))

    def attend(self, hidden: Tensor, residual: Tensor, angles: Tensor) -> Tensor:
        """The output [T, H, D], before it is rotated back."""
        compressor, layer = self.module.compressor, self.module.layer_idx
        if compressor is None:
            return self._attend([self.window])[0]
        entries = self.step.entries(self.spec.compress, self.q.device)
        if entries.count == 0:
            return self._attend([self.window])[0]
        rows, turn = self._compressed(compressor, hidden, entries)
        rows = rotated(rows, turn, self.recipe).to(self.q.dtype)
        if self.spec.kind == "plain":
            return self._attend(
                [self.window, Rows(rows, self.step.remembered(("visible", self.spec.compress), entries.slots))]
            )[0]
        index = None
        if self.step.replayed is None or self.step.teaches(layer):
            index = self._index_tensors(compressor.indexer, hidden, residual, angles, entries)
        if index is not None and self.step.options.indexer == "warmup":
            return self._attend_to_all(rows, index, entries)
        slots = select(self.step, layer, index, entries.starts, entries.ends, entries.longest)
        selections = [self.window, Rows(rows, slots)]
        out, lse = self._attend(selections)
        if self.step.teaches(layer):
            settings = {"scale": self.spec.scale, "backend": self.step.options.backend}
            target = index_target(self.q, selections, lse, sink=self.sink, **settings)
            assert index is not None
            teach(self.step, layer, index, slots, target, out)
        return out

    def _attend_to_all(self, rows: Tensor, index: IndexTensors, entries: Entries) -> Tensor:
        """Attention over the window and all visible entries, in chunks, and the indexer's loss over the entries."""
        step, layer = self.step, self.module.layer_idx
        size = max(1, SLOTS // max(1, entries.longest))
        outputs = []
        for start in range(0, len(self.q), size):
            some = slice(start, start + size)
            most = min(entries.longest, some.stop // self.spec.compress)  # rows before a token are its request's or not
            seen = replace(entries, longest=most, starts=entries.starts[some], ends=entries.ends[some])
            selections = [Rows(self.window.rows, self.window.slots[some]), Rows(rows, seen.slots())]
            outputs.append(self._attend(selections, some))
        out, lse = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        if step.teaches(layer):
            loss = warmup_loss(
                self.q,
                rows,
                torch.logaddexp(lse, self.sink.to(lse.dtype)),
                *index,
                entries.starts,
                entries.ends,
                scale=self.spec.scale,
                token_weights=step.weights_of_tokens(layer, index.q),
                backend=step.options.backend,
            )
            step.add_loss(layer, loss, out)
        return out

    def _attend(self, selections: list[Rows], tokens: slice = slice(None)) -> tuple[Tensor, Tensor]:
        found = attend_rows(
            self.q[tokens],
            selections,
            scale=self.spec.scale,
            value_dim=self.spec.value_dim,
            sink=self.sink,
            deterministic=self.step.options.deterministic,
            backend=self.step.options.backend,
        )
        return found.out.to(self.q.dtype), found.lse

    def _index_tensors(
        self, indexer: Any, hidden: Tensor, residual: Tensor, angles: Tensor, entries: Entries
    ) -> IndexTensors:
        """The indexer's tensors. Their inputs are detached, so that the main model learns from the language loss."""
        with nullcontext() if self.step.teaches(self.module.layer_idx) else torch.no_grad():
            hidden, residual = hidden.detach(), residual.detach()
            q = indexer.q_b_proj(residual).unflatten(1, (indexer.num_heads, indexer.head_dim))
            q = rotated(q, angles, self.recipe)  # V4's layers quantise keys only
            keys, turn = self._compressed(indexer, hidden, entries)
            keys = index_rows(keys, turn, self.recipe, self.step).to(q.dtype)
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            scorer = indexer.scorer
            weights = scorer.weights_proj(hidden).to(wide) * (scorer.weights_scaling * scorer.softmax_scale)
        return IndexTensors(q, keys, weights)

    def _compressed(self, compressor: Any, hidden: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
        """The entries [count, D] of a compressor, normed, and the angles [count, R] to rotate them by."""
        found = compress_rows(
            compressor.kv_proj(hidden),
            compressor.gate_proj(hidden),
            compressor.position_bias,
            entries,
            overlapping=self.spec.kind == "overlapping",
            backend=self.step.options.backend,
        )
        found = compressor.kv_norm(found)
        at = entries.positions.unsqueeze(0)
        halves = compressor.rotary_emb(found, position_ids=at, layer_type=compressor.rope_layer_type)
        return found, torch.cat(halves, dim=-1)[0]
