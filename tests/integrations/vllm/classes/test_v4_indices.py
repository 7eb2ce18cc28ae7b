"""vLLM's index functions for V4 under their own names: the published scenarios, and cases that vLLM gets wrong."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from select_rules import mixed_rows, random_step
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.integrations.vllm.classes.v4_indices import (
    build_c128a_topk_metadata,
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
    get_compressed_slot_mapping,
)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_compressed_slots() -> None:
    out = torch.full((64,), 99)
    found = get_compressed_slot_mapping(40, int32([0, 40]), int32([280]), int32([[5, 7]]), 64, 4, out)
    assert found.data_ptr() == out.data_ptr()
    assert found[found >= 0].tolist() == [5 * 64 + n for n in (60, 61, 62, 63)] + [7 * 64 + n for n in range(6)]
    assert out[40:].eq(-1).all(), "the whole buffer is cleared"


def test_compressed_slots_of_padding_and_of_negative_pages() -> None:
    """Request 1 is padding (no length): its positions would be negative. Page -1 counts as 0, in a copy."""
    table, out = int32([[-1, 3], [4, 4]]), torch.full((12,), 99)
    found = get_compressed_slot_mapping(10, int32([0, 8, 9]), int32([8, 0]), table, 1, 4, out)
    assert found.tolist() == [-1, -1, -1, 0, -1, -1, -1, 3, -1, -1]
    assert table.tolist() == [[-1, 3], [4, 4]]
    nothing = get_compressed_slot_mapping(0, int32([0]), int32([]), table[:0], 1, 4, out)
    assert len(nothing) == 0
    assert out.eq(-1).all()


def test_padding_completes_no_entry() -> None:
    """The row behind the last token would be at the position that completes one."""
    out = torch.full((8,), 99)
    found = get_compressed_slot_mapping(5, int32([0, 3]), int32([3]), int32([[6]]), 2, 4, out)
    assert found.tolist() == [-1] * 5
    assert get_compressed_slot_mapping(5, int32([0, 4]), int32([4]), int32([[6]]), 2, 4, out).tolist()[3] == 12
    # Nor does it where every token completes one, and nor does a request without a length.
    found = get_compressed_slot_mapping(5, int32([0, 2, 3]), int32([2, 0]), int32([[6], [7]]), 2, 1, out)
    assert found.tolist() == [12, 13, -1, -1, -1]


def c128a(width: int | None = None, columns: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    buffers = [torch.full((6, columns), 77, dtype=torch.int32) for _ in range(2)]
    lengths = torch.full((6,), 77, dtype=torch.int32)
    found = build_c128a_topk_metadata(
        torch.tensor([255, 511, 383, 639]),
        128,
        2,
        int32([0, 1, 0, 1]),
        int32([[3], [5]]),
        512,
        torch.tensor([1, 1, 1, 1]),
        buffers[0],
        lengths,
        buffers[1],
        width,
    )
    return (*found, buffers[0])


def test_c128a_rows() -> None:
    decode, lengths, prefill, _ = c128a()
    assert decode.tolist() == [[1536, 1537, -1, -1], [2560, 2561, 2562, 2563]]
    assert lengths.tolist() == [2, 4]
    assert prefill.tolist() == [[0, 1, 2, -1], [0, 1, 2, 3]]


def test_c128a_rows_go_by_the_width_of_the_buffer() -> None:
    """Upstream's kernel takes its width from a default and writes into the neighbouring rows if that is too large."""
    decode, lengths, prefill, buffer = c128a(width=2, columns=4)
    assert decode.tolist() == [[1536, 1537], [2560, 2561]]
    assert lengths.tolist() == [2, 2]
    assert prefill.tolist() == [[0, 1], [0, 1]]
    assert buffer[:, 2:].eq(77).all()
    assert buffer[2:].eq(77).all()


def test_c128a_rows_of_absent_pages() -> None:
    """A page that the request does not hold is skipped and not read as page 0, which belongs to another request."""
    table = int32([[3, -1], [-2, 5]])
    rows, lengths = torch.full((3, 4), 77, dtype=torch.int32), torch.full((3,), 77, dtype=torch.int32)
    positions = torch.tensor([511, 511, 511])
    decode, counts, prefill = build_c128a_topk_metadata(
        positions, 128, 2, int32([0, 1, 1]), table, 2, torch.arange(3), rows, lengths, rows.clone()
    )
    assert decode.tolist() == [[6, 7, -1, -1], [-1, -1, 10, 11]]
    assert counts.tolist() == [4, 4]
    assert prefill.tolist() == [[0, 1, 2, 3]]
    assert table.tolist() == [[3, -1], [-2, 5]]


