"""`tamis inspect`: show which tokens a model's layers select, and how much of dense attention these cover."""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.cli.machine import check_backend, describe_machine, let_waiting_threads_sleep, machine_line, pick_device
from tamis.cli.model import add_model_options, load_model, numbers
from tamis.cli.parser import OK, Subcommands, add_command
from tamis.cli.progress import Progress, waiting
from tamis.cli.table import render_table
from tamis.cli.text import printable

if TYPE_CHECKING:
    from tamis.lab.inspection import Inspection

TOKENS = 512
SHOWN = 6
"""Number of selected tokens per layer that the table of a query shows."""

DETAILS = """\
Runs a prompt once through a DeepSeek-V3.2, GLM-MoE-DSA or DeepSeek-V4 model whose attention runs through tamis, and
reports, for each indexed layer, which tokens every query selects and how much of the dense attention mass they cover.
Without --checkpoint it makes a tiny random model; without a prompt it uses random passages that recur. Each query can
attend to n candidates (tokens, or compressed 4-token entries in V4); the indexer keeps the top k.

- recall: share of dense attention's weight on the selected candidates, mean over heads; also of the worst tenth
- top-1 hit: how often a head's heaviest candidate is selected
- effective top-k: perplexity (exp of entropy) of the attention weights over the selected tokens
- ties at cutoff: queries where the k-th score was tied, so position broke the tie
- IoU: intersection over union of two layers' selections

These are means over queries with more candidates than top-k; the others select everything. Dense attention is computed
from the same cached rows, for --compared-queries evenly spaced queries, in chunks: memory does not grow with the square
of the prompt. V4 layers select compressed entries, so recall is of the weight on entries, and the window's share is
shown beside it; layers with a window only, or that attend to every entry, select nothing.

Needs transformers: pip install 'tamis[transformers]'."""

EXAMPLES = """\
tamis inspect --html report.html
tamis inspect --model v4 --query 100,-1 --json
tamis inspect --checkpoint ./model --prompt-file text.txt --query 100,-1"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "inspect",
        run,
        summary="Show which tokens a model's layers select for a prompt, as tables, JSON or one HTML file",
        details=DETAILS,
        example=EXAMPLES,
    )
    add_model_options(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; needs a checkpoint with a tokenizer")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="text file with the prompt")
    prompt.add_argument("--prompt-ids", metavar="N,N,...", help="the prompt as token numbers")
    prompt.add_argument(
        "--prompt-tokens", type=int, metavar="N", help=f"length of the synthetic prompt (default: {TOKENS})"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report to this file")
    parser.add_argument(
        "--query",
        metavar="N,...",
        default="-1",
        help="queries to list, or all; negative numbers count from the end (default: -1)",
    )
    parser.add_argument(
        "--needle",
        type=int,
        metavar="POSITION",
        help="position in the prompt to follow: which layers select it, its rank and score (default: none)",
    )
    parser.add_argument(
        "--compared-queries",
        type=int,
        default=2048,
        metavar="N",
        help="number of queries to compare with dense attention (default: 2048)",
    )


def run(options: argparse.Namespace) -> int:
    """Inspect, and print the tables or the JSON object."""
    let_waiting_threads_sleep()
    from tamis import checks

    checks.integer("--compared-queries", options.compared_queries, low=1)
    if options.html is not None and (options.html.is_dir() or not options.html.parent.is_dir()):
        raise checks.refuse("--html", "a file in an existing folder", str(options.html), "choose another place")
    device = pick_device(options.device)
    check_backend(options.backend, device)
    model, tokenizer = load_model(options, device)
    from tamis.lab.html import write_whole
    from tamis.lab.inspection import inspect_model, render_page

    tokens = _prompt(options, model, tokenizer)
    queries = _queries(options.query, len(tokens))
    if options.needle is not None:
        checks.integer("--needle", options.needle, low=-len(tokens), high=len(tokens) - 1)
    with Progress("queries", "reading the prompt") as progress:
        inspection = inspect_model(
            model,
            tokens,
            cache=options.cache,
            backend=options.backend,
            compared_queries=options.compared_queries,
            queries=queries,
            needle=options.needle,
            report=progress.update,
        )
    text = token_text(tokenizer)
    machine = describe_machine(device)
    parameters = _parameters(model, options, machine)
    if options.html is not None:
        with waiting("writing the page"):
            page = render_page(
                inspection,
                title=parameters["model"],
                text=text,
                parameters=parameters,
                random_weights=options.checkpoint is None,
            )
            write_whole(options.html, page)
    if options.json:
        data = _as_data(inspection, queries, text, parameters, machine)
        print(json.dumps(data | {"html": None if options.html is None else str(options.html)}))
    else:
        print(machine_line(machine), end="\n\n")
        print(_report(inspection, queries, text))
        if options.html is not None:
            print(f"\nreport: {printable(options.html)}")
    return OK


def recurring_prompt(vocab: int, count: int, seed: int) -> list[int]:
    """Random tokens in passages that recur, so that the indexer has something to find."""
    chance = random.Random(seed)
    length = max(4, min(48, count // 12))
    passages = [[chance.randrange(vocab) for _ in range(length)] for _ in range(5)]
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += chance.choice(passages)[: chance.randrange(length // 2, length + 1)]
    return tokens[:count]


def token_text(tokenizer: Any) -> Callable[[int], str]:
    """A function that gives the text of a token, or its id without a tokenizer."""
    if tokenizer is None:
        return str

    def text(token: int) -> str:
        shown: str = tokenizer.decode([token])
        return printable(shown.replace("\n", "⏎").strip()) or "␣"

    return text


def _prompt(options: argparse.Namespace, model: Any, tokenizer: Any) -> list[int]:
    from tamis import checks
    from tamis.lab import generation

    text = options.prompt
    if options.prompt_file is not None:
        try:
            text = options.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompt-file {options.prompt_file} cannot be read: {error}") from error
    ids = None if options.prompt_ids is None else numbers("--prompt-ids", options.prompt_ids)
    if text is None and ids is None:
        count = TOKENS if options.prompt_tokens is None else options.prompt_tokens
        checks.integer("--prompt-tokens", count, low=1)
        ids = recurring_prompt(model.config.vocab_size, count, options.seed)
    return generation.prompt_ids(model, tokenizer, text=text, ids=ids, count=None, seed=options.seed)


def _queries(text: str, tokens: int) -> list[int]:
    from tamis import checks

    if text == "all":
        return list(range(tokens))
    found = numbers("--query", text)
    for query in found:
        checks.integer("--query", query, low=-tokens, high=tokens - 1)
    return [query % tokens for query in found]


def _parameters(model: Any, options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """The model's class, its size and the plain values of its config."""
    count = sum(parameter.numel() for parameter in model.parameters())
    source = "tiny, random weights" if options.checkpoint is None else str(options.checkpoint)
    found = {"model": type(model).__name__, "weights": source, "parameters": f"{count:,}", "pages": options.cache}
    found |= {"device": machine["name"], "torch": machine["torch"]}
    config = model.config.to_dict()
    plain = {name: value for name, value in sorted(config.items()) if isinstance(value, int | float | str)}
    return found | {name: value for name, value in plain.items() if not name.startswith("_")}


