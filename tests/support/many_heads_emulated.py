"""The kernels for many heads on the host, for tests: warps in random order; rows, queries, and what must come out."""

from collections.abc import Sequence
from pathlib import Path

import on_host
import torch
from attention_calls import attend_call, combine_call
from seeds import seeded
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import named
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.ops import write_kv
from tamis.ops.attention import reference
from tamis.ops.attention.hopper import many_heads as many
from tamis.ops.attention.hopper.params import output_params
from tamis.ops.attention.hopper.splits import Outputs, rest_distance
from tamis.ops.combine import reference as combine
from tamis.ops.lse import LseForm

ENTRY = """
extern "C" __attribute__((visibility("default"))) void run(int ctas, int seed, const ManyHeadsParams* params) {
  emulator::random_order.seed(seed);
  const int size = MERGE_IN_CLUSTER ? params->output.splits : 1;
  for (int cluster = 0; cluster < ctas / size; ++cluster) {
    emulator::start_wgmma_cta(ctas);
    emulator::run_cluster(cluster, size, USED, [&] { attend_many_heads(*params); });
    emulator::check_finished();
  }
}
"""


class Emulated:
    """The kernel of a layout, compiled for the host."""

    def __init__(
        self, folder: Path, row_kernel: many.RowKernel, selections: int, merges: bool = False, keep_rest: bool = False
    ) -> None:
        program = many.program(row_kernel, selections, merges, keep_rest)
        self.merges, self.keep_rest = merges, keep_rest
        self.rest: Tensor | None = None
        """What rounding cut off the output of the last call."""
        source = f'#include "warpgroup_emulator.hpp"\n{program.source}{ENTRY}'
        self.run = on_host.load(folder, source, [*program.options, "-I", str(Path(many.__file__).parent)]).run

    def __call__(
        self,
        q: Tensor,
        selections: Sequence[Selection],
        *,
        scale: float | Tensor,
        splits: int = 1,
        whole: int = 0,
        sink: Tensor | None = None,
        seed: int = 0,
        ctas: int | None = None,
        form: LseForm = LseForm(),  # noqa: B008
    ) -> tuple[Outputs, Outputs]:
        """The results of whole tokens, in the first rows, and the splits of the others, by `ctas` persistent CTAs."""
        tokens, heads, _ = q.shape
        out, lse = (
            torch.full((tokens, heads, 512), -7.0, dtype=torch.bfloat16),
            torch.full(form.shape(tokens, heads), -7.0),
        )
        direct = Outputs(out, lse, lse.clone())
        found = Outputs.empty(splits, tokens - whole, heads, device=q.device)
        output = output_params(direct, found, sink, form)
        if self.keep_rest:
            self.rest = torch.full_like(out, -7.0)
            output = output._replace(rest=rest_distance(out, self.rest))
        if self.merges:
            output = output._replace(split_out=0, split_lse=0, split_max_logits=0)
        held: list[Tensor] = []  # until the kernel has run
        params = many.many_heads_params(q, selections, scale, output, held)
        items = (whole + (tokens - whole) * splits) * ceil_div(heads, 64)
        self.run(items if ctas is None else ctas, seed, on_host.packed(params))
        return direct, found


def filled(layout: str, rows: int, *, page_size: int = 16, seed: int = 0, size: float = 1.0, **options) -> PagedCache:
    """A cache of random rows whose tiles differ in size."""
    generator = seeded(seed)
    cache = PagedCache(named(layout, **options), ceil_div(rows, page_size), page_size)
    width = cache.layout.width
    values = torch.randn(cache.rows, width, generator=generator)
    tiles = torch.exp(0.7 * torch.randn(cache.rows, width // 64, generator=generator)).repeat_interleave(64, 1)
    write_kv((values * tiles * size).bfloat16(), cache, torch.arange(cache.rows), backend="reference")
    return cache


def expected(
    q: Tensor, selections: Sequence[Selection], scale: float | Tensor, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.zeros(*q.shape[:2], 512, dtype=torch.float64)
    factor = scale.double() if isinstance(scale, Tensor) else scale
    lse, top = reference.attend(attend_call(q.double(), selections, scale=factor, splits=1, sink=sink, out=out))
    return out, lse, top


def merged(parts: Tensor, lses: Tensor, tops: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Parts, by the definition of the merge."""
    out = torch.zeros(parts.shape[1:])
    return out, combine.combine_parts(combine_call(parts, lses, sink, out)), tops.amax(0)


def close(
    found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], *, error: float = 1e-3, lse_error: float | None = None
) -> None:
    """Each head's output to a part of its size; lse and maxima to a part of the logits' size."""
    out, lse, top = (t.double() for t in found)
    true_out, true_lse, true_top = (t.double() for t in wanted)
    size = true_out.norm(dim=-1, keepdim=True)
    worst = ((out - true_out).norm(dim=-1, keepdim=True) / size.clamp_min(1e-300)).max()
    assert worst <= error
    allowed = lse_error or error
    for mine, true in ((lse, true_lse), (top, true_top)):
        assert torch.equal(mine.isinf(), true.isinf())
        finite = true.isfinite()
        assert torch.allclose(mine[finite], true[finite], rtol=allowed / 5, atol=allowed)


def choose(tokens: int, columns: int, cache: PagedCache, *, seed: int = 1, invalid: float = 0.1) -> Tensor:
    generator = seeded(seed)
    slots = torch.randint(0, cache.rows, (tokens, columns), generator=generator, dtype=torch.int32)
    slots[torch.rand(tokens, columns, generator=generator) < invalid] = -1
    if columns:
        slots[:, 0] = cache.rows  # past the cache
    return slots


def queries(tokens: int, heads: int, width: int, size: float = 1.0) -> Tensor:
    sizes = torch.exp(torch.randn(tokens, heads, 1))
    return (torch.randn(tokens, heads, width) * sizes * size).bfloat16()


def on_gpu(selection: Selection) -> Selection:
    cache = PagedCache.wrap(selection.cache.storage.cuda(), selection.cache.layout)
    others = (selection.lengths, selection.request_ids, selection.block_table)
    return Selection(cache, selection.slots.cuda(), *(None if t is None else t.cuda() for t in others))