def test_a_ratio_of_0_is_one_of_1() -> None:
    for ratio in (0, 1):
        found = get_compressed_slot_mapping(
            3, int32([0, 3]), int32([5]), int32([[4, 6]]), 4, ratio, torch.zeros(3).long()
        )
        assert found.tolist() == [18, 19, 24]
        given = (torch.empty(2, 0, dtype=torch.int32), int32([0, 2]), int32([9]), int32([3]), 2, ratio, 0, 3, 0)
        assert combine_topk_swa_indices(*given)[0][:, :2].tolist() == [[0, 1], [1, 2]]
        window = (int32([[0, 1]]), None, None, torch.empty(0, 0, dtype=torch.int32), int32([0, 1]), int32([2]))
        rest = (int32([0]), int32([[0]]), 64, None, 64, 2, ratio, 0)
        assert build_flashinfer_mixed_sparse_indices(*window, *rest)[1].tolist() == [2]


def test_c128a_without_tokens() -> None:
    rows, lengths = torch.full((3, 4), 5, dtype=torch.int32), torch.full((3,), 5, dtype=torch.int32)
    nothing, none = torch.zeros(0, dtype=torch.int64), int32([])
    found = build_c128a_topk_metadata(nothing, 128, 0, none, int32([[1]]), 2, nothing, rows, lengths, rows.clone())
    assert [len(part) for part in found] == [0, 0, 0]
    assert rows.eq(5).all()
    assert lengths.eq(0).all(), "lengths past the decodes are zero"


def test_chosen_entries_of_invalid_tokens_count_for_nothing() -> None:
    chosen = int32([[0, 65, 3, -1], [0, 1, -1, -1], [-1, -1, -1, -1]])
    valid = torch.tensor([True, False, True, True])
    slots, lengths = compute_global_topk_indices_and_lens(
        chosen, int32([0, 1, 1, 0]), int32([[2, 9], [4, 4]]), 64, valid
    )
    assert slots.tolist() == [[128, 577, 131, -1], [-1] * 4, [-1] * 4]
    assert lengths.tolist() == [3, 0, 0]


def test_combined_rows_have_no_stale_tail() -> None:
    """Two gathered prefills; M = 20 rows each, entries in the first N = 6. The window is 5, ratio 4."""
    seq_lens, gather_lens = int32([9, 24]), int32([6, 7])
    starts = int32([30, 32, 35])  # the group's place in the batch, which does not matter
    chosen = int32([[1, 0, -1, -1], [0, 1, -1, -1], [4, 2, 0, 3], [1, 2, 3, 4], [5, 4, 3, 2]])
    slots, lengths = combine_topk_swa_indices(chosen, starts, seq_lens, gather_lens, 5, 4, 4, 20, 6)
    assert slots.shape == (5, 128)
    expected = []
    for row, (k, p) in enumerate([(0, 7), (0, 8), (1, 21), (1, 22), (1, 23)]):
        picked = min((p + 1) // 4, 4)
        line = [k * 20 + int(n) for n in chosen[row, :picked]]
        line += [k * 20 + 6 + x - int(seq_lens[k] - gather_lens[k]) for x in range(max(0, p - 4), p + 1)]
        expected.append(line)
        assert lengths[row] == len(line)
        assert slots[row].tolist() == line + [-1] * (128 - len(line))
    assert [len(line) for line in expected] == [7, 7, 9, 9, 9]


def test_combined_rows_without_entries() -> None:
    slots, lengths = combine_topk_swa_indices(
        torch.empty(3, 0, dtype=torch.int32), int32([0, 3]), int32([3]), int32([3]), 2, 1, 0, 3, 0
    )
    assert slots[:, :3].tolist() == [[0, -1, -1], [0, 1, -1], [1, 2, -1]]
    assert lengths.tolist() == [1, 2, 2]


def test_mixed_rows() -> None:
    """Width 8, window 4, a decoded request of 4 tokens, whose slots are copied; a prefill with entries behind."""
    decode = int32([[0, 1, 2, 3]])
    common = (int32([0, 1, 3]), int32([4, 9]), int32([0, 1, 1]), int32([[0], [2]]), 64)
    slots, lengths = build_flashinfer_mixed_sparse_indices(
        decode, int32([[0, -1, -1]]), None, int32([[1, 0, 7], [0, 1, 7]]), *common, int32([[5], [6]]), 16, 4, 4, 3,
        True, torch.tensor([True]),
    )  # fmt: skip
    assert slots.tolist() == [
        [0, 1, 2, 3, 80, -1, -1, -1],
        [132, 133, 134, 135, 97, 96, -1, -1],
        [133, 134, 135, 136, 96, 97, -1, -1],
    ]
    assert lengths.tolist() == [5, 6, 6]


@pytest.mark.parametrize("lengths", [None, [2, 0]])
def test_mixed_rows_in_buffers_of_the_caller(lengths: list[int] | None) -> None:
    """Global slots of decodes, with lengths or without: then all of their columns count. Nothing old is left behind."""
    rows, counts = torch.full((6, 12), 77, dtype=torch.int32), torch.full((6,), 77, dtype=torch.int32)
    found = build_flashinfer_mixed_sparse_indices(
        int32([[0, 1, 2, 3], [4, -1, -1, -1]]), int32([[8, 9, -1], [-1, -1, -1]]), lengths and int32(lengths),
        torch.empty(0, 3, dtype=torch.int32), int32([0, 1, 2]), int32([400, 1]), int32([0, 1]), int32([[0], [2]]), 64,
        int32([[5], [6]]), 2, 4, 128, 0, out=(rows, counts),
    )  # fmt: skip
    assert [part.data_ptr() for part in found] == [rows.data_ptr(), counts.data_ptr()]
    assert found[0].tolist() == [[0, 1, 2, 3, 8, 9, *[-1] * 6], [4, *[-1] * 11]]
    assert found[1].tolist() == ([7, 7] if lengths is None else [6, 4])
    assert rows[2:].eq(77).all()


def test_mixed_rows_of_a_layer_with_a_window_only() -> None:
    slots, lengths = build_flashinfer_mixed_sparse_indices(
        int32([[0, 1, 2, 3, -1, -1, -1, -1]]), None, None, torch.empty(0, 0, dtype=torch.int32), int32([0, 1]),
        int32([4]), int32([0]), int32([[0]]), 64, None, 64, 4, 1, 0,
    )  # fmt: skip
    assert slots.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1]]
    assert lengths.tolist() == [8]


