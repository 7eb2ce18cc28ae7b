"""The picture of a step: the plan of a small batch, computed by the planner."""

from tamis import Batch, LayerSpec, Limits, PagePool, Plan, Planner
from tools.docs.svg import Picture

NEW, LENGTHS = [1, 1, 1, 4, 3, 5], [6, 9, 4, 4, 7, 5]
KINDS = ("blue", "green", "amber", "rose", "blue", "green")
PADDED, WORKSPACE = 18, 12
LEFT, CELL = 150, 40


def draw() -> str:
    """Draw token rows with request, position and slot, and the chunks of prefills that share the workspace."""
    spec = LayerSpec(heads=64, topk=2048)
    planner = Planner(spec, Limits(PADDED, 8, 32, page_size=4, workspace_rows=WORKSPACE), mode="separate")
    batch = Batch.build(NEW, LENGTHS, PagePool(32, 4))
    plan = planner.plan(Batch(batch.query_starts, batch.lengths, batch.pages, padded_tokens=PADDED))
    p = Picture(LEFT + CELL * PADDED + 40, 306, "How the planner packs a batch")
    _requests(p)
    _tokens(p, plan)
    _chunks(p, plan)
    return p.render()


def _requests(p: Picture) -> None:
    p.text(24, 42, "requests", "title")
    p.text(24, 60, "new / all tokens", "small muted")
    for number, (new, length) in enumerate(zip(NEW, LENGTHS, strict=True)):
        p.labelled(LEFT + 122 * number, 26, 112, 38, f"{number}: {new} of {length}", KINDS[number], "code")


def _tokens(p: Picture, plan: Plan) -> None:
    p.text(24, 120, "token rows", "title")
    names = {"request_ids": plan.request_ids, "positions": plan.positions, "slots": plan.slots}
    for line, (name, values) in enumerate(names.items()):
        y = 104 + 30 * line
        p.text(24, y + 36, name, "code small muted")
        for row, value in enumerate(values.tolist()):
            kind = KINDS[int(plan.request_ids[row])] if row < plan.tokens else "grey"
            p.labelled(LEFT + CELL * row, y + 18, CELL, 28, str(value), kind, "code")
    decode = plan.split.decode_tokens
    spans = ((0, decode, "decode"), (decode, plan.tokens, "prefill"), (plan.tokens, plan.rows, "padding"))
    for begin, end, words in spans:
        x0, x1 = LEFT + CELL * begin + 2, LEFT + CELL * end - 2
        p.line((x0, 116), (x0, 110), (x1, 110), (x1, 116), kind="thin")
        p.text((x0 + x1) / 2, 104, words, "middle small muted")


def _chunks(p: Picture, plan: Plan) -> None:
    p.text(24, 262, "workspace", "title")
    p.text(24, 280, f"{WORKSPACE} rows of bf16", "small muted")
    assert plan.prefill is not None
    for number, chunk in enumerate(plan.prefill.chunks):
        x = LEFT + number * (CELL * 9)
        row = 27
        p.text(x, 244, f"chunk {number}: gather, then attend", "small muted")
        p.box(x, 252, row * WORKSPACE, 34, "box")
        for request, start in zip(range(chunk.requests.start, chunk.requests.stop), chunk.starts.tolist(), strict=True):
            p.labelled(x + row * start, 252, row * LENGTHS[request], 34, f"{request}", KINDS[request], "code")
