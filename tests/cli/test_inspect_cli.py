"""`tamis inspect` end to end: tables, JSON, errors; its page in a real browser."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
import torch

from tamis.cli import main

transformers = pytest.importorskip("transformers")

from tamis.cli.inspect import recurring_prompt, token_text  # noqa: E402
from tamis.lab.inspection import Inspection, render_page  # noqa: E402
from tamis.lab.inspection.needle import NeedleNotes  # noqa: E402
from tamis.lab.inspection.notes import Extent, LayerNotes  # noqa: E402
from tamis.lab.inspection.statistics import dense_shares  # noqa: E402
from tamis.model.spec import LayerSpec  # noqa: E402

SHORT = ("--device", "cpu", "--prompt-tokens", "130")
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
needs_browser = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is one")


@pytest.mark.parametrize(("model", "layers"), [("v32", 3), ("glm", 3), ("v4", 1), ("mistral-large4", 4)])
def test_tables_json_and_page(model: str, layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    marked = ("--query", "80,-1", "--needle", "20")
    assert main(["inspect", "--model", model, *SHORT, "--html", str(page), *marked]) == 0
    text = capsys.readouterr().out
    for words in (
        "recall",
        "top-1",
        "effective",
        "ties at",
        "cutoff",
        "median",
        "query 80, token",
        "query 129, token",
        "The needle at position 20 is selected by",
        "rank",
        str(page),
    ):
        assert words in text
    assert ("IoU" in text) == (layers > 1)
    assert main(["inspect", "--model", model, *SHORT, *marked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["layer"] for layer in found["layers"]] == list(range(max(layers, 3)))
    assert sum("recall" in layer for layer in found["layers"]) == layers
    assert len(found["prompt"]) == found["compared_queries"] == 130
    assert [query["query"] for query in found["queries"]] == [80, 129]
    assert len(found["queries"][1]["layers"]) == layers
    assert found["model"]["model"].endswith(("ForCausalLM", "ForConditionalGeneration"))
    assert found["html"] is None
    assert isinstance(found["model"]["parameters"], int)
    low, high = next(layer for layer in found["layers"] if "recall" in layer)["median_distance"]
    assert 0 <= low <= high < 130
    assert found["needle"]["position"] == 20
    assert len(found["needle"]["layers"]) == layers
    html = page.read_text(encoding="utf-8")
    assert ", random weights · tamis inspect</title>" in html
    assert "Random weights: these selections say nothing about a trained model." in html
    assert "The needle at position 20 is selected by" in html
    assert ("Empty because only layer 1 selects, and an overlap needs two" in html) == (layers == 1)
    assert ('id="chart-parts"' in html) == (model == "v4")
    # The page loads nothing: its only addresses are XML namespaces.
    assert set(re.findall(r"https?://[\w./]+", html)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""<(?:script|img|link)[^>]+(?:src|href)=["'](?!data:)""", html)


def test_the_trained_model_finds_its_needle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["inspect", "--device", "cpu", "--html", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["prompt"]) == 512 == 8 * found["model"]["index_topk"]
    assert found["model"]["weights"] == "tiny, trained by tamis train-demo"
    assert min(layer["recall"] for layer in found["layers"]) >= 0.95
    needle = found["needle"]
    # The value stands behind the key that the prompt ends with, and the second layer attends to it.
    assert found["prompt"][needle["position"] - 1] == found["prompt"][-1]
    assert 1 in needle["selected_by"]
    assert needle["layers"][1]["weight"] > 0.9
    html = page.read_text(encoding="utf-8")
    assert ", trained by tamis train-demo · tamis inspect</title>" in html
    assert "random weights" not in html.lower()
    assert f"The needle at position {needle['position']:,} is selected by" in html


def test_the_trained_v4_model_finds_its_needle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", "cpu", "--model", "trained-v4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["weights"] == "tiny, trained by tamis train-demo"
    assert [layer["recall"] >= 0.95 for layer in found["layers"] if "recall" in layer] == [True]
    assert found["prompt"][found["needle"]["position"] - 1] == found["prompt"][-1]
    assert 1 in found["needle"]["selected_by"]


def test_another_needle_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", "cpu", "--prompt-tokens", "100", "--needle", "-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needle"]["position"] == 99


