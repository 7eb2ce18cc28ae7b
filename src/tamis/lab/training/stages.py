"""The three stages of the training: dense, the indexers' warm-up, sparse.

The dense stage is transformers' own attention. The other two run through `tamis.integrations.transformers.attach` with
`train=True`, as any model would.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tamis.integrations.transformers import attach, detach, index_losses, indexer_parameters
from tamis.lab.training import task
from tamis.lab.training.measure import attention_recall
from tamis.lab.training.model import V4, V32, Demo, demo_of, indexers, new_model

StageName = Literal["dense", "warmup", "sparse"]
SPAN = V4.sizes["compress_rates"]["compressed_sparse_attention"]
"""Tokens of an entry of V4."""
LONGEST = 8192
"""The distances that the dense stage teaches; its prompts are shorter."""


class Part(NamedTuple):
    """Some steps of one size."""

    tokens: int
    prompts: int
    steps: int


@dataclass(frozen=True)
class Stage:
    """A stage: its steps, the highest learning rate, and after how many steps recall is measured."""

    name: StageName
    rate: float
    parts: tuple[Part, ...]
    measured: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return sum(part.steps for part in self.parts)


FULL = (
    Stage("dense", 3e-3, (Part(32, 32, 150), Part(128, 8, 100), Part(512, 2, 100), Part(1024, 1, 60)), 410),
    Stage("warmup", 3e-3, (Part(128, 8, 60), Part(512, 2, 60)), 10),
    Stage("sparse", 5e-4, (Part(1024, 1, 20), Part(2048, 1, 20)), 10),
)
# Compressed entries stand at their own positions, so that distances are learned from prompts of their length.
FULL_V4 = (
    Stage("dense", 3e-3, (Part(64, 16, 200), Part(256, 4, 150), Part(1024, 1, 60), Part(4096, 1, 8)), 418),
    Stage("warmup", 3e-3, (Part(256, 4, 100), Part(1024, 1, 80), Part(2048, 1, 20)), 10),
    Stage("sparse", 5e-4, (Part(1024, 1, 30), Part(2048, 1, 20), Part(4096, 1, 10)), 10),
)
QUICK = (
    Stage("dense", 3e-3, (Part(24, 8, 12),), 12),
    Stage("warmup", 3e-3, (Part(96, 1, 6),), 6),
    Stage("sparse", 5e-4, (Part(96, 1, 4),), 4),
)
"""Too short to learn the task; it shows that every stage runs."""
QUICK_V4 = (
    Stage("dense", 3e-3, (Part(64, 4, 12),), 12),
    Stage("warmup", 3e-3, (Part(96, 1, 6),), 6),
    Stage("sparse", 5e-4, (Part(96, 1, 4),), 4),
)


class Point(NamedTuple):
    """What a step measured. `None` is what its stage does not have, or did not measure at this step."""

    stage: StageName
    step: int
    """Counted from 1 over all stages."""
    tokens: int
    """The length of the step's prompts."""
    loss: float
    """Cross-entropy of the answers, in nats."""
    accuracy: float
    """The share of right answers in the step's own prompts."""
    kl: float | None = None
    """The divergence between attention and indexer, mean over tokens and layers, in nats."""
    recall: float | None = None
    """The share of dense attention's weight that is selected at eight times top-k, in the worst layer."""


Report = Callable[[int, int], None]


def stages_of(demo: Demo, *, quick: bool = False) -> tuple[Stage, ...]:
    """The stages of a model, or those that are too short to learn the task."""
    full, short = (FULL_V4, QUICK_V4) if demo is V4 else (FULL, QUICK)
    return short if quick else full


def train(
    seed: int = 0,
    stages: tuple[Stage, ...] | None = None,
    report: Report = lambda done, total: None,
    demo: Demo = V32,
) -> tuple[Any, list[Point]]:
    """Train a new model, and return it with what every step measured.

    The same seed gives the same model on the same machine with the same number of threads.
    """
    stages = stages_of(demo) if stages is None else stages
    generator = torch.Generator("cpu").manual_seed(seed)
    model = new_model(generator, demo)
    points: list[Point] = []
    total = sum(stage.steps for stage in stages)
    for stage in stages:
        with _prepared(model, stage.name) as parameters:
            points += _run(model, stage, parameters, generator, len(points), lambda done: report(done, total))
    return model.eval(), points


