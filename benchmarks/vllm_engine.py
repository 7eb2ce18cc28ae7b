"""Runs the vLLM engine on a tiny random DeepSeek-V3.2 model: the plugin of tamis against vLLM's FlashMLA backend.

    python benchmarks/vllm_engine.py --model tinyv32 --out results

`tinyv32` holds a config.json (dense layers only) and a tokenizer; `vllm_model.py` makes random weights for which
rounding seldom decides a token. With Gaussian weights it often does: vLLM's backend, eager and with graphs, agreed with
itself on only half of the tokens. The output therefore also shows how far each backend agrees with itself.

Every engine runs in a separate process. All start at once and then generate one after the other, so that nothing else
uses the GPU while one is timed. Tokens, logprobs and times are written to `h200_vllm.csv`, with one PASS or FAIL line
per condition; if an engine fails, the end of its log is printed. tamis need not be installed: its entry point is put on
the engines' path.
"""

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_model import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, SHORTEST, LONGEST, NEW_TOKENS = 8, 3000, 6000, 32
LOGPROBS = 5


@dataclass(frozen=True)
class Engine:
    """One way to serve the model."""

    backend: str
    cache: str
    mode: str

    @property
    def name(self) -> str:
        backend = "tamis" if self.backend == "CUSTOM" else self.backend.lower()
        return f"{backend}-{'bf16' if self.cache == 'auto' else self.cache}-{self.mode}"


MODES = ("eager", "graph")
OWN = {(cache, mode): Engine("CUSTOM", cache, mode) for cache in ("auto", "fp8_ds_mla") for mode in MODES}
PEERS = {mode: Engine("FLASHMLA_SPARSE", "auto", mode) for mode in MODES}
ENGINES = {engine.name: engine for engine in (*PEERS.values(), *OWN.values())}


@dataclass(frozen=True)
class Condition:
    """A condition that must hold, and the measured value."""

    name: str
    found: float | None
    bound: float
    at_least: bool = True

    @property
    def passed(self) -> bool:
        if self.found is None:
            return False
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        found = "nothing, an engine failed" if self.found is None else f"{self.found:.4g}"
        sign = ">=" if self.at_least else "<="
        return f"{'PASS' if self.passed else 'FAIL'} {self.name}: {found} ({sign} {self.bound:g})"


def write_entry_point(folder: Path) -> None:
    """Write the package metadata of an installation, so that vLLM finds the plugin of a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "tamis-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tamis\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n{name} = {target}" for group, points in groups for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def prompts(vocabulary: int) -> list[dict[str, list[int]]]:
    choice = random.Random(7)
    lengths = [choice.randint(SHORTEST, LONGEST) for _ in range(PROMPTS)]
    return [{"prompt_token_ids": [choice.randrange(2, vocabulary) for _ in range(n)]} for n in lengths]


def serve(engine: Engine, model: Path, folder: Path, rounds: int) -> None:
    """Start one engine, report that it is ready, and generate when told to. Runs in a separate process."""
    import torch
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        model=str(model),
        attention_backend=engine.backend,
        kv_cache_dtype=engine.cache,
        enforce_eager=engine.mode == "eager",
        compilation_config={} if engine.mode == "eager" else {"cudagraph_capture_sizes": [1, 2, 4, 8]},
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=PROMPTS,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30,
        disable_log_stats=True,
        seed=0,
    )
    start_seconds = time.perf_counter() - began
    config = llm.llm_engine.vllm_config
    used = attention_in_use(config)
    print("LAYERS", json.dumps(used), flush=True)
    if engine.backend == "CUSTOM" and not any("tamis" in name for name in used):
        raise SystemExit("error: no layer runs on tamis")
    requests = prompts(config.model_config.get_vocab_size())
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=LOGPROBS
    )
    llm.generate(requests, sampling, use_tqdm=False)
    (folder / f"{engine.name}.ready").touch()
    seconds, outputs = [], []
    for turn in range(rounds):
        go = folder / f"{engine.name}.go{turn}"
        while not go.exists():
            time.sleep(0.02)
        torch.cuda.synchronize()
        began = time.perf_counter()
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        (folder / f"{engine.name}.done{turn}").touch()
    answers = [output.outputs[0] for output in outputs]
    result = {
        "tokens": [list(answer.token_ids) for answer in answers],
        "logprobs": [
            [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
            for answer in answers
        ],
        "margins": [[margin(step) for step in answer.logprobs] for answer in answers],
        "seconds": seconds,
        "start_seconds": start_seconds,
        "layers": used,
    }
    written = folder / f"{engine.name}.part"
    written.write_text(json.dumps(result))
    written.rename(folder / f"{engine.name}.json")


def margin(step: dict[int, Any]) -> float:
    """Difference of the logprobs of the best and the second best token."""
    best, second = sorted((float(entry.logprob) for entry in step.values()), reverse=True)[:2]
    return best - second


def attention_in_use(config: Any) -> list[str]:
    """The attention backends that the engine's layers use."""
    found = set()
    for layer in config.compilation_config.static_forward_context.values():
        backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
        if backend is not None:
            found.add(f"{backend.__module__}.{backend.__qualname__}/{type(getattr(layer, 'impl', None)).__name__}")
    return sorted(found)


