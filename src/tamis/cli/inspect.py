"""`tamis inspect`: show which tokens a model's layers select, and how much of dense attention these cover."""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis._extras import install_command
from tamis.cli.data import print_json
from tamis.cli.machine import check_backend, describe_machine, let_waiting_threads_sleep, machine_line, pick_device
from tamis.cli.model import (
    add_model_options,
    check_model_options,
    check_words,
    is_trained,
    load_model,
    model_titles,
    synthetic_question,
)
from tamis.cli.options import check_file
from tamis.cli.parser import OK, Subcommands, add_command
from tamis.cli.progress import Progress, waiting
from tamis.cli.table import render_table
from tamis.cli.text import printable
from tamis.cli.values import LARGEST, queries, whole, wholes

if TYPE_CHECKING:
    from tamis.cli.hub import Source
    from tamis.lab.inspection import Inspection

TOKENS = 512
SHOWN = 6
"""Number of selected tokens per layer that the table of a query shows."""

DETAILS = f"""\
Runs a prompt once through a model whose attention runs through tamis, and reports, for each indexed layer, which tokens
every query selects and how much of the dense attention mass they cover. The model is a checkpoint of
{model_titles()}.
Without --checkpoint it is the tiny model that `tamis train-demo` made, and without a prompt it gets one that states
values of keys and ends with a key; the needle is its value. With another --model the model has random weights, and
without a prompt it gets random passages that recur. Each query can attend to n candidates (tokens, or compressed
4-token entries in V4); the indexer keeps the top k.

- recall: share of dense attention's weight on the selected candidates, mean over heads; also of the worst tenth
- top-1 hit: how often a head's heaviest candidate is selected
- effective top-k: perplexity (exp of entropy) of the attention weights over the selected tokens
- ties at cutoff: queries where the k-th score was tied, so position broke the tie
- IoU: intersection over union of two layers' selections

These are means over queries with more candidates than top-k; the others select everything. Dense attention is computed
from the same cached rows, for --compared-queries evenly spaced queries, in chunks: memory does not grow with the square
of the prompt. V4 layers select compressed entries, so recall is of the weight on entries, and the window's share is
shown beside it; layers with a window only, or that attend to every entry, select nothing. GLM-5.3-Flash selects whole
groups of tokens: each token has its group's score, and tokens of the incomplete last group, which are always selected,
are listed with the lowest selected score. Its layers of linear attention select nothing.

Needs transformers: {install_command("transformers")}."""

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
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the prompt; needs a checkpoint with a tokenizer, or the words of a trained model",
    )
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="text file with the prompt")
    prompt.add_argument("--prompt-ids", type=wholes(0), metavar="N,...", help="the prompt as token ids")
    prompt.add_argument(
        "--prompt-tokens", type=whole(1), metavar="N", help=f"length of the synthetic prompt (default: {TOKENS})"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report to this file")
    parser.add_argument(
        "--query",
        type=queries,
        metavar="N,...",
        default=[-1],
        help="queries to list, or all; negative numbers count from the end (default: -1)",
    )
    parser.add_argument(
        "--needle",
        type=whole(-LARGEST),
        metavar="POSITION",
        help="position in the prompt to follow: which layers select it, its rank and score (default: none, or the "
        "answer in the trained model's own prompt)",
    )
    parser.add_argument(
        "--compared-queries",
        type=whole(1),
        default=2048,
        metavar="N",
        help="number of queries to compare with dense attention (default: 2048)",
    )


def run(options: argparse.Namespace) -> int:
    """Inspect, and print the tables or the JSON object."""
    check_model_options(options)
    text = _given_text(options)
    check_file("--html", options.html)
    let_waiting_threads_sleep()
    device = pick_device(options.device)
    check_backend(options.backend, device)
    model, tokenizer, source = load_model(options, device)
    from tamis import checks
    from tamis.lab.inspection import inspect_model

    check_words(options, text)
    question = None if text is not None else synthetic_question(options, TOKENS)
    ids = options.prompt_ids if question is None else question.prompt
    tokens = _prompt(options, text, ids, model, tokenizer)
    needle = options.needle if options.needle is not None or question is None else question.needle
    chosen = _chosen(options.query, len(tokens))
    if options.needle is not None:
        checks.integer("--needle", options.needle, low=-len(tokens), high=len(tokens) - 1)
    with Progress("queries", "reading the prompt") as progress:
        inspection = inspect_model(
            model,
            tokens,
            cache=options.cache,
            backend=options.backend,
            compared_queries=options.compared_queries,
            queries=chosen,
            needle=needle,
            report=progress.update,
        )
    shown = token_text(tokenizer)
    machine = describe_machine(device)
    parameters = _parameters(model, options, machine, source)
    if options.html is not None:
        _write_page(options, inspection, shown, parameters, random_weights=source is None and not is_trained(options))
    if options.json:
        data = _as_data(inspection, chosen, shown, parameters, machine)
        data |= {"checkpoint": None if source is None else source.given}
        data |= {"revision": None if source is None else source.revision}
        print_json("inspect", True, data | {"html": None if options.html is None else str(options.html)})
        return OK
    print(machine_line(machine))
    if source is not None:
        print(f"checkpoint: {printable(source)}")
    print(f"\n{_report(inspection, chosen, shown)}")
    if options.html is not None:
        print(f"\nreport: {printable(options.html)}")
    return OK


def _write_page(
    options: argparse.Namespace,
    inspection: "Inspection",
    text: Callable[[int], str],
    parameters: dict[str, Any],
    *,
    random_weights: bool,
) -> None:
    from tamis.lab.html import write_whole
    from tamis.lab.inspection import render_page

    with waiting("writing the page"):
        page = render_page(
            inspection,
            title=f"{parameters['model']}{', trained by tamis train-demo' if is_trained(options) else ''}",
            text=text,
            parameters=parameters | {"parameters": f"{parameters['parameters']:,}"},
            random_weights=random_weights,
        )
        write_whole(options.html, page)


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


def _given_text(options: argparse.Namespace) -> str | None:
    if options.prompt_file is None:
        return options.prompt  # type: ignore[no-any-return]
    try:
        return options.prompt_file.read_text(encoding="utf-8")  # type: ignore[no-any-return]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt-file {options.prompt_file} cannot be read: {error}") from error


def _prompt(
    options: argparse.Namespace, text: str | None, ids: list[int] | None, model: Any, tokenizer: Any
) -> list[int]:
    from tamis.lab import generation

    if text is None and ids is None:
        count = TOKENS if options.prompt_tokens is None else options.prompt_tokens
        ids = recurring_prompt(model.config.get_text_config().vocab_size, count, options.seed)
    return generation.prompt_ids(model, tokenizer, text=text, ids=ids, count=None, seed=options.seed)


def _chosen(found: list[int] | None, tokens: int) -> list[int]:
    """The queries to list, counted from the beginning; None stands for all."""
    from tamis import checks

    if found is None:
        return list(range(tokens))
    for query in found:
        checks.integer("--query", query, low=-tokens, high=tokens - 1)
    return [query % tokens for query in found]


def _parameters(
    model: Any, options: argparse.Namespace, machine: dict[str, Any], source: "Source | None"
) -> dict[str, Any]:
    """The model's class, its size and the plain values of its config."""
    count = sum(parameter.numel() for parameter in model.parameters())
    weights = str(source)
    if source is None:
        weights = "tiny, trained by tamis train-demo" if is_trained(options) else "tiny, random weights"
    found = {"model": type(model).__name__, "weights": weights, "parameters": count, "pages": options.cache}
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


def _median_range(layer: dict[str, Any]) -> dict[str, Any]:
    """The range of distances with the median as two numbers; the tables show it as `8 to 15`."""
    shown = layer.get("median_distance")
    if shown is None:
        return {}
    numbers = [int(word) for word in shown.split(" to ")]
    return {"median_distance": [numbers[0], numbers[-1]]}


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
        "layers": [layer | _median_range(layer) for layer in describe_layers(inspection)],
        "overlap": layer_overlap(inspection),
        "needle": describe_needle(inspection),
        "queries": [describe_query(inspection, query, text) for query in queries],
    }
