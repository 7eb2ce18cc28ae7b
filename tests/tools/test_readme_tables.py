"""What README says about engines, models and hardware, and its badges, against their sources."""

import csv
import re
from importlib.metadata import metadata
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

from tamis.lab.offline.triton import TARGETS
from tools import records
from tools.docs import badges, doors, engines, glance, hardware, models, results, slower, speed
from tools.docs.results import RESULTS


def lines(text: str) -> list[list[str]]:
    """The cells of a table's lines, without its header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_throughputs_are_ratios_of_medians() -> None:
    with (RESULTS / "sglang" / "h200_sglang.csv").open(newline="") as file:
        rows = {row["engine"]: row for row in csv.DictReader(file)}
    own = {"bf16": "flashmla_sparse", "fp8": "flashmla_kv"}
    found = {(race.engine.split(", ")[2], race.mode): race for race in engines.races() if "SGLang" in race.engine}
    assert len(found) == 4
    for cache, peer in own.items():
        for mode in ("eager", "graph"):
            seconds = [float(rows[f"{name}-{cache}-{mode}"]["seconds_median"]) for name in (peer, "tamis")]
            race = found[f"{cache.replace('fp8', 'FP8')} cache", mode]
            assert abs(race.throughput - seconds[0] / seconds[1]) < 1e-3
            assert int(rows[f"tamis-{cache}-{mode}"]["turns"]) >= engines.TURNS


def test_losses_of_engines_are_bold() -> None:
    table = engines.engines()
    shown = [cell for *_, cell in lines(table)]
    assert len(shown) == len({race.engine for race in engines.races()}) >= 7
    values = [float(value) for cell in shown for value in re.findall(r"[\d.]+", cell)]
    bold = [float(value) for cell in shown for value in re.findall(r"\*\*([\d.]+)\*\*", cell)]
    assert sorted(bold) == sorted(value for value in values if value < 1)
    assert 0 < len(bold) < len(values)
    assert median(values) > 0.5


def test_how_far_turns_lie_apart_is_said_from_the_rows() -> None:
    files = [csv.DictReader((RESULTS / name).read_text().splitlines()) for name in engines.FILES]
    times = [float(row["seconds_highest"]) / float(row["seconds_lowest"]) for rows in files for row in rows]
    said = " ".join(engines.spread().split())
    assert (
        f"typically takes {median(times):.1f} times as long as the fastest ({min(times):.1f} to {max(times):.1f}"
        in said
    )
    assert said.startswith("Engines are vLLM 0.25.0 and SGLang 0.5.17 with tiny models")


def test_the_table_of_indexers_has_the_ratios_of_its_throughputs() -> None:
    found = lines(engines.indexers())
    assert [line[:3] for line in found] == [["tamis", "fp8_ds_mla", "eager"], ["tamis", "fp8_ds_mla", "graph"]]
    for *_, own, ours, ratio, equal in found:
        assert abs(float(ours) / float(own) - float(ratio.strip("*"))) < 0.01
        assert equal == "100%"


def test_weights_of_an_older_try_are_not_shown() -> None:
    shown = [race for race in engines.races() if "V4" in race.engine and ", 8 heads" in race.engine]
    with (RESULTS / "vllm" / "h200_vllm_v4.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["heads"] == "8" and row["attention"] == "tamis"]
    newest = [row for row in rows if row["weights"] == rows[-1]["weights"]]
    assert len(rows) == 2 * len(newest) == 2 * len(shown)
    assert [race.throughput for race in shown] == [float(row["throughput_over_own"]) for row in newest]


def test_bytes_per_token_by_hand() -> None:
    found = {title: bytes_ for title, _, bytes_, *_ in lines(models.models())}
    assert found["DeepSeek-V3.2"] == f"{61 * (656 + 132):,} bytes"
    assert found["GLM-5"] == f"{78 * (656 + 132):,} bytes"
    assert found["A.X-K2-Light"] == f"{48 * (208 + 132):,} bytes"
    assert found["Hy4"] == f"{34 * 656 + 10 * 132:,} bytes"
    assert found["Mistral Large 4"] == f"{54 * 656 + 18 * 528 + 72 * 132:,} bytes"
    # 64 entries of 584 bytes fill a page of 256 tokens, rounded up to a multiple of 576 bytes; beside it keys of 132
    # bytes for every fourth token. In the other layers a page holds 2 entries of 128 tokens.
    page = -(-64 * 584 // 576) * 576
    coarse = -(-2 * 584 // 576) * 576
    assert found["DeepSeek-V4-Flash"] == f"{(21 * (page + 64 * 132) + 20 * coarse) / 256:,.0f} bytes"


def test_hardware_is_measured_only_where_there_are_rows() -> None:
    assert set(hardware.PRODUCTS) == set(TARGETS)
    assert set(hardware.measured()) == set(hardware.CAPABILITY)
    table = lines(hardware.hardware())
    assert [state for _, _, state, _ in table].count("**measured**") == len(set(hardware.CAPABILITY.values()))
    text = " ".join(how for *_, how in table)
    for target in set(TARGETS) - set(hardware.CAPABILITY.values()):
        assert re.search(rf"\b{target}\b", text), target
    assert [kernels for what, kernels, *_ in table if "H200" in what] == ["CUDA C++ and Triton"]
    assert {kernels for what, kernels, *_ in table if "B200" in what or "AMD" in what} == {"Triton"}


def test_hardware_says_how_many_tests_an_emulator_ran() -> None:
    files = [dict.fromkeys(("failed", "skipped", "not_run"), "0") | {"emulator": "e", "torch": "2"} for _ in "ab"]
    files[0] |= {"passed": "5", "failed": "1", "not_run": "7"}
    files[1] |= {"passed": "20", "skipped": "3"}
    said = hardware._emulated(files)
    assert said.startswith("1 failed, 25 passed, 3 skipped of 2 test files under e with torch 2; 7 others of these")
    shown = {what: (state, how) for what, _, state, how in lines(hardware.hardware())}
    assert shown["CPU, arm64 (Linux)"][0] == "emulated"
    rows = records.read(hardware.ARM64)
    passed = sum(int(row["passed"]) for row in rows)
    assert shown["CPU, arm64 (Linux)"][1].startswith(f"{passed} passed"), "failures are shown first"
    root = Path(__file__).parents[2]
    assert all((root / row["file"]).is_file() for row in rows)


def test_prompts_show_every_head_count_and_losses_in_bold() -> None:
    bf16, fp8, gathered = lines(speed.prompts())
    assert [len(line) for line in (bf16, fp8, gathered)] == [4, 4, 4]
    for line in (bf16, fp8, gathered):
        for cell in line[1:]:
            value = cell.strip("*")
            assert value == "-" or (float(value) < 1) == cell.startswith("**"), line


def test_a_loss_is_the_newest_run_of_the_default_backend_against_its_fastest_peer() -> None:
    def row(backend: str, time: str, peer: str, ratio: str, stage: str = "attend") -> dict[str, str]:
        call = {"stage": stage, "shape": "128q1s16k", "heads": "64", "topk": "2048", "window": "0"}
        return call | {
            "layout": "v32-fp8",
            "backend": backend,
            "time": time,
            "commit": time[:1],
            "peer": peer,
            "ratio": ratio,
        }

    portable = row("triton", "9a", "flashmla-sgl", "0.5")
    older = row("hopper", "1a", "flashmla-sgl", "0.8")
    slower_build, fastest = row("hopper", "2a", "flashmla-vllm", "1.3"), row("hopper", "2b", "flashmla-sgl", "0.97")
    alone = row("hopper", "2c", "", "")
    assert slower.losses([portable, older, fastest, slower_build, alone]) == [fastest]
    assert slower.losses([portable, older, row("hopper", "3a", "flashmla-sgl", "1.0")]) == []
    assert slower.losses([portable]) == [portable]


def test_every_loss_is_in_the_table_with_its_baseline() -> None:
    table = lines(slower.slower())
    shown = sum(len(shapes.split(", ")) for *_, shapes in table)
    every = slower.losses(row for name in results.names() for row in results.read(name))
    assert shown == len(every) > 0
    assert ["scores and top-k in one call", "DeepGEMM + vLLM"] in [
        [what.split(",")[0], peer] for what, _, peer, _ in table
    ]
    assert all(float(ratio) < 1 for _, span, *_ in table for ratio in span.split(" to "))


def test_the_table_at_a_glance_counts_every_comparison_and_every_loss() -> None:
    found = glance.everything()
    stages = slower.compared(row for name in results.names() for row in results.read(name))
    calls = doors.compared(doors.read())
    ratios = [float(row["ratio"]) for row in (*stages, *calls)] + [race.throughput for race in engines.races()]
    assert sorted(ratio for kind in found for ratio in kind.ratios) == sorted(ratios)
    table = lines(glance.glance())
    lost, measured = (sum(int(line[2].strip("*").split(" of ")[place]) for line in table) for place in (0, 1))
    assert (lost, measured) == (len([ratio for ratio in ratios if ratio < 1]), len(ratios))
    for _, middle, count, span, _ in table:
        low = float(span.split(" to ")[0])
        assert count.startswith("**") == (not count.startswith("0 of")), count
        assert not count.startswith("0 of") or low >= 1, span
        assert middle.startswith("**") == (float(middle.strip("*")) < 1)
    medians = [float(line[1].strip("*")) for line in table]
    assert medians == sorted(medians, reverse=True)


def test_the_sentence_under_the_plot_names_each_kind_with_a_loss() -> None:
    text, found = glance.score(), glance.everything()
    ratios = [ratio for kind in found for ratio in kind.ratios]
    assert f"In **{len([r for r in ratios if r >= 1])} of {len(ratios)}** comparisons" in text
    for kind in found:
        low = min(kind.ratios)
        assert (f"{kind.what}" in text and f"(**{low:.2f}**)" in text) or low >= 1, kind.what


def test_heads_prompts_and_builds_are_kinds_of_their_own() -> None:
    def row(shape: str, heads: str, ratio: str, peer: str = "flashmla-sgl", stage: str = "attend") -> dict[str, str]:
        return {"stage": stage, "shape": shape, "heads": heads, "layout": "v32-fp8", "peer": peer, "ratio": ratio}

    found = glance.kinds(
        [
            row("8q1s16k", "16", "2"),
            row("8q2s16k", "32", "1.5", "flashmla-vllm"),
            row("8q1s16k", "64", "1.2"),
            row("8q1s16k", "128", "0.9"),
            row("1q4096s8k", "64", "1.1"),
            row("1q4096s8k", "128", "1.3", "flashmla-gather"),
            row("8q1s16k", "64", "0.8", "deepgemm", "scores"),
            row("8q1s16k", "", "1.4", "vllm", "topk"),
            row("1q4096s8k", "", "1.6", "vllm", "topk"),
        ]
    )
    assert [(kind.what, kind.ratios, kind.baselines, kind.heads) for kind in found] == [
        ("decode over FP8 rows", [2.0, 1.5], {"FlashMLA"}, {16, 32}),
        ("decode over FP8 rows", [1.2], {"FlashMLA"}, {64}),
        ("decode over FP8 rows", [0.9], {"FlashMLA"}, {128}),
        ("prompt over FP8 rows", [1.1, 1.3], {"FlashMLA"}, {64, 128}),
        ("indexer scores, decodes", [0.8], {"DeepGEMM"}, set()),
        ("exact top-k", [1.4, 1.6], {"vLLM"}, set()),
    ]


def test_badges_say_what_the_package_says() -> None:
    said = dict(badges.claims())
    about = metadata("tamis")
    assert said["license"] == about["License-Expression"]
    assert f">={said['python'].removesuffix('+')}" == about["Requires-Python"]
    torch = next(need for need in about.get_all("Requires-Dist") or [] if re.match(r"torch\W", need))
    assert torch == f"torch>={said['torch'].removesuffix('+')}"
    assert said["measured on"] == "H200"
    words = {"".join(found.itertext()) for found in ElementTree.fromstring(badges.draw()).iter() if "text" in found.tag}
    assert {part for claim in badges.claims() for part in claim} <= words
