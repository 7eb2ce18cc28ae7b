"""Runs tamis beside vLLM's own DeepSeek-V4 attention, on the same queries and caches, and measures both.

Differences of all tokens are summed on the device, inside a captured graph as well as outside one. Exact outputs come
from tamis' float64 reference over the same selections: for some tokens of every call outside a graph; within a graph,
where nothing can be computed aside, queries, selections and outputs are copied, and `after_replay` computes the exact
outputs of the last step from the copies.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RATIOS, PHASES = (1, 4, 128), ("decode", "prefill")
AT_ONCE = 512
"""How many tokens are widened at once; all of a prefill would take gigabytes."""
KINDS = [(ratio, phase) for ratio in RATIOS for phase in PHASES]


@dataclass(frozen=True)
class Kept:
    """One call of attention within a graph, as copies that each replay writes again."""

    kind: tuple[int, str]
    q: Tensor
    selections: list[Any]
    options: dict[str, Any]
    own: Tensor
    other: Tensor


class Check:
    """Both attentions of an engine whose layers are vLLM's own."""

    def __init__(self, rows: int = 16) -> None:
        self.rows = rows
        self.calls = dict.fromkeys(KINDS, 0)
        self.exact: dict[tuple[int, str], list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        self.kept: dict[tuple[str, int], Kept] = {}
        self.sums: dict[tuple[int, str], Tensor] = {}

    def allocate(self, device: torch.device) -> None:
        """Make the sums, before any graph is captured: squared difference, squared size, worst token, calls."""
        self.sums = {kind: torch.zeros(4, dtype=torch.float64, device=device) for kind in KINDS}

    def reset(self) -> None:
        """Forget what warm-ups have measured."""
        for sums in self.sums.values():
            sums.zero_()
        self.calls = dict.fromkeys(KINDS, 0)
        self.exact = {kind: [] for kind in KINDS}

    def install(self) -> None:
        """Run tamis after each call of vLLM's own attention."""
        from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention as Layer

        from tamis.integrations.vllm import v4_forward

        names = vars(v4_forward)
        self.attend, names["attend"] = names["attend"], self.attend_beside
        for phase in PHASES:
            usual, ours = getattr(Layer, f"_forward_{phase}"), getattr(v4_forward, f"forward_{phase}")
            setattr(Layer, f"_forward_{phase}", self.both(phase, usual, ours))

    def both(self, phase: str, usual: Any, ours: Any) -> Any:
        def forward(layer: Any, **options: Any) -> None:
            usual(layer, **options)
            self.layer, self.kind, self.own = layer.prefix, (layer.compress_ratio, phase), options["output"]
            ours(layer, **options | {"output": torch.zeros_like(options["output"])})

        return forward

    def attend_beside(self, q: Tensor, selections: list[Any], *, out: Tensor, **options: Any) -> None:
        self.attend(q, selections, out=out, **options)
        own = self.own[: len(q), : q.shape[1]]
        for start in range(0, len(q), AT_ONCE):
            self.add(own[start : start + AT_ONCE].float(), out[start : start + AT_ONCE].float())
        self.sums[self.kind][3] += 1
        self.calls[self.kind] += 1
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            copies = [copied(selection) for selection in selections]
            options = options | {"sink": options["sink"].clone()}
            kept = Kept(self.kind, q.clone(), copies, options, own.clone(), out.clone())
            self.kept[self.layer, len(q)] = kept
        else:
            self.compare_exactly(Kept(self.kind, q, selections, options, own, out))

    def add(self, own: Tensor, other: Tensor) -> None:
        differences, sizes = (own - other).square().sum((1, 2)), own.square().sum((1, 2))
        worst = torch.where(sizes > 0, differences / sizes, differences).max()
        sums = self.sums[self.kind]
        sums[0] += differences.sum()
        sums[1] += sizes.sum()
        sums[2].copy_(torch.maximum(sums[2], worst.double()))

    def after_replay(self, tokens: int) -> None:
        """Compare the last step of a graph of this many tokens with exact outputs."""
        torch.cuda.synchronize()
        for (_, count), kept in self.kept.items():
            if count == tokens:
                self.compare_exactly(kept)

    def compare_exactly(self, call: Kept) -> None:
        count = len(call.q)
        rows = torch.linspace(0, count - 1, min(self.rows, count), device=call.q.device).long()
        some = [rows_of(selection, rows) for selection in call.selections]
        options = call.options | {"backend": "reference"}
        exact = self.attend(call.q[rows].double(), some, **options).out
        size = exact.square().sum()
        errors = [((found[rows].double() - exact).square().sum() / size).sqrt() for found in (call.own, call.other)]
        own, other = torch.stack(errors).tolist()
        self.exact[call.kind].append((own, other))

    def report(self) -> list[dict[str, Any]]:
        """One row per kind of layer and phase that was met."""
        found = []
        for kind in KINDS:
            difference, size, worst, calls = self.sums[kind].tolist()
            if calls == 0:
                continue
            own, other = zip(*self.exact[kind], strict=True) if self.exact[kind] else ((), ())
            found.append(
                {
                    "ratio": kind[0] if kind[0] > 1 else 0,
                    "phase": kind[1],
                    "calls": int(calls),
                    # A replayed graph calls attention on the device but not from Python.
                    "calls_from_python": self.calls[kind],
                    "own_to_tamis": (difference / size) ** 0.5,
                    "own_to_tamis_worst_token": worst**0.5,
                    "exact_calls": len(own),
                    "own_to_exact": max(own, default=None),
                    "tamis_to_exact": max(other, default=None),
                }
            )
        return found


class Exact(Check):
    """tamis alone, in an engine whose layers are its own: only exact outputs are compared with."""

    def install(self) -> None:
        """Compare each call of tamis' attention."""
        from tamis.integrations.vllm import v4_forward

        names = vars(v4_forward)
        self.attend, names["attend"] = names["attend"], self.attend_beside
        for phase in PHASES:
            names[f"forward_{phase}"] = self.named(phase, names[f"forward_{phase}"])

    def named(self, phase: str, forward: Any) -> Any:
        def call(layer: Any, *arguments: Any) -> None:
            self.layer, self.kind = layer.prefix, (layer.compress_ratio, phase)
            forward(layer, *arguments)

        return call

    def attend_beside(self, q: Tensor, selections: list[Any], *, out: Tensor, **options: Any) -> None:
        self.own = out
        super().attend_beside(q, selections, out=out, **options)


def rows_of(selection: Any, rows: Tensor) -> Any:
    """The selection of some query tokens."""
    fields = {name: getattr(selection, name) for name in ("slots", "lengths", "request_ids")}
    return dataclasses.replace(selection, **{name: value[rows] for name, value in fields.items() if value is not None})


def copied(selection: Any) -> Any:
    """A selection whose tensors are copies; the cache stays where it is."""
    fields = {name: getattr(selection, name) for name in ("slots", "lengths", "request_ids", "block_table")}
    return dataclasses.replace(selection, **{name: v.clone() for name, v in fields.items() if v is not None})
