"""Selections that must be the same in every backend, since scores are known exactly: adversarial rows and steps.

The backends run through the public functions; Triton kernels are interpreted where there is no GPU.
"""

from collections.abc import Iterator
from itertools import cycle, islice

import pytest
import torch
from seeds import seeded
from torch import Tensor

from tamis import backends
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, rows
from tamis.lab.testing import exact_steps, index_cases, oracle
from tamis.lab.testing.cases import Draw, filled_cache, to_device
from tamis.lab.testing.exact_steps import FORMATS, ExactStep, exact_step, scaled_step, step_shapes
from tamis.lab.testing.index_cases import E4M3, best_positions
from tamis.ops import index_scores, index_topk, library, topk_positions

K, LONGEST = 33, 200
SHAPES = step_shapes(K, LONGEST)


@pytest.fixture(params=["reference", "triton", pytest.param("hopper", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a backend. Without a GPU, Triton is allowed on the host."""
    library._module.cache_clear()
    if request.param == "triton" and not torch.cuda.is_available():
        monkeypatch.setattr(backends.Backend, "device_refusals", lambda *given: [])
    yield request.param
    monkeypatch.undo()
    library._module.cache_clear()


def there(backend: str, step: ExactStep) -> ExactStep:
    """The step where a backend runs."""
    return to_device(step, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def interpreted(backend: str) -> bool:
    """Whether kernels are so slow here that a test leaves some cases out."""
    return backend == "triton" and not torch.cuda.is_available()


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether scores are equal, where NaN is like NaN and -0.0 like 0.0."""
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def check(backend: str, step: ExactStep) -> None:
    """Scores, the selection from them, and the selection in one call with any workspace."""
    moved, expected = there(backend, step), step.expected()
    scores = index_scores(*moved.inputs, backend=backend)
    assert same(scores.cpu(), step.scores), step.name
    found = topk_positions(scores, moved.lengths, step.k, backend=backend)
    assert torch.equal(found.cpu(), expected), step.name
    if not interpreted(backend) or len(step.q) < 4:
        check_odd_rows(backend, step, moved)
    # 50 KB hold some tokens of a step but not all.
    for room in (50_000,) if interpreted(backend) else (1 << 28, 50_000, 1):
        found = index_topk(*moved.inputs, step.k, workspace_bytes=room, backend=backend)
        assert torch.equal(found.cpu(), expected), f"{step.name}, {room} bytes"


def check_odd_rows(backend: str, step: ExactStep, moved: ExactStep) -> None:
    """Scores in rows of an odd width, in the middle of others that stay as they are, and the selection from them."""
    width = int(step.lengths.max()) | 1
    columns = min(width, step.scores.shape[1])
    around = torch.full((len(step.q), width + 6), 7.0, device=moved.q.device)
    index_scores(*moved.inputs, out=around[:, 3 : 3 + width], backend=backend)
    assert same(around[:, 3 : 3 + columns].cpu(), step.scores[:, :columns]), step.name
    assert (around[:, :3] == 7).all()
    assert (around[:, 3 + width :] == 7).all()
    found = topk_positions(around[:, 3 : 3 + width], moved.lengths, step.k, backend=backend)
    assert torch.equal(found.cpu(), step.expected()), step.name


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_every_shape(shape: str, backend: str) -> None:
    check(backend, exact_step(shape, FORMATS[2], *SHAPES[shape], K))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_steps_of_every_format(form: exact_steps.Format, backend: str) -> None:
    lengths, tokens = SHAPES["tokens in no order"]
    check(backend, exact_step(form.name, form, lengths, tokens[:: 3 if interpreted(backend) else 1], K))


@pytest.mark.parametrize("k", [1, 8, 63, 64, 65, 200, 2048])
def test_as_many_as_are_seen_one_fewer_and_one_more(k: int, backend: str) -> None:
    lengths = [70, 201, 64]
    tokens = [(0, min(70, n)) for n in (k - 1, k, k + 1, 0, 1, 69, 70)] + [(1, min(201, k)), (1, 201), (2, 64), (2, 7)]
    if interpreted(backend):
        tokens = tokens[:3] + tokens[8:9]  # as many, one fewer, one more, and all of a longer request
    check(backend, exact_step(f"around {k}", FORMATS[2], lengths, tokens, k))


@pytest.mark.parametrize("shape", ["decodes", "tokens in no order"])
def test_scores_that_are_not_ordinary_numbers(shape: str, backend: str) -> None:
    check(backend, scaled_step(shape, FORMATS[2], *SHAPES[shape], K))


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [5001, 20001])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_long_requests(backend: str, longest: int) -> None:
    for step in exact_steps.exact_steps(2048, longest):
        check(backend, step)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("k", [512, 2048])
def test_a_chunk_of_a_long_prompt(backend: str, k: int) -> None:
    """Each pattern in every place of a group of tokens, over more keys than any buffer of candidates holds."""
    lengths = [70001, 9000]
    tokens = [(0, n) for n in range(70001 - 99, 70002)] + [(1, n) for n in range(9000 - 49, 9001)]
    for form in (FORMATS[0], FORMATS[2]):
        check(backend, exact_step(f"chunk {k} {form.name}", form, lengths, tokens, k))


def test_the_scores_are_those_of_the_definition() -> None:
    """What the cases say of themselves, in float64 from the bytes of the cache."""
    count = 0
    for step in exact_steps.exact_steps(K, LONGEST):
        if step.name.startswith("special"):
            continue  # the oracle scales keys before the relu, which is the same for positive scales alone
        exact = oracle.index_scores(step.q.float(), *step.inputs[1:]).float()
        assert same(exact, step.scores), step.name
        count += 1
    assert count >= len(SHAPES) + len(FORMATS) - 1


def test_the_steps_have_what_they_promise() -> None:
    shapes = step_shapes(K, LONGEST)
    assert {f"{drafts} tokens each" for drafts in (1, 2, 3, 5, 9)} < set(shapes)
    for lengths, tokens in shapes.values():
        assert all(length <= lengths[request] for request, length in tokens)
    assert {0, 1, K, K - 1, K + 1, -1, LONGEST} <= {length for _, length in shapes["tokens in no order"][1]}
    requests = [request for request, _ in shapes["decodes and prompts"][1]]
    assert len(set(requests[:8])) > 3, "a group of 8 tokens has several requests"
    assert {form.heads for form in FORMATS} == {1, 8, 16, 32, 64, 128}
    assert {form.layout.width for form in FORMATS} == {64, 128}
    assert {form.page_size for form in FORMATS} == {16, 32, 64, 128}
    step = exact_step("one", FORMATS[0], *shapes["decodes"], K)
    absent = (step.block_table[:, :-1] < 0) & (step.block_table[:, 1:] >= 0)
    assert absent.any(), "a page inside a request is absent"
    special = scaled_step("special", FORMATS[0], *shapes["decodes"], K).scores
    smallest = torch.finfo(torch.float32).tiny
    assert special.isnan().any()
    assert special[4][special[4] != -torch.inf].isnan().all(), "a query that holds NaN"
    assert special[6][special[6] != -torch.inf].isnan().all(), "a weight that is NaN"
    assert (special == torch.inf).any()
    assert ((special == 0) & special.signbit()).any()
    assert ((special > 0) & (special < smallest)).any()


@pytest.mark.parametrize("label", index_cases.SCORES)
@pytest.mark.parametrize("width", [1, 7, 65, 1001])
def test_rows_of_every_kind(label: str, width: int, backend: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for k in (33, max(1, width - 1)) if interpreted(backend) else (1, 33, max(1, width - 1), width, width + 1):
        scores = index_cases.SCORES[label](Draw(f"{label} {width}"), 7, width)
        lengths = torch.tensor([width, width // 2, min(k, width), min(k + 1, width), 1, 0, -3], dtype=torch.int32)
        expected = [best_positions(row, int(n), k) for row, n in zip(scores, lengths, strict=True)]
        found = topk_positions(scores.to(device), lengths.to(device), k, backend=backend)
        assert found.cpu().tolist() == expected, (k, label)


def drawn_step(number: int) -> ExactStep:
    """Ordinary numbers, whose scores depend on the order in which they are summed; nobody knows the right bits."""
    kinds = [(index_fp8(), E4M3, 64), (index_mxfp4(), E4M3, 32), (rows(torch.bfloat16, latent=128, rope=0), E4M3, 16)]
    layout, dtype, heads = kinds[number]
    draw = Draw(f"invariant {number}")
    cache = filled_cache(draw, layout, 600, 64)
    table = draw.permutation(cache.pages)[:9].int().view(3, 3)
    tokens = [(0, 150), (0, 151), (0, 152), (1, 192), (2, 191), (2, 192), (1, 3), (0, 192), (0, 153)]
    ids, lengths = (torch.tensor(column, dtype=torch.int32) for column in zip(*tokens, strict=True))
    q, weights = draw.normal(len(tokens), heads, 128).to(dtype), draw.normal(len(tokens), heads)
    return ExactStep("drawn", q, weights, cache, ids, table, lengths, K, torch.empty(0))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_token_selects_the_same_alone_in_any_batch_and_in_any_order(number: int, backend: str) -> None:
    step = there(backend, drawn_step(number))
    q, weights, cache, ids, table, lengths = step.inputs
    scores = index_scores(*step.inputs, backend=backend)
    together = index_topk(*step.inputs, K, backend=backend)
    count = len(ids)
    shuffled = torch.randperm(count, generator=seeded(number)).tolist()
    step_of_one = 5 if interpreted(backend) else 1
    batches = [[t] for t in range(0, count, step_of_one)]
    batches += [shuffled, [3, 3, 7]]
    batches += [] if interpreted(backend) else [list(range(count))[::-1], shuffled[: count // 2]]
    for batch in batches:
        some = torch.tensor(batch, device=ids.device)
        # FP8 tensors cannot be indexed on every device, so bytes are.
        mine = q.view(torch.uint8)[some].view(q.dtype)
        picked = (mine, weights[some], cache, ids[some], table, lengths[some])
        bits = index_scores(*picked, backend=backend).view(torch.int32)
        assert torch.equal(bits, scores[some].view(torch.int32)), batch
        assert torch.equal(index_topk(*picked, K, backend=backend), together[some]), batch
    for t in range(0, count, step_of_one):
        # Nor does it matter how many other requests the block table lists.
        own = table[ids[t].long() : ids[t].long() + 1]
        alone = (q[t : t + 1], weights[t : t + 1], cache, torch.zeros_like(ids[:1]), own, lengths[t : t + 1])
        bits = index_scores(*alone, backend=backend).view(torch.int32)
        assert torch.equal(bits[0], scores[t].view(torch.int32)), t
        assert torch.equal(index_topk(*alone, K, backend=backend)[0], together[t]), t


CUTS = ([1, 1, 6, 8, 64], [3, 5, 7, 9], [8, 8], [2, 63])
"""Sizes of chunks, repeated until a prompt ends."""


def check_chunks(backend: str, layout: Layout, dtype: torch.dtype, heads: int, tokens: int, keys: int, k: int) -> None:
    """The last tokens of a prompt: all at once, in chunks, as drafts and as decodes, beside other requests."""
    draw = Draw(f"chunks {layout.name} {heads} {tokens} {keys}")
    cache = filled_cache(draw, layout, keys + 64, 64)
    pages = keys // 64 + 1
    table = draw.permutation(cache.pages)[:pages].int().unsqueeze(0).repeat(2, 1)
    table[1] = table[1].flip(0)
    lengths = torch.arange(keys - tokens + 1, keys + 1, dtype=torch.int32)
    q, weights = draw.normal(tokens, heads, layout.width).to(dtype), draw.normal(tokens, heads)
    step = ExactStep("", q, weights, cache, torch.zeros(tokens, dtype=torch.int32), table, lengths, k, torch.empty(0))
    q, weights, cache, ids, table, lengths = there(backend, step).inputs
    whole = index_scores(q, weights, cache, ids, table, lengths, backend=backend).view(torch.int32)
    chosen = index_topk(q, weights, cache, ids, table, lengths, k, backend=backend)

    def compare(some: slice, ids: Tensor, table: Tensor) -> None:
        mine = (q[some], weights[some], cache, ids, table, lengths[some])
        bits = index_scores(*mine, backend=backend).view(torch.int32)
        assert torch.equal(bits, whole[some]), (some, table.shape)
        assert torch.equal(index_topk(*mine, k, backend=backend), chosen[some]), (some, table.shape)

    for cut in CUTS[: 1 if interpreted(backend) else None]:
        first = 0
        for size in islice(cycle(cut), tokens):
            if first < tokens:
                some = slice(first, first + size)
                compare(some, ids[some], table)
            first += size
    for drafts in (3,) if interpreted(backend) else (1, 2, 3, 5, 9):
        # Every request of this step holds the same pages, so that its tokens see the keys of the prompt.
        requests = -(-tokens // drafts)
        each = torch.arange(tokens, dtype=torch.int32, device=ids.device) // drafts
        compare(slice(None), each, table[:1].repeat(requests, 1))


@pytest.mark.parametrize("layout", [index_fp8(), rows(torch.bfloat16, latent=128, rope=0)], ids=lambda one: one.name)
def test_a_prompt_selects_the_same_in_chunks_as_drafts_and_as_decodes(layout: Layout, backend: str) -> None:
    check_chunks(backend, layout, torch.bfloat16, 8, 9, 150, 33)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("layout", [index_fp8(), index_mxfp4(), rows(torch.bfloat16, latent=128, rope=0)])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_long_prompt_selects_the_same_in_chunks_as_drafts_and_as_decodes(
    backend: str, layout: Layout, heads: int
) -> None:
    dtype = torch.bfloat16 if layout.scale_mode == "none" else E4M3
    check_chunks(backend, layout, dtype, heads, 300, 9001, 2048)
