"""Times of every batch size: the rows, and how the report draws them."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from tamis.lab.bench.jobs import SIZES

CPU = ("--device", "cpu", "--backend", "reference", "--against", "none", "--context", "128", "--topk", "32")


def test_every_size_is_a_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tamis.lab.bench.report.data import read_rows
    from tamis.lab.bench.report.latency import MANY_POINTS, _dense, _groups

    sizes, file = importlib.import_module("batch_sizes"), tmp_path / "rows.csv"
    assert sizes.main([*CPU, "--csv", str(file), "--heads", "2,4", "--to", "4", "--repeats", "1"]) == 0
    rows = read_rows([file])
    assert [(row.heads, row.shape) for row in rows] == [(h, f"{b}q1s128") for h in (2, 4) for b in (1, 2, 3, 4)]
    assert {row.suite for row in rows} == {SIZES}
    assert all(0 < row.error < 1e-2 for row in rows)

    # Beside rows of another suite they have a panel of their own, with linear axes where there are many.
    other = [replace(row, suite="decode") for row in rows]
    found = {group.title: group for group in _groups([*rows, *other]) if group.axis == "requests"}
    assert sorted(title.endswith("every size, top-k 32, 128 context") for title in found) == [False, True]
    many = [replace(rows[0], shape=f"{b}q1s128") for b in range(1, MANY_POINTS + 2)]
    assert [_dense(group) for group in _groups(many) if group.axis == "requests"] == [True]
    assert not any(_dense(group) for group in found.values())


def test_slices_do_not_share_tokens() -> None:
    import torch

    from tamis import PagedCache, Selection
    from tamis.lab.bench.inputs import AttendSet

    sizes = importlib.import_module("batch_sizes")
    slots = torch.arange(14, dtype=torch.int32).view(7, 2)
    numbers = torch.arange(7, dtype=torch.int32)
    whole = AttendSet(
        torch.zeros(7, 1, 576),
        (Selection(PagedCache("v32-fp8", 1, 16), slots),),
        1.0,
        512,
        1,
        numbers.view(7, 1),
        numbers,
    )
    firsts = [int(one.selections[0].slots[0, 0]) // 2 for one in sizes.slices([whole, whole], 3, 3)]
    assert firsts == [0, 3, 0]
    assert [len(one.lengths) for one in sizes.slices([whole], 3, 99)] == [3, 3]
