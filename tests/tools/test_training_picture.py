"""The picture and the table of `tamis train-demo`."""

import re

from tools.docs import training


def test_every_step_is_in_the_file_once() -> None:
    rows = training.read()
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    assert list(dict.fromkeys(row["stage"] for row in rows)) == list(training.STAGES)


def test_curves_have_a_point_for_each_measured_step() -> None:
    rows, picture = training.read(), training.draw()
    paths = [path.count("L") + 1 for path in re.findall(r'class="line" d="([^"]+)"', picture)]
    assert paths == [sum(bool(row[curve.column]) for row in rows) for curve in training.CURVES]


def test_heights_follow_the_scale() -> None:
    loss, _, recall = training.CURVES
    assert training._height(loss, loss.high, 10) == 10
    assert training._height(loss, loss.low, 10) == 10 + training.HEIGHT
    # Three of five decades from the bottom.
    assert abs(training._height(loss, loss.low * 1e3, 0) - 0.4 * training.HEIGHT) < 1e-9
    assert training._height(recall, 0.25, 0) == 0.75 * training.HEIGHT
    assert training._height(loss, 0.0, 10) == 10 + training.HEIGHT


def test_the_tables_hold_the_bars() -> None:
    for text, layer in ((training.measures(), 1), (training.measures_v4(), 0)):
        for words in (f"recall at 512 tokens, layer {layer}", "4096 tokens, fp8 cache", "random selection"):
            assert words in text
