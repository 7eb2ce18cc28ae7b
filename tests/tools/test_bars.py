"""Plots of speedups: bars up from 1 for wins, down from 1 for losses, and the sentence that counts them."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tools.docs import doors, selecting, speed
from tools.docs.bars import Group, Panel, Scale, draw_rows

BAR = re.compile(r'<rect class="(win|loss)" x="[\d.]+" y="([\d.]+)" width="19" height="([\d.]+)"')


def bars(picture: str) -> list[tuple[str, float, float]]:
    """Kind, upper end and lower end of each bar."""
    return [(kind, float(top), float(top) + float(height)) for kind, top, height in BAR.findall(picture)]


def test_wins_stand_on_one_and_losses_hang_from_it() -> None:
    text = draw_rows("title", [], [[Panel("decode", "requests", [Group("16 heads", [("1", 2.0), ("8", 0.5)])])]])
    (up, top, foot), (down, head, tip) = bars(text)
    assert (up, down) == ("win", "loss")
    assert foot == pytest.approx(head, abs=0.1)
    # A win by a factor is as long as a loss by the same factor.
    assert foot - top == pytest.approx(tip - head, abs=0.2)
    words = ["".join(found.itertext()) for found in ElementTree.fromstring(text).iter() if found.tag.endswith("text")]
    assert {"decode", "requests", "16 heads", "2.00", "0.50"} <= set(words)


def test_the_scale_holds_every_speedup_and_its_labels_do_not_touch() -> None:
    scale = Scale.around([0.76, 2.15], 150)
    assert (scale.low, scale.high) == (0.7, 2.5)
    assert scale.below_top(2.5) == 0
    assert scale.below_top(0.7) == pytest.approx(150)
    places = sorted(scale.below_top(tick) for tick in scale.ticks())
    assert min(b - a for a, b in pairwise(places)) >= 12
    assert 1 in Scale.around([1.3, 1.4], 150).ticks()


def test_the_plot_has_a_bar_for_each_row_and_the_sentence_counts_them() -> None:
    rows = doors.compared(doors.read())
    expected = [float(row["ratio"]) for row in rows if row in doors.in_series(rows) or doors.is_prompt(row)]
    drawn = bars(speed.draw())
    slower = len([1 for kind, _, _ in drawn if kind == "loss"])
    assert len(drawn) >= len(expected) > 30
    assert slower >= len([1 for ratio in expected if ratio < 1])
    text = speed.losses()
    every = f"In all {len(drawn)} measurements of the plot, tamis is faster."
    some = f"Of the {len(drawn)} measurements in the plot, tamis is faster in {len(drawn) - slower} and slower in"
    assert text.startswith(some if slower else every)
    assert (f"slower in {slower}:" in text) == (slower > 0)


def test_the_plot_of_selecting_has_the_rows_with_a_baseline() -> None:
    text = selecting.draw_speed()
    ElementTree.fromstring(text)
    assert "against DeepGEMM" in text
    compared = [(stage, peer) for stage, peer, _ in selecting.PLOTTED]
    rows = [row for row in selecting.read(selecting.FILE) if (row["stage"], row["peer"]) in compared and row["ratio"]]
    assert len(bars(text)) == len(rows) > 10