def test_every_query_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", "cpu", "--prompt-ids", "5,6,7,8", "--query", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [sorted(p["position"] for p in q["layers"][1]["selected"]) for q in found["queries"]] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "nowhere"], "a directory with a config.json"),
        (["--model", "v32", "--prompt", "a word"], "Use --prompt-ids"),
        (["--prompt-file", "nowhere.txt"], "cannot be read"),
        (["--prompt-ids", "1,x"], "--prompt-ids must be numbers joined by commas"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be >= 1"),
        (["--prompt-tokens", "9"], "--prompt-tokens must be at least 24"),
        (["--model", "glm", "--prompt-tokens", "9", "--query", "9"], "--query must be between -9 and 8"),
        (["--model", "v32", "--prompt-tokens", "9", "--needle", "-10"], "--needle must be between -9 and 8"),
        (["--query", "last"], "--query must be numbers joined by commas"),
        (["--compared-queries", "0"], "--compared-queries must be >= 1"),
        (["--html", "nowhere/page.html"], "--html must be a file in an existing folder"),
        (["--backend", "nonesuch"], "--backend must be one of auto"),
    ],
)
def test_wrong_input(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", "cpu", *options]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.splitlines()[-1].startswith("tamis: error: ")
    assert message in found.err


def test_made_up_prompts_recur() -> None:
    tokens = recurring_prompt(4096, 500, 3)
    assert len(tokens) == 500
    assert len(set(tokens)) < 250
    assert tokens == recurring_prompt(4096, 500, 3) != recurring_prompt(4096, 500, 4)
    assert len(recurring_prompt(8, 1, 0)) == 1


def test_tokens_are_shown_on_one_line() -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return [" word", "\n", " "][ids[0]]

    assert [token_text(Tokenizer())(number) for number in range(3)] == ["word", "⏎", "␣"]
    assert token_text(None)(7) == "7"


def made_up(tokens: int, topk: int, layers: int, ratio: int = 1) -> Inspection:
    """Selections with a known pattern: the newest candidates, and every 16th of the others as far as top-k allows."""
    kind: dict[str, Any] = {"index_heads": 1, "index_dim": 128}
    if ratio > 1:
        kind |= {"window": 128, "kind": "overlapping", "compress": ratio}
    specs = [LayerSpec(heads=1, topk=topk, **kind) for _ in range(layers)]
    extent = Extent.plan(specs, tokens, 32, [tokens - 1])
    notes = LayerNotes(0, specs[0], extent)
    for own in torch.arange(tokens).split(2048):
        visible = (own + 1) // ratio
        near = visible[:, None] - 1 - torch.arange(topk // 2)
        far = torch.arange(topk - topk // 2) * 16 + own[:, None] % 16
        places = torch.cat((near, torch.where(far <= near[:, -1:] - 1, far, -1)), dim=1)
        places = torch.where(places >= 0, places, 10**9).sort(1).values
        notes.add_selection(own, visible, torch.where(places < 10**9, places, -1).int(), None)
        at = notes.compared_among(own)
        logits = torch.zeros(len(at), 1, notes.candidates)
        logits.masked_fill_((torch.arange(notes.candidates) >= visible[at, None])[:, None], -torch.inf)
        notes.add_shares(own[at], dense_shares(logits, torch.ones_like(logits[:, 0], dtype=torch.bool)), None)
    # A score is the position over the length of the prompt.
    notes.scores = np.maximum(notes.rows, 0).astype(np.float32) / tokens
    notes.best = np.where(notes.counts > 0, np.arange(notes.counts.shape[1]) / tokens, -np.inf).astype(np.float32)
    copies = [copy.copy(notes) for _ in specs]
    for number, one in enumerate(copies):
        one.number = number
    return Inspection([number % 1000 for number in range(tokens)], specs, copies, extent, "fp8")


def written(inspection: Inspection, file: Path) -> Path:
    text = ["<b>", "</script>", "é&"]
    page = render_page(
        inspection,
        title="Model </title><script>",
        text=lambda token: text[token] if token < 3 else f"t{token}",
        parameters={"hidden_size": 64, "note": "<i>"},
    )
    file.write_text(page, encoding="utf-8")
    return file


def canvas_box(window: browser.Browser) -> tuple[float, float, float, float]:
    window.run("document.getElementById('heat').scrollIntoView({block: 'center'})")
    left, top, width, height = window.run(
        "const r = document.getElementById('heat').getBoundingClientRect(); return [r.left, r.top, r.width, r.height]"
    )
    return left, top, width, height


def spot(window: browser.Browser, query: int, token: int, tokens: int) -> tuple[float, float]:
    """The screen coordinates of a pair while the whole prompt is shown."""
    left, top, width, height = canvas_box(window)
    scale = min(width - 74, height - 46) / tokens
    return left + 68 + (token + 0.5) * scale, top + 40 + (query + 0.5) * scale


@needs_browser
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    page = written(made_up(256, 32, 2), tmp_path / "page.html")
    with browser.open_browser(tmp_path / "profile") as window:
        window.open(page)
        window.wait("document.body.dataset.shown === '0'")
        assert "random" not in window.run("return document.body.innerText").split("Model")[0].lower()
        for element in ("heat", "mini", "scale", "layer", "modes", "layers", "parameters"):
            assert window.run("return document.getElementById(arguments[0]) !== null", element), element
        for chart in ("layers", "position", "distance", "overlap"):
            assert window.run(f"return document.querySelectorAll('#chart-{chart} svg *').length") > 8, chart
        assert window.run("return document.title") == "Model </title><script> · tamis inspect"
        assert "Model </title><script>" in window.run("return document.querySelector('h1').textContent")
        assert window.run("return document.querySelector('#picked h3').textContent") == "Query 255 selects 31"

        window.point(*spot(window, 200, 190, 256))  # among the newest 16
        window.wait("!document.getElementById('tip').hidden")
        tip = window.run("return document.getElementById('tip').innerText")
        assert "t200 at 200" in tip
        assert "t190 at 190" in tip
        assert "score\n0.742, rank 11 of 28" in tip  # 190 / 256
        assert "distance\n10" in tip
        window.screenshot(SCREENSHOTS / "inspect-hover.png", whole=False)
        window.point(*spot(window, 200, 181, 256))
        window.wait("document.getElementById('tip').innerText.includes('not selected')")
        window.point(*spot(window, 100, 200, 256))
        window.wait("document.getElementById('tip').innerText.includes('cannot see')")

        window.point(*spot(window, 200, 190, 256), click=True)
        window.wait("document.querySelector('#picked h3').textContent === 'Query 200 selects 28'")
        before = pixels(window)
        window.point(*spot(window, 200, 190, 256), wheel=-400)
        window.wait(f"({PIXELS}) !== {before}")
        zoomed = pixels(window)
        window.press("#heat", "+")
        window.wait(f"({PIXELS}) !== {zoomed}")
        nearer = pixels(window)
        left, top, width, height = canvas_box(window)
        window.drag((left + width / 2, top + height / 2), (left + width / 2 + 90, top + height / 2 + 40))
        window.wait(f"({PIXELS}) !== {nearer}")
        window.press("#heat", "0")
        window.wait(f"({PIXELS}) === {before}")

        window.run("document.querySelector('#modes input[value=share]').click()")
        window.point(*spot(window, 200, 190, 256))
        window.wait("document.getElementById('tip').innerText.includes('selected\\nyes')")
        # Dense attention of the made-up layers is uniform, and was computed for one query in eight.
        window.run("document.querySelector('#modes input[value=mass]').click()")
        window.wait("document.getElementById('scale-name').textContent === \"Dense attention's weight\"")
        window.point(*spot(window, 199, 190, 256))
        window.wait("document.getElementById('tip').innerText.includes('dense weight\\n0.50%')")
        assert "score" not in window.run("return document.getElementById('tip').innerText")
        window.point(*spot(window, 200, 190, 256))
        window.wait("document.getElementById('tip').innerText.includes('not computed')")
        window.run("document.querySelector('#layers tr[data-layer=\"1\"]').click()")
        window.wait("document.body.dataset.shown === '1' && document.getElementById('layer').value === '1'")
        window.screenshot(SCREENSHOTS / "inspect.png")
        window.dark()
        window.run("document.querySelector('#modes input[value=score]').click()")
        window.screenshot(SCREENSHOTS / "inspect-dark.png")
        for width in (400, 800, 1400):
            assert window.faults(width) == [], width
        assert window.console() == []


PIXELS = """(() => {
  let sum = 0;
  for (const c of document.getElementById('heat').toDataURL()) sum = (sum * 31 + c.charCodeAt(0)) % 2147483647;
  return sum;
})()"""
"""A hash of the canvas's pixels."""


def pixels(window: browser.Browser) -> int:
    window.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found: int = window.run(f"return {PIXELS}")
    return found


def v4_like() -> Inspection:
    """Two layers that select entries, with a needle, and the shares of V4's attention."""
    found = made_up(256, 16, 2, 4)
    for notes in found.layers:
        notes.parts[:] = np.array([0.5, 0.3, 0.15, 0.05], np.float32)[:, None]
        notes.needle = NeedleNotes(41, 4, 256)
        notes.needle.visible[44:] = True
    found.layers[1].needle.selected[-1] = True
    return dataclasses.replace(found, needle=41)


@needs_browser
def test_parts_and_needle_of_v4_in_a_browser(tmp_path: Path) -> None:
    with browser.open_browser(tmp_path / "profile") as window:
        window.open(written(v4_like(), tmp_path / "page.html"))
        window.wait("document.body.dataset.shown === '0'")
        told = "The needle at position 41 is selected by layer 1 for the last query (1 of 2 that select)."
        assert told in window.run("return document.getElementById('needle').innerText")
        # Four parts, told apart by pattern as well as by colour, each in the legend.
        bars = "document.querySelectorAll('#chart-parts > svg g:first-of-type rect')"
        patterns = window.run(f"return [...{bars}].map((bar) => bar.getAttribute('fill'))")
        assert len(set(patterns)) == 4
        assert sum(fill.startswith("url(") for fill in patterns) == 3
        legend = window.run("return document.querySelector('#chart-parts .key').innerText")
        assert legend.split("\n") == ["window", "selected entries", "entries not selected", "sink"]
        assert window.faults(400) == []
        assert window.console() == []


@needs_browser
def test_a_page_with_little_to_show(tmp_path: Path) -> None:
    with browser.open_browser(tmp_path / "profile") as window:
        window.open(written(made_up(1, 8, 1), tmp_path / "one.html"))
        window.wait("document.querySelector('#picked h3')?.textContent === 'Query 0 selects 1'")
        assert window.run("return document.getElementById('chart-overlap').innerText") == (
            "Empty because only layer 0 selects, and an overlap needs two selections."
        )
        nothing = LayerSpec(heads=1, window=128, kind="window")
        empty = Inspection([5, 6], [nothing], [], Extent.plan([nothing], 2, 1, []), "fp8")
        window.open(written(empty, tmp_path / "none.html"))
        window.wait("document.querySelector('#layers tr.flat')")
        assert window.console() == []


@needs_browser
@pytest.mark.parametrize(("topk", "layers", "ratio"), [(64, 3, 1), (1024, 2, 4)])
def test_sixteen_thousand_tokens_stay_usable(topk: int, layers: int, ratio: int, tmp_path: Path) -> None:
    page = written(made_up(16384, topk, layers, ratio), tmp_path / "page.html")
    assert page.stat().st_size < 20e6
    with browser.open_browser(tmp_path / "profile") as window:
        window.open(page)
        window.wait("document.body.dataset.shown === '0'")
        window.point(*spot(window, 12000, 11990, 16384))
        window.wait("document.getElementById('tip').innerText.includes('score')")
        # The time of a frame at every magnification.
        times = window.run(
            """
            const canvas = document.getElementById('heat'), times = [], zoom = document.getElementById('in');
            for (let step = 0; step < 12; step++) {
              await new Promise((done) => setTimeout(done, 0));
              const began = performance.now();
              zoom.click();
              await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
              times.push(performance.now() - began);
            }
            return times;
            """
        )
        assert float(np.median(times)) < 700, times
        window.screenshot(SCREENSHOTS / f"inspect-16k-{topk}-{ratio}.png", whole=False)
        assert window.console() == []