def _run(
    model: Any,
    stage: Stage,
    parameters: list[nn.Parameter],
    generator: torch.Generator,
    before: int,
    report: Callable[[int], None],
) -> list[Point]:
    optimizer = torch.optim.AdamW(parameters, lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01)
    points: list[Point] = []
    for part in stage.parts:
        for _ in range(part.steps):
            done = len(points)
            # A short rise, then a straight fall.
            rate = stage.rate * min(1.0, (done + 1) / 20) * max(0.05, 1 - done / stage.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            model.train()
            batch = task.make_batch(generator, part.prompts, part.tokens, room=demo_of(model).room)
            run = _dense_step if stage.name == "dense" else _attached_step
            point = run(model, stage.name, batch, generator)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            point = point._replace(step=before + done + 1)
            if (done + 1) % stage.measured == 0:
                point = point._replace(recall=_recall(model, stage.name))
            points.append(point)
            report(point.step)
    return points


@contextmanager
def _prepared(model: Any, stage: StageName) -> Iterator[list[nn.Parameter]]:
    """Within it the model is ready for a stage, whose parameters it gives."""
    own = set(indexer_parameters(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stage == "sparse" or (name in own) == (stage == "warmup"))
    _begin(model, stage)
    try:
        yield [parameter for parameter in model.parameters() if parameter.requires_grad]
    finally:
        _end(model, stage)


def _begin(model: Any, stage: StageName) -> None:
    """Give the model the attention of a stage."""
    if stage != "dense":
        attach(model, train=True, indexer=stage, cache="fp8")
        return
    for indexer in indexers(model):
        indexer.forward = _all_entries if demo_of(model) is V4 else _everything


def _end(model: Any, stage: StageName) -> None:
    """Give the model its own attention back."""
    if stage != "dense":
        detach(model)
        return
    for indexer in indexers(model):
        del indexer.forward


def _everything(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Takes the place of an indexer where attention is dense: selects all positions."""
    rows, columns, _width = hidden_states.shape
    return torch.arange(columns, dtype=torch.int32, device=hidden_states.device).expand(rows, columns, columns)


def _all_entries(hidden_states: Tensor, _residual: Tensor, position_ids: Tensor, *_: Any) -> Tensor:
    """The same for a layer that compresses: selects all entries that a token may see."""
    rows, columns, _width = hidden_states.shape
    entries = torch.arange(columns // SPAN, dtype=torch.int64, device=hidden_states.device)
    visible = ((position_ids + 1) // SPAN).unsqueeze(-1)
    return torch.where(entries < visible, entries, -1).expand(rows, columns, -1)


def _attached_step(model: Any, stage: StageName, batch: task.Batch, _: torch.Generator) -> Point:
    """Gradients of a step through tamis. The returned loss contains that of the indexers."""
    out = model(input_ids=batch.tokens, labels=batch.labels, use_cache=False)
    out.loss.backward()
    divergences = list(index_losses(model).values())
    loss = out.loss.item() - sum(divergences)
    right = batch.right(out.logits).float().mean().item()
    return Point(stage, 0, batch.tokens.shape[1], loss, right, kl=sum(divergences) / len(divergences))


def _dense_step(model: Any, stage: StageName, batch: task.Batch, generator: torch.Generator) -> Point:
    """Gradients of a dense step, with a second loss that tells attention where to look."""
    if demo_of(model) is V4:
        out = model(input_ids=batch.tokens, labels=batch.labels, output_attentions=True, use_cache=False)
        (out.loss + _guidance_to_entries(out.attentions, batch)).backward()
        right = batch.right(out.logits).float().mean().item()
        return Point(stage, 0, batch.tokens.shape[1], out.loss.item(), right)
    positions = _spread_positions(batch, generator)
    out = model(
        input_ids=batch.tokens,
        labels=batch.labels,
        position_ids=positions,
        # Without a mask, transformers takes a jump of positions for the beginning of another sequence.
        attention_mask=torch.ones_like(batch.tokens),
        output_attentions=True,
        use_cache=False,
    )
    (out.loss + _guidance(out.attentions, batch, positions)).backward()
    right = batch.right(out.logits).float().mean().item()
    return Point(stage, 0, batch.tokens.shape[1], out.loss.item(), right)


def _spread_positions(batch: task.Batch, generator: torch.Generator) -> Tensor:
    """int64 [B, S]: positions with four jumps, so that short prompts teach distances up to `LONGEST`.

    No jump separates a key from its value.
    """
    rows, columns = batch.tokens.shape
    jumps = torch.zeros(rows, columns, dtype=torch.int64, device="cpu")
    places = task.draw(generator, 1, columns, (rows, 4))
    jumps.scatter_(1, places, task.draw(generator, 1, (LONGEST - columns) // 4, (rows, 4)))
    value = (batch.tokens >= task.FIRST_VALUE) & (batch.tokens < task.FIRST_WORD)
    return torch.arange(columns, dtype=torch.int64, device="cpu") + jumps.masked_fill(value, 0).cumsum(1)


def _guidance(attentions: tuple[Tensor, Tensor], batch: task.Batch, positions: Tensor) -> Tensor:
    """Minus the logarithm of attention's weight on the token that each query should look at, mean over heads.

    In the first layer that is the token before; in the second, the value that a key asks for, and `<s>` where there is
    nothing to look for. Models find these circuits by themselves, but it takes them thousands of steps. It also leaves
    no query whose attention is spread evenly, of which no selection can hold much.
    """
    first, second = attentions
    rows, heads, columns, _ = first.shape
    near = torch.arange(columns, dtype=torch.int64, device="cpu").sub(1).clamp_min(0).expand(rows, columns)
    # The token before a jump is not at a distance of one.
    follows = positions.diff(dim=1, prepend=positions[:, :1] - 1) == 1
    far = torch.zeros_like(near).scatter(1, batch.asked, batch.stated)
    logs = [
        attention.gather(3, target[:, None, :, None].expand(rows, heads, columns, 1))
        .clamp_min(1e-30)
        .log()[..., 0]
        .mean(1)
        for attention, target in ((first, near), (second, far))
    ]
    # Questions are few among the tokens, so they count twice.
    return -(logs[0][follows].mean() + logs[1].mean() + logs[1].gather(1, batch.asked).mean())


def _guidance_to_entries(attentions: tuple[Tensor, Tensor], batch: task.Batch) -> Tensor:
    """The same for V4, whose second layer should look at the entry of the span with the value, or at the first one."""
    first, second = attentions
    rows, columns = batch.tokens.shape
    near = torch.arange(columns, dtype=torch.int64, device="cpu").sub(1).clamp_min(0)
    logs = first[:, :, torch.arange(columns, dtype=torch.int64, device="cpu"), near].clamp_min(1e-30).log()
    entries = second[..., columns:]  # the first columns are the window
    wanted = torch.zeros(rows, columns, dtype=torch.int64, device="cpu").scatter(1, batch.asked, batch.stated // SPAN)
    # An entry can be seen once its span is complete.
    seen = wanted < (torch.arange(columns, dtype=torch.int64, device="cpu") + 1) // SPAN
    at = wanted[:, None, :, None].expand(rows, entries.shape[1], columns, 1).clamp_max(entries.shape[3] - 1)
    far = entries.gather(3, at).clamp_min(1e-30).log()[..., 0].mean(1)
    asked = far.gather(1, batch.asked)[seen.gather(1, batch.asked)]
    # A short prompt may ask for nothing that can be seen.
    return -(logs.mean() + far[seen].mean() + asked.sum() / max(1, asked.numel()))


def _recall(model: Any, stage: StageName) -> float:
    """The worst layer's recall; the model is served in between."""
    _end(model, stage)
    try:
        return min(attention_recall(model, tokens=demo_of(model).recall_tokens, compared=128))
    finally:
        _begin(model, stage)