def _report(inspection: "Inspection", queries: list[int], text: Callable[[int], str]) -> str:
    from tamis.lab.inspection import describe_layers, describe_needle, describe_query, layer_overlap

    layers = describe_layers(inspection)
    header = ["layer", "attends to", "top-k", "selected", "recall", "worst\ntenth", "top-1\nhit", "effective\ntop-k"]
    header += ["ties at\ncutoff", "median\ndistance", "window's\nshare"]
    parts = [render_table(header, [_row(layer) for layer in layers], "llrrrrrrrrr")]
    choosing = max((layer.get("choosing", 0) for layer in layers), default=0)
    compared = len(inspection.extent.compared)
    parts.append(
        f"{len(inspection.tokens)} tokens; {choosing} queries with context longer than top-k; "
        f"dense attention of {compared} queries; {inspection.cache} cache"
    )
    overlap = layer_overlap(inspection)
    if overlap["queries"] and len(overlap["layers"]) > 1:
        names = [str(number) for number in overlap["layers"]]
        rows = [
            (name, *("-" if value is None else f"{value:.2f}" for value in line))
            for name, line in zip(names, overlap["iou"], strict=True)
        ]
        parts.append(render_table(("IoU", *names), rows, "l" + "r" * len(names)))
    needle = describe_needle(inspection)
    if needle is not None:
        parts.append(_needle(needle))
    for query in queries:
        described = describe_query(inspection, query, text)
        lines = [
            (
                layer["layer"],
                len(layer["selected"]),
                "  ".join(f"{p['token']}@{p['position']} {p['score']:.3g}" for p in layer["selected"][:SHOWN]),
            )
            for layer in described["layers"]
        ]
        title = f"query {query}, token {printable(described['token'])}: highest scores"
        parts.append(f"{title}\n{render_table(('layer', 'selected', 'token@position score'), lines, 'lr')}")
    return "\n\n".join(parts)


def _needle(described: dict[str, Any]) -> str:
    from tamis.lab.inspection.needle import needle_sentence

    lines = [needle_sentence(described)]
    for layer in described["layers"]:
        if not layer["visible"]:
            lines.append(f"layer {layer['layer']}: not visible to the last query")
            continue
        later = f", selected by {_share(layer['later_selected'])} of {layer['later_queries']} later queries"
        lines.append(
            f"layer {layer['layer']}: rank {layer['rank']} of {layer['candidates']}, score {layer['score']:.3g}, "
            f"dense weight {_share(layer['weight'])}{later if layer['later_queries'] else ''}"
        )
    return "\n".join(lines)


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    if "recall" not in layer:
        return (str(layer["layer"]), layer["attends_to"], *("-",) * 9)
    shares = "" if layer["shares"] is None else f" of layer {layer['shares']}"
    return (
        str(layer["layer"]),
        layer["attends_to"] + shares,
        str(layer["topk"]),
        _number(layer["selected"]),
        *(_share(layer[name]) for name in ("recall", "recall_p10", "top1")),
        _number(layer["effective"]),
        str(layer["tied_queries"]),
        layer["median_distance"] or "-",
        _share(layer["window_share"]),
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _as_data(
    inspection: "Inspection",
    queries: list[int],
    text: Callable[[int], str],
    parameters: dict[str, Any],
    machine: dict[str, Any],
) -> dict[str, Any]:
    from tamis.lab.inspection import describe_layers, describe_needle, describe_query, layer_overlap

    return {
        "machine": machine,
        "model": parameters,
        "cache": inspection.cache,
        "prompt": inspection.tokens,
        "compared_queries": len(inspection.extent.compared),
        "layers": describe_layers(inspection),
        "overlap": layer_overlap(inspection),
        "needle": describe_needle(inspection),
        "queries": [describe_query(inspection, query, text) for query in queries],
    }
