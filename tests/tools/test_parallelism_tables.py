"""The tables of docs/parallelism.md: shapes of a split, times between measured ones, and sums that add up."""

import re
from pathlib import Path

import pytest

from tools.docs import parallelism
from tools.docs.parallelism import SPLITS, Split, Times

PAGE = (Path(__file__).parents[2] / "docs/parallelism.md").read_text()


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_tensor_parallel_ranks_divide_heads_and_nothing_else() -> None:
    found = [(split.heads, split.data, split.words.replace("\N{NO-BREAK SPACE}", " ")) for split in SPLITS]
    assert found == [
        (16, 1, "TP 8"),
        (32, 2, "TP 4 x DP 2"),
        (64, 4, "TP 2 x DP 4"),
        (128, 8, "DP 8"),
    ]
    # DeepSeek-V3.2's matrices: q_b, kv_b and o have heads; q_a, kv_a and the indexer's three have none.
    by_heads = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    whole = 7168 * 1536 + 7168 * 576 + 1536 * 8192 + 7168 * 128 + 7168 * 64
    assert Split(1).weights == by_heads + whole
    assert Split(8).weights == by_heads // 8 + whole


def test_times_between_measured_ones_are_said_to_be_so() -> None:
    times = Times({2: 10.0, 4: 30.0})
    assert times.at(4) == (30.0, True)
    assert times.at(3) == (20.0, False)


def test_sums_add_up_and_the_smallest_is_bold() -> None:
    text, _, rate = parallelism.decodes().partition("\n\n")
    lines = cells(text)
    (terabytes,) = re.findall(r"([\d.]+) TB/s", rate)
    assert {line[5] for line in lines} == {f"{split.weights / float(terabytes) * 1e-6:.0f}" for split in SPLITS}
    assert len(lines) == len(parallelism.REQUESTS) * len(SPLITS)
    for requests in parallelism.REQUESTS:
        group = [line for line in lines if line[0] == str(requests)]
        sums = [float(line[6].strip("*")) for line in group]
        for line, total in zip(group, sums, strict=True):
            heads, own = re.fullmatch(r"(\d+) x (\d+)", line[2]).groups()
            assert int(heads) * int(own) * 8 == 128 * requests
            assert sum(float(part.strip("≈ ")) for part in line[3:6]) == pytest.approx(total, abs=2)
        assert [line[6].startswith("**") for line in group] == [total == min(sums) for total in sums]


def test_prompts_and_memory() -> None:
    for _, heads, attention, index, one, eight in cells(parallelism.prompts()):
        assert float(attention) + float(index) == pytest.approx(float(one), abs=0.02)
        assert float(eight.split("= ")[-1]) == pytest.approx(128 / int(heads) * float(one), rel=0.02)
    tokens = [float(line[4].split()[0]) for line in cells(parallelism.memory())]
    assert tokens == sorted(tokens)
    assert f"{61 * (656 + 132):,} bytes per token" in PAGE
