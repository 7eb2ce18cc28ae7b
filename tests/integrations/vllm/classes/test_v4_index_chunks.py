"""How prefills are divided into chunks of index keys."""

from tamis.integrations.vllm.classes.v4_index_chunks import chunk_index_prefills


def test_chunks_of_index_keys() -> None:
    def cut(keys: list[int], queries: list[int], key_budget: int, score_budget: int) -> list[tuple[int, ...]]:
        found = chunk_index_prefills(keys, queries, key_budget=key_budget, score_budget=score_budget)
        return [(c.first, c.end, c.keys, c.queries.start, c.queries.stop) for c in found]

    assert cut([10, 20, 5], [4, 4, 4], 100, 1000) == [(0, 3, 35, 0, 12)]
    assert cut([10, 20, 5], [4, 4, 4], 30, 1000) == [(0, 2, 30, 0, 8), (2, 3, 5, 0, 4)]
    assert cut([10, 20, 5], [4, 4, 4], 100, 240) == [(0, 2, 30, 0, 8), (2, 3, 5, 0, 4)]
    # A request that is too large has chunks of its own, each with at least one query.
    assert cut([10, 20, 5], [4, 5, 4], 9, 50) == [
        (0, 1, 10, 0, 4),
        *((1, 2, 20, q, min(q + 2, 5)) for q in (0, 2, 4)),
        (2, 3, 5, 0, 4),
    ]
    assert cut([20], [3], 9, 7) == [(0, 1, 20, q, q + 1) for q in range(3)]
    # Requests without keys join the chunk of others, and are left out if there is none.
    assert cut([0, 4, 0], [3, 2, 3], 9, 99) == [(0, 3, 4, 0, 8)]
    assert cut([0, 0], [3, 3], 9, 99) == cut([], [], 9, 99) == []
