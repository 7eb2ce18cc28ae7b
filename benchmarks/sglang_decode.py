"""Times decode steps through SGLang's DSA backend, of its own FlashMLA implementations and of tamis, in turns.

A step is `forward_decode` as a layer calls it: rows of the step are written to the cache, then attention runs over
2048 selected slots per token. It is captured in a CUDA graph and replayed. The implementations get the same queries,
rows and slots; their outputs are compared with each other and with attention in float64. `sglang_kit.py` starts this.
"""

import argparse
import csv
import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from engine_results import Spread
from torch import Tensor

HEADS, BATCHES, TOPK, CONTEXT = (16, 64, 128), (1, 8, 32, 128), 2048, 8192
PEERS = {"fp8": "flashmla_kv", "bf16": "flashmla_sparse"}
STEPS, TURNS = 20, 15
COLUMNS = ["cache", "heads", "batch", "topk", "context", "peer", "turns"]
COLUMNS += [
    f"{side}_us_{name}" for side in ("peer", "tamis") for name in ("median", "lower_quartile", "upper_quartile")
]
COLUMNS += ["speedup", "peer_error", "tamis_error", "difference", "device", "torch", "sglang"]


class Decode:
    """One implementation with a pool of its own, for all batch sizes."""

    def __init__(self, impl: str, heads: int, fp8: bool) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit

        latent, rope = kit.DSA_SPARSE_QK_NOPE_HEAD_DIM, kit.DSA_SPARSE_QK_ROPE_HEAD_DIM
        case = kit.DSAAttentionCase(
            name="decode",
            backend="dsa",
            forward_mode=ForwardMode.DECODE,
            num_heads=heads,
            num_kv_heads=1,
            page_size=kit.DSA_PAGE_SIZE,
            prefix_lens=(CONTEXT - 1,) * max(BATCHES),
        )
        config = kit.TinyDSAModelConfig(
            num_heads=heads,
            num_kv_heads=1,
            head_dim=latent + rope,
            hidden_size=64,
            context_len=CONTEXT,
            qk_nope_head_dim=latent,
            qk_rope_head_dim=rope,
            kv_lora_rank=latent,
            index_topk=TOPK,
        )
        self.runner = kit.DSAMockModelRunner(
            case=case,
            model_config=config,
            dtype=torch.bfloat16,
            device="cuda",
            max_context_len=CONTEXT,
            head_dim=latent + rope,
            dsa_prefill_backend=impl,
            dsa_decode_backend=impl,
            fp8_kv_cache=fp8,
        )
        self.backend = ATTENTION_BACKENDS["dsa"](self.runner)
        self.layer = kit.ProjectedDSASparseAttention(
            hidden_size=64,
            num_heads=heads,
            qk_nope_head_dim=latent,
            qk_rope_head_dim=rope,
            dtype=torch.bfloat16,
            device="cuda",
        ).attn
        table = self.runner.req_to_token_pool.req_to_token
        count = len(case.prefix_lens) * CONTEXT
        slots = case.page_size + torch.arange(count, dtype=table.dtype, device="cuda")
        table[: len(case.prefix_lens), :CONTEXT] = slots.view(-1, CONTEXT)

    @property
    def pool(self) -> Tensor:
        buffer: Tensor = self.runner.token_to_kv_pool.get_key_buffer(0)
        return buffer

    def fill(self, k: Tensor, k_rope: Tensor) -> None:
        """Write rows to all slots that a batch can use, with SGLang's kernel, in parts."""
        slots = self.runner.req_to_token_pool.req_to_token[: max(BATCHES), :CONTEXT].flatten().long()
        for part in slots.split(len(k)):
            self.runner.token_to_kv_pool.set_mla_kv_buffer(self.layer, part, k[: len(part)], k_rope[: len(part)])

    def step(self, batch: int, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
        """A decode step of this many requests."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        table = self.runner.req_to_token_pool.req_to_token
        lengths = torch.full((batch,), CONTEXT, dtype=torch.int32)
        forward = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=batch,
            input_ids=torch.zeros(batch, dtype=torch.int64, device="cuda"),
            req_pool_indices=torch.arange(batch, dtype=torch.int32, device="cuda"),
            seq_lens=lengths.cuda(),
            seq_lens_cpu=lengths,
            out_cache_loc=table[:batch, CONTEXT - 1].long(),
            seq_lens_sum=batch * CONTEXT,
            positions=torch.full((batch,), CONTEXT - 1, dtype=torch.int64, device="cuda"),
        )
        self.backend.init_forward_metadata(forward)
        metadata = self.backend.forward_metadata

        def once() -> Tensor:
            self.backend.forward_metadata = metadata
            out: Tensor = self.backend.forward_decode(
                inputs["q"].flatten(1),
                inputs["k"],
                inputs["k"],
                self.layer,
                forward,
                q_rope=inputs["q_rope"],
                k_rope=inputs["k_rope"],
                topk_indices=inputs["slots"],
            )
            return out

        return once


def draw(generator: torch.Generator, batch: int, heads: int, table: Tensor) -> dict[str, Tensor]:
    """Queries, rows and selected slots of a step."""
    normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    picks = torch.rand(batch, CONTEXT, generator=generator, device="cuda").topk(TOPK).indices
    return {
        "q": normal(batch, heads, 512),
        "q_rope": normal(batch, heads, 64),
        "k": normal(batch, 1, 512),
        "k_rope": normal(batch, 1, 64),
        "slots": table[:batch].gather(1, picks).to(torch.int32),
    }


def rows_of(pool: Tensor, slots: Tensor, fp8: bool) -> Tensor:
    """Selected rows of the cache in float64."""
    rows = pool.view(pool.shape[0], -1)[slots.long()]
    if not fp8:
        return rows.double()
    data = rows.view(torch.uint8)
    values = data[..., :512].view(torch.float8_e4m3fn).double()
    scales = data[..., 512:528].view(torch.float32).double().repeat_interleave(128, -1)
    return torch.cat([values * scales, data[..., 528:].view(torch.bfloat16).double()], -1)


def attention(inputs: dict[str, Tensor], pool: Tensor, scale: float, fp8: bool) -> Tensor:
    """The step in float64, for the first requests."""
    count = min(4, len(inputs["q"]))
    rows = rows_of(pool, inputs["slots"][:count], fp8)
    q = torch.cat([inputs["q"], inputs["q_rope"]], -1)[:count].double()
    weights = torch.softmax(torch.einsum("bhd,bkd->bhk", q, rows) * scale, -1)
    return torch.einsum("bhk,bkd->bhd", weights, rows[..., :512])


@dataclass(frozen=True)
class Captured:
    """A graph of several steps.

    Attributes:
        graph: what is replayed.
        step: the captured function. It holds the batch and its metadata, whose memory every replay reads.
        out: the output of the last step.
    """

    graph: torch.cuda.CUDAGraph
    step: Callable[[], Tensor]
    out: Tensor

    @classmethod
    def of(cls, step: Callable[[], Tensor]) -> "Captured":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(STEPS):
                out = step()
        return cls(graph, step, out)

    def microseconds(self) -> float:
        """The time of a step, with the caches as the replay before has left them."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph.replay()
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / STEPS


def relative(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


def row_of(
    name: list[object], times: dict[str, list[float]], errors: dict[str, float], difference: float | None
) -> list[str]:
    """A line of the table: the implementation of SGLang, and tamis if it ran."""
    peer = next(iter(times))
    spreads = {impl: Spread.of(values) for impl, values in times.items()}
    row = [*map(str, name), peer, str(spreads[peer].turns)]
    for impl in (peer, "tamis"):
        spread = spreads.get(impl)
        numbers = (spread.median, spread.lower_quartile, spread.upper_quartile) if spread else ()
        row += [f"{number:.2f}" for number in numbers] or [""] * 3
    both = "tamis" in spreads
    row.append(f"{spreads[peer].median / spreads['tamis'].median:.3f}" if both else "")
    row += [f"{errors[impl]:.2e}" if impl in errors else "" for impl in (peer, "tamis")]
    return [*row, "" if difference is None else f"{difference:.2e}"]


def measure(cache: str, heads: int, impls: list[str], write: Callable[[list[str]], None]) -> None:
    fp8 = cache == "fp8"
    generator = torch.Generator("cuda").manual_seed(heads)
    sides = {impl: Decode(impl, heads, fp8) for impl in impls}
    k = torch.randn(64 * CONTEXT, 1, 512, generator=generator, device="cuda", dtype=torch.bfloat16)
    k_rope = torch.randn(64 * CONTEXT, 1, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    for side in sides.values():
        side.fill(k, k_rope)
    for batch in BATCHES:
        table = sides[impls[0]].runner.req_to_token_pool.req_to_token
        inputs = draw(generator, batch, heads, table)
        graphs, outputs, errors = {}, {}, {}
        for impl, side in sides.items():
            graphs[impl] = Captured.of(side.step(batch, inputs))
            graphs[impl].graph.replay()
            torch.cuda.synchronize()
            outputs[impl] = graphs[impl].out.reshape(batch, heads, 512).clone()
            wanted = attention(inputs, side.pool, side.layer.scaling, fp8)
            errors[impl] = relative(outputs[impl][: len(wanted)], wanted)
        times: dict[str, list[float]] = {impl: [] for impl in sides}
        for turn in range(TURNS):
            for impl in impls[:: 1 if turn % 2 else -1]:
                times[impl].append(graphs[impl].microseconds())
        difference = relative(outputs["tamis"], outputs[impls[0]]) if "tamis" in sides else None
        write(row_of([cache, heads, batch, TOPK, CONTEXT], times, errors, difference))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the table to write")
    parser.add_argument("--tamis", action="store_true", help="time tamis beside SGLang's own")
    options = parser.parse_args()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    about = [torch.cuda.get_device_name(), torch.__version__, version("sglang")]
    with options.out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)

        def write(row: list[str]) -> None:
            table.writerow([*row, *about])
            file.flush()
            print(*row, flush=True)

        for cache, peer in PEERS.items():
            for heads in HEADS:
                try:
                    with torch.no_grad():
                        measure(cache, heads, [peer, "tamis"] if options.tamis else [peer], write)
                    gc.collect()
                    torch.cuda.empty_cache()
                except Exception:
                    traceback.print_exc()


if __name__ == "__main__":
    main()
