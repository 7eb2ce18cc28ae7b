"""The tables of `docs/parallelism.md`: what a rank computes under tensor and data parallelism, from measured rows.

Times of the attention kernel come from `tamis bench decode`, of the indexer and of prompts from `tamis bench door`,
`prefill` and `select`. Bytes of weights and caches are computed from the shapes of DeepSeek-V3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tamis.cache.layout import named
from tamis.lab.bench.roofline import MEASURED
from tamis.step.batch import parse_shape
from tools.docs import doors
from tools.docs.markdown import table
from tools.docs.results import read

GPUS, HEADS, LAYERS = 8, 128, 61
LAYOUT, KEYS, TOPK = "v32-fp8", "index-fp8", "2048"
HIDDEN, QUERY_RANK, LATENT, ROPE, NOPE, VALUE, INDEX_HEADS, INDEX_WIDTH = 7168, 1536, 512, 64, 128, 128, 64, 128
"""The shapes of DeepSeek-V3.2, from its config."""
CONTEXT = 16384
REQUESTS = (8, 64, 128)
"""Numbers of requests on all GPUs for which every time is measured or lies between measured ones."""
PROMPT, PROMPT_CONTEXT = 4096, 8192
FREE = 40e9
"""Bytes for caches on each GPU in the example, where every GPU has a part of the heads."""


@dataclass(frozen=True)
class Split:
    """Some tensor-parallel ranks, and as many such groups as fill the GPUs."""

    tensor: int

    @property
    def data(self) -> int:
        """How many groups divide the requests."""
        return GPUS // self.tensor

    @property
    def heads(self) -> int:
        """The heads of each GPU."""
        return HEADS // self.tensor

    @property
    def words(self) -> str:
        """The name of the split."""
        parts = [f"TP {self.tensor}"] * (self.tensor > 1) + [f"DP {self.data}"] * (self.data > 1)
        return " x ".join(parts).replace(" ", "\N{NO-BREAK SPACE}")

    @property
    def weights(self) -> int:
        """The bytes of a layer's attention and indexer weights on each GPU, one byte each."""
        by_heads = self.heads * (QUERY_RANK * (NOPE + ROPE) + LATENT * (NOPE + VALUE) + VALUE * HIDDEN)
        on_all = HIDDEN * (QUERY_RANK + LATENT + ROPE)
        indexer = QUERY_RANK * INDEX_HEADS * INDEX_WIDTH + HIDDEN * (INDEX_WIDTH + INDEX_HEADS)
        return by_heads + on_all + indexer

    @property
    def read_us(self) -> float:
        """How long it takes to read these weights once, at the copy bandwidth that was measured."""
        return 1e6 * self.weights / MEASURED["H200"][0]


SPLITS = [Split(8), Split(4), Split(2), Split(1)]


@dataclass(frozen=True)
class Times:
    """Measured times in microseconds, by number of requests."""

    by_requests: dict[int, float]

    def at(self, requests: float) -> tuple[float, bool]:
        """The time for some requests, and whether it was measured; if not, it lies between two that were."""
        if requests in self.by_requests:
            return self.by_requests[int(requests)], True
        low = max(count for count in self.by_requests if count < requests)
        high = min(count for count in self.by_requests if count > requests)
        share = (requests - low) / (high - low)
        return (1 - share) * self.by_requests[low] + share * self.by_requests[high], False


def attention(heads: int) -> Times:
    """The attention kernel over FP8 rows, one new token per request."""
    rows = [
        row
        for row in sorted(read("h200_decode"), key=lambda row: row["time"])
        if (row["stage"], row["backend"], row["layout"], row["topk"], row["heads"])
        == ("attend", "hopper", LAYOUT, TOPK, str(heads))
    ]
    return Times({len(new): float(row["median_us"]) for row in rows for new in _decodes(row["shape"])})


def indexer() -> Times:
    """Scores and top-k in one call, one new token per request."""
    rows = [row for row in doors.read() if (row["door"], row["layout"]) == ("index_topk", KEYS)]
    return Times({len(new): float(row["graph_us"]) for row in rows for new in _decodes(row["shape"])})


def by_heads() -> str:
    """Attention by heads and requests, and the indexer, which no split of heads makes shorter."""
    heads = (8, 16, 32, 64, 128)
    times = {f"attention, {count} heads": attention(count) for count in heads} | {"indexer, 64 index heads": indexer()}
    counts = sorted(set.union(*(set(some.by_requests) for some in times.values())) & {1, 2, 8, 32, 64, 128, 512})
    lines = [
        (words, *(f"{some.by_requests[count]:.1f}" if count in some.by_requests else "-" for count in counts))
        for words, some in times.items()
    ]
    return table(("us per layer, by requests on a GPU", *map(str, counts)), lines, "l" + "r" * len(counts))