def child_environment(number: int, folder: Path) -> dict[str, str]:
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    settings = {
        "VLLM_PLUGINS": "tamis",
        # The engine core runs in the process that is timed.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_PORT": str(21000 + 200 * number),
        "VLLM_CACHE_ROOT": str(folder / f"cache{number}"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
        # DeepGEMM compiles its kernels with nvcc at the first call; all engines share them.
        "CUDA_HOME": cuda,
        "DG_JIT_CACHE_DIR": str(folder / "deep_gemm"),
        "PATH": f"{cuda}/bin:{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    return os.environ | settings


class Race:
    """The processes of all engines, which start together and then generate one after the other."""

    def __init__(self, engines: list[Engine], model: Path, folder: Path, rounds: int, limit: float) -> None:
        self.engines, self.folder, self.rounds = engines, folder, rounds
        self.deadline = time.monotonic() + limit
        self.processes = {}
        for number, engine in enumerate(engines):
            command = [sys.executable, __file__, "--serve", engine.name, "--model", str(model)]
            command += ["--folder", str(folder), "--rounds", str(rounds)]
            with (folder / f"{engine.name}.log").open("w") as log:
                self.processes[engine] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=child_environment(number, folder)
                )

    def wait(self, engine: Engine, mark: str) -> bool:
        """Wait until the engine has written this mark; False if it died or timed out."""
        path = self.folder / f"{engine.name}.{mark}"
        while not path.exists():
            if self.processes[engine].poll() is not None or time.monotonic() > self.deadline:
                return path.exists()
            time.sleep(0.02)
        return True

    def run(self) -> dict[str, dict[str, Any]]:
        """The results of the engines that succeeded, by name."""
        began = time.monotonic()
        alive = [engine for engine in self.engines if self.wait(engine, "ready")]
        print(f"{len(alive)} of {len(self.engines)} engines ready after {time.monotonic() - began:.0f} s", flush=True)
        for turn in range(self.rounds):
            for engine in list(alive):
                (self.folder / f"{engine.name}.go{turn}").touch()
                if not self.wait(engine, f"done{turn}"):
                    alive.remove(engine)
        results = {
            engine.name: json.loads((self.folder / f"{engine.name}.json").read_text())
            for engine in alive
            if self.wait(engine, "json")
        }
        for engine, process in self.processes.items():
            if process.poll() is None:
                process.kill()
            if engine.name not in results:
                lines = (self.folder / f"{engine.name}.log").read_text(errors="replace").splitlines()
                print(f"--- {engine.name} did not get through; the end of its log:", *lines[-40:], sep="\n", flush=True)
        return results


def equal_share(left: dict[str, Any] | None, right: dict[str, Any] | None) -> float | None:
    """The share of positions at which two runs chose the same token."""
    if left is None or right is None:
        return None
    pairs = [pair for a, b in zip(left["tokens"], right["tokens"], strict=True) for pair in zip(a, b, strict=True)]
    return float(sum(a == b for a, b in pairs)) / len(pairs)


def logprob_difference(left: dict[str, Any] | None, right: dict[str, Any] | None) -> float | None:
    """Mean absolute difference of the chosen tokens' logprobs, up to each prompt's first different token."""
    if left is None or right is None:
        return None
    differences = []
    for a, b, p, q in zip(left["tokens"], right["tokens"], left["logprobs"], right["logprobs"], strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        differences += [abs(x - y) for x, y in zip(p[:first], q[:first], strict=True)]
    return float(sum(differences)) / len(differences) if differences else None


def first_differences(left: dict[str, Any], right: dict[str, Any]) -> str:
    """Per prompt the first position where two runs differ, and the left run's margin: a small one means rounding."""
    found = []
    for a, b, margins in zip(left["tokens"], right["tokens"], left["margins"], strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        found.append("none" if first is None else f"{first} (margin {margins[first]:.3f})")
    return ", ".join(found)


def throughput(result: dict[str, Any] | None) -> float | None:
    return None if result is None else PROMPTS * NEW_TOKENS / float(min(result["seconds"]))


def conditions(results: dict[str, dict[str, Any]]) -> list[Condition]:
    """The conditions that the plugin must meet."""
    found = []
    for mode in MODES:
        peer = results.get(PEERS[mode].name)
        own, packed = (results.get(OWN[cache, mode].name) for cache in ("auto", "fp8_ds_mla"))
        speed, peer_speed = throughput(own), throughput(peer)
        ratio = speed / peer_speed if speed is not None and peer_speed is not None else None
        found += [
            Condition(f"{mode}, bf16: tokens equal to FLASHMLA_SPARSE", equal_share(own, peer), 0.95),
            Condition(f"{mode}, bf16: throughput over FLASHMLA_SPARSE", ratio, 1.0),
            Condition(f"{mode}, fp8_ds_mla: tokens equal to bf16", equal_share(packed, own), 0.80),
            Condition(f"{mode}, fp8_ds_mla: logprob difference to bf16", logprob_difference(packed, own), 0.05, False),
        ]
    return found


def own_modes_agree(results: dict[str, dict[str, Any]], engine: Engine) -> float | None:
    """The share of tokens that are the same in eager mode and with graphs, the most that a comparison can reach."""
    return equal_share(*(results.get(replace(engine, mode=mode).name) for mode in MODES))


def write_table(results: dict[str, dict[str, Any]], path: Path, about: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        facts = ["tokens_per_s", "seconds_best", "seconds_all", "start_s", "equal_to_flashmla", "equal_to_own_bf16"]
        facts += ["logprob_diff_to_own_bf16", "equal_eager_graph"]
        table.writerow(["engine", *asdict(PEERS["eager"]), *facts, *about])
        for name, result in results.items():
            engine = ENGINES[name]
            own, peer = results.get(OWN["auto", engine.mode].name), results.get(PEERS[engine.mode].name)
            numbers = [throughput(result), min(result["seconds"])]
            shares = [equal_share(result, peer), equal_share(result, own), logprob_difference(result, own)]
            shares.append(own_modes_agree(results, engine))
            table.writerow(
                [
                    name,
                    *asdict(engine).values(),
                    *(f"{n:.4f}" for n in numbers),
                    " ".join(f"{s:.4f}" for s in result["seconds"]),
                    f"{result['start_seconds']:.1f}",
                    *("" if s is None else f"{s:.5f}" for s in shares),
                    *about.values(),
                ]
            )


def versions() -> dict[str, str]:
    facts = "torch.cuda.get_device_name(), torch.__version__, vllm.version.__version__"
    code = f"import torch, vllm.version; print({facts}, sep='|')"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = asked.stdout.strip().rpartition("\n")[2].split("|")
    return dict(zip(("device", "torch", "vllm"), found if len(found) == 3 else ["unknown"] * 3, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tiny model's config and tokenizer")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm"), help="folder for the table")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs and tokens")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each engine; the fastest counts")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which running engines are stopped")
    parser.add_argument("--only", nargs="*", choices=ENGINES, help="run these engines only")
    parser.add_argument("--serial", action="store_true", help="start one engine after the other, if memory is short")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(ENGINES[options.serve], options.model, options.folder, options.rounds)
        return 0
    engines = [engine for name, engine in ENGINES.items() if not options.only or name in options.only]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_checkpoint(options.model, folder / "model")
        write_entry_point(folder / "site")
        results: dict[str, dict[str, Any]] = {}
        for group in [[engine] for engine in engines] if options.serial else [engines]:
            results |= Race(group, folder / "model", folder, options.rounds, options.limit).run()
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            for path in (*folder.glob("*.log"), *folder.glob("*.json")):
                shutil.copy(path, options.logs)
    write_table(results, options.out / "h200_vllm.csv", versions())
    print((options.out / "h200_vllm.csv").read_text())
    for mode in MODES:
        own = results.get(OWN["auto", mode].name)
        for other in (PEERS[mode], OWN["fp8_ds_mla", mode]):
            if own is not None and other.name in results:
                print(f"{mode}, bf16 and {other.name} part at:", first_differences(own, results[other.name]))
    for engine in (PEERS["eager"], OWN["auto", "eager"], OWN["fp8_ds_mla", "eager"]):
        share = own_modes_agree(results, engine)
        if share is not None:
            print(f"{engine.name.removesuffix('-eager')}, eager and graph: {share:.4g} of the tokens equal")
    found = conditions(results)
    print(*found, sep="\n")
    return 0 if all(condition.passed for condition in found) else 1


if __name__ == "__main__":
    sys.exit(main())