@given(random_step(prefill=True), st.integers(1, 5), st.sampled_from(["window", "numbers", "slots", "counted"]))
@settings(max_examples=80, deadline=None)
def test_mixed_rows_of_any_step(step: Any, ratio: int, form: str) -> None:
    """Against the rules spelled out token by token, in buffers that hold something else."""
    inputs = step.mixed_inputs(form)
    columns = inputs["decode_swa_indices"].shape[1] + ceil_div(max(step.chosen.shape[1], 2), 4) * 4
    out = (torch.full((step.tokens, columns), 77).int(), torch.full((step.tokens,), 77).int())
    topk = 0 if form == "window" else step.chosen.shape[1]
    slots, lengths = build_flashinfer_mixed_sparse_indices(
        **inputs,
        swa_block_size=step.page_size,
        compressed_block_size=2,
        window_size=step.window,
        compress_ratio=ratio,
        topk=topk,
        out=out,
        **step.mixed_options(form),
    )
    expected = mixed_rows(step, form, columns, window=step.window, ratio=ratio, topk=topk)
    assert slots.tolist() == expected.rows
    assert lengths.tolist() == expected.lengths


def test_mixed_rows_that_cannot_be() -> None:
    rows, table = int32([[0, 0]]), int32([[1]])
    step = (rows[:0], None, None, rows, int32([0, 1]), int32([4]), int32([0]), table, 4)
    with pytest.raises(ValueError, match="compressed_block_table must be given where entries are numbers"):
        build_flashinfer_mixed_sparse_indices(*step, None, 4, 2, 4, 2)
    with pytest.raises(ValueError, match=r"out\[0\] must be at least 4 columns wide, got 2"):
        build_flashinfer_mixed_sparse_indices(*step, table, 4, 2, 4, 2, out=(rows, int32([0])))


def test_mixed_rows_of_unknown_requests() -> None:
    """Nothing is read past a table: such tokens have window and entries of -1."""
    ids = int32([2**31 - 1, -(2**31), -1, 2])
    slots, lengths = build_flashinfer_mixed_sparse_indices(
        int32([[5, 6]] * 2), int32([[0, 1]] * 2), None, int32([[0, 1]] * 2), int32([0, 2, 4]), int32([9, 9]), ids,
        int32([[1], [2]]), 64, int32([[3], [4]]), 64, 2, 4, 2, True,
    )  # fmt: skip
    assert slots.tolist() == [[5, 6, -1, -1, -1, -1]] * 2 + [[-1] * 6] * 2
    assert lengths.tolist() == [2] * 4
