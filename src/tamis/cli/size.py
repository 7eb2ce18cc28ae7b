"""`tamis size`: bytes of a model's caches per token and per request, and how much fits into a memory."""

import argparse
import json
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.cli import hub
from tamis.cli.data import print_json
from tamis.cli.model import add_revision
from tamis.cli.parser import OK, Subcommands, add_command
from tamis.cli.progress import waiting
from tamis.cli.table import render_table
from tamis.cli.text import printable
from tamis.cli.values import memory, tokens, whole

if TYPE_CHECKING:
    from tamis.cache.sizes import CacheSizes

MODELS = (
    *("deepseek-v3.2", "glm-5", "glm-5.3-flash", "deepseek-v4-flash", "deepseek-v4-pro"),
    *("a.x-k2-light", "hy4", "mistral-large-4"),
)
"""The models of `tamis.model.known`, whose neighbours import torch; a test compares the two."""

COLUMNS = ("bytes_per_token_and_layer", "bytes_per_token", "bytes_per_request_and_layer", "bytes_per_request")

DETAILS = """\
Counts what tamis' caches store. In DeepSeek-V3.2, GLM-5 and their relatives a layer keeps a latent row per token (656
bytes in FP8 at 512 + 64 columns), unless it reads the rows of an earlier layer, and, if it has an indexer, an index key
(132 bytes). In DeepSeek-V4 every layer keeps a window of the last raw tokens; compressed layers add an entry per 4 or
128 tokens, index keys (one per entry of 4 tokens), and the state that a compressor carries from token to token. Windows
and states do not grow with the context.

Sizes are in whole pages, with their padding, for requests that decode; while a prompt is prefilled, windows and states
hold its newest chunk as well. An engine may pad pages further to lay several caches into one pool.

Rows are the same for all heads, so tensor parallelism does not divide them: each of its ranks holds all of them. Data
parallelism divides requests among ranks, and context parallelism divides the tokens of a request."""