def heads_per_gpu() -> str:
    """How many heads a GPU has, for models with 128 and with 64 heads."""
    degrees = (8, 4, 2, 1)
    lines = [
        (f"{heads} heads ({models})", *(str(heads // degree) for degree in degrees))
        for heads, models in ((128, "DeepSeek-V3.2, V4-Pro"), (64, "GLM-5.x, V4-Flash"))
    ]
    header = ("heads per GPU", *(f"TP {degree}" for degree in degrees[:-1]), "data-parallel attention")
    return table(header, lines, "lrrrr")


def decodes() -> str:
    """A decode step of V3.2 on eight GPUs, for each split: what each GPU computes for a layer."""
    index = indexer()
    lines: list[Sequence[str]] = []
    for requests in REQUESTS:
        found = []
        for split in SPLITS:
            own = requests / split.data
            parts = [attention(split.heads).at(own), index.at(own)]
            found.append((split, own, parts, sum(time for time, _ in parts) + split.read_us))
        best = min(total for *_, total in found)
        for split, own, parts, total in found:
            shown = [f"{time:.0f}" if measured else f"≈ {time:.0f}" for time, measured in parts]
            mark = "**" if total == best else ""
            cells = (str(requests), split.words, f"{split.heads} x {own:g}", *shown, f"{split.read_us:.0f}")
            lines.append((*cells, f"{mark}{total:.0f}{mark}"))
    header = ("requests", "split", "heads x requests per GPU", "attention", "indexer", "weights", "sum, us")
    rate = f"*Weights* are read at {MEASURED['H200'][0] / 1e12:.1f} TB/s, the limit of `tamis bench` for an H200."
    return f"{table(header, lines, 'rlrrrrr')}\n\n{rate}"


def prompts() -> str:
    """Prompts on eight GPUs: one alone, and one for each GPU."""
    select = {row["shape"]: row for row in read("h200_select") if (row["stage"], row["peer"]) == ("index", "vllm")}
    (chosen,) = [row for shape, row in select.items() if parse_shape(shape) == ([PROMPT], [PROMPT_CONTEXT])]
    index = float(chosen["median_us"])
    lines = []
    for split in SPLITS:
        time = _prompt(split.heads)
        one = (time + index) / 1000
        rounds = GPUS // split.data
        all_ = f"{rounds} x {one:.2f} = {rounds * one:.1f}" if rounds > 1 else f"{one:.1f}"
        lines.append((split.words, str(split.heads), f"{time / 1000:.2f}", f"{index / 1000:.2f}", f"{one:.2f}", all_))
    header = ("split", "heads per GPU", "attention", "indexer", "one prompt, ms", "eight prompts, ms")
    return table(header, lines, "lrrrrr")


def memory() -> str:
    """What a GPU holds, for each split: weights, and tokens in the same memory."""
    token = LAYERS * (named(LAYOUT).row_bytes + named(KEYS).row_bytes)
    lines = []
    for split in SPLITS:
        free = FREE - LAYERS * (split.weights - SPLITS[0].weights)
        tokens = split.data * free / token
        cells = (f"{LAYERS * split.weights / 1e9:.1f} GB", f"{split.tensor}", f"{free / 1e9:.1f} GB")
        lines.append((split.words, *cells, f"{tokens / 1e6:.1f} million"))
    header = (
        "split",
        "attention weights per GPU",
        "copies of each token",
        "left for caches per GPU",
        f"tokens that {GPUS} GPUs hold",
    )
    return table(header, lines, "lrrrr")


def _decodes(shape: str) -> list[list[int]]:
    """The new tokens of a shape in a list if there is one per request and every context has the same length."""
    new, lengths = parse_shape(shape)
    return [new] if set(new) == {1} and set(lengths) == {CONTEXT} else []


def _prompt(heads: int) -> float:
    """Attention of a prompt: as a layer runs it where that was measured, else the kernel over pages."""
    shape = ([PROMPT], [PROMPT_CONTEXT])
    for row in doors.read():
        taken = row["door"] == "SparseMLA" and row["note"] == "what auto takes"
        if taken and row["heads"] == str(heads) and parse_shape(row["shape"]) == shape:
            return float(row["graph_us"])
    found = [
        float(row["median_us"])
        for row in read("h200_prefill")
        if (row["layout"], row["heads"]) == (LAYOUT, str(heads)) and parse_shape(row["shape"]) == shape
    ]
    return min(found)