EXAMPLES = """\
tamis size --model deepseek-v3.2 --context 128k --tp 8 --memory 40
tamis size --model deepseek-v4-flash --context 1048576 --memory 74.5GiB --json
tamis size --model ./model --context 65536 --cache bf16"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "size",
        run,
        summary="Compute the bytes of a model's caches per token and request, and how much fits into a memory",
        details=DETAILS,
        example=EXAMPLES,
        usage="--model NAME [options]",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|DIR|ID",
        help=f"{', '.join(MODELS)}, a directory with a config.json, or an id on the Hugging Face Hub, of which "
        "only the config is downloaded",
    )
    add_revision(parser)
    parser.add_argument(
        "--context",
        type=tokens,
        default=131072,
        metavar="N",
        help="tokens of one request, such as 131072 or 128k (default: 131072)",
    )
    parser.add_argument("--tp", type=whole(1), default=1, metavar="N", help="ranks of tensor parallelism (default: 1)")
    parser.add_argument(
        "--memory",
        type=memory,
        metavar="GB",
        help="memory that one GPU has for caches, beside weights and workspaces, in GB (10**9 bytes) or as 74.5GiB",
    )
    parser.add_argument(
        "--cache",
        choices=("fp8", "bf16", "fp16", "fp32"),
        default="fp8",
        help="format of latent rows, raw tokens and entries (default: fp8)",
    )
    parser.add_argument(
        "--index-cache", choices=("fp8", "mxfp4"), default="fp8", help="format of index keys (default: fp8)"
    )
    parser.add_argument(
        "--page-size", type=whole(1), metavar="N", help="tokens per page, in V4 of entries (default: 64; 256 in V4)"
    )
    parser.add_argument(
        "--mtp-layers", type=whole(0), default=0, metavar="N", help="speculative layers to count as well (default: 0)"
    )


def run(options: argparse.Namespace) -> int:
    """Compute, and print the table or the JSON object."""
    if options.model not in MODELS:
        _check_place(options)
    elif options.revision is not None:
        raise ValueError("--revision must be given with the id of a model on the Hub; drop it")
    with waiting("loading torch"):
        from tamis.cache.sizes import cache_sizes
    config, source, revision = _config(options)
    sizes = cache_sizes(
        config,
        cache=options.cache,
        index=options.index_cache,
        page_size=options.page_size,
        tensor_parallel=options.tp,
        mtp_layers=options.mtp_layers,
    )
    data = as_data(options, sizes, source, revision)
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and options.context > longest:
        data["notes"].insert(0, f"the model's own context ends at {longest:,} tokens")
    if options.json:
        print_json("size", True, data)
    else:
        _print_report(options, data)
    return OK


def _check_place(options: argparse.Namespace) -> None:
    if not hub.is_hub_id(options.model) and not (Path(options.model) / "config.json").is_file():
        known = ", ".join(MODELS)
        expected = f"one of {known}, a directory with a config.json, or an id on the Hub"
        raise ValueError(f"--model must be {expected}; got {options.model!r}.")
    hub.check_local("--model", options.model, options.revision)


def _config(options: argparse.Namespace) -> tuple[dict[str, Any], str, str | None]:
    """The config, where it is from, and its commit on the Hub."""
    from tamis.model.known import KNOWN

    if options.model in KNOWN:
        known = KNOWN[options.model]
        return dict(known.config), known.source, None
    with waiting("fetching the config"):
        found = hub.fetch("--model", options.model, options.revision, weights=False)
    file = found.folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--model {options.model} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model {options.model} must have a config.json with fields, got {type(config).__name__}")
    return config, f"config.json of {found}", found.revision


def as_data(options: argparse.Namespace, sizes: "CacheSizes", source: str, revision: str | None) -> dict[str, Any]:
    """All figures as plain data."""
    context, budget = options.context, options.memory
    parts = [
        {
            "layers": group.count,
            "kind": group.kind,
            "cache": part.what,
            "format": part.layout.name,
            "row_bytes": part.layout.row_bytes,
            "page_tokens": part.page_size,
            "page_bytes": part.page_bytes,
            "bytes_per_token_and_layer": _number(part.bytes_per_token),
            "bytes_per_token": _number(group.count * part.bytes_per_token),
            "bytes_per_request_and_layer": part.bytes_per_request(context),
            "bytes_per_request": group.count * part.bytes_per_request(context),
        }
        for group in sizes.groups
        for part in group.parts
    ]
    each = sizes.bytes_per_request(context)
    fitting = None if budget is None else sizes.requests_that_fit(budget, context)
    return {
        "model": options.model,
        "source": source,
        "revision": revision,
        "layers": sizes.layers,
        "tensor_parallel": options.tp,
        "heads_per_rank": sizes.heads,
        "context_tokens": context,
        "caches": parts,
        "bytes_per_token": _number(sizes.bytes_per_token),
        "bytes_per_request": each,
        "bytes_per_request_on_all_ranks": each * options.tp,
        "memory_bytes": budget,
        "tokens_that_fit": None if budget is None else sizes.tokens_that_fit(budget),
        "requests_that_fit": fitting,
        "notes": _notes(options.tp, fitting),
    }


def _notes(ranks: int, fitting: int | None) -> list[str]:
    if ranks == 1:
        return ["tensor parallelism would not divide these bytes: every rank holds all rows"]
    notes = [f"each of the {ranks} ranks of tensor parallelism holds all of these bytes: rows are not divided"]
    if fitting is not None:
        notes.append(
            f"data parallelism on the same {ranks} GPUs holds {ranks} times as many requests in this memory of each"
        )
    return notes


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _print_report(options: argparse.Namespace, data: dict[str, Any]) -> None:
    print(f"{printable(data['model'])}: {data['layers']} layers, {data['heads_per_rank']} heads per rank")
    print(f"sizes from {printable(data['source'])}\n")
    rows = [
        (
            part["layers"],
            part["cache"],
            part["format"],
            f"{part['row_bytes']:,}",
            *(_shown(part[name]) for name in COLUMNS),
        )
        for part in data["caches"]
    ]
    per_token, per_request = _shown(data["bytes_per_token"]), _shown(data["bytes_per_request"])
    rows.append((data["layers"], "all", "", "", "", per_token, "", per_request))
    header = ["layers", "cache", "format", "bytes\nper row", "per token,\none layer", "these\nlayers"]
    header += ["per request,\none layer", "these\nlayers"]
    print(render_table(header, rows, "rllrrrrr"), end="\n\n")
    print(f"bytes per token: {per_token}")
    print(f"bytes per request of {options.context:,} tokens: {per_request}")
    if options.memory is not None:
        print(f"requests of {options.context:,} tokens in {options.memory:,} bytes: {data['requests_that_fit']:,}")
        print(f"longest single request in {options.memory:,} bytes: {data['tokens_that_fit']:,} tokens")
    for note in data["notes"]:
        print(f"note: {note}")


def _shown(value: float) -> str:
    return f"{value:,}" if value else "-"
