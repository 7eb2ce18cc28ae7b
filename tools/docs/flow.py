"""Pictures of the flow of data: through a layer, from positions to slots, and from tokens to entries."""

import torch

from tamis.ops import translate_positions
from tools.docs.svg import Picture


def draw_layer() -> str:
    """The stages of a layer, and what each takes from the step's plan."""
    p = Picture(880, 372, "How data flows through a layer")
    p.labelled(24, 28, 84, 44, "Batch")
    p.line((108, 50), (146, 50), arrow=True)
    p.labelled(148, 28, 112, 44, "Planner.plan", "box", "code")
    p.line((260, 50), (298, 50), arrow=True)
    words = "Plan: slots, request ids, positions, block table, chunks\n"
    words += "one per step, shared by every layer, in buffers that never move"
    p.labelled(300, 28, 556, 44, words, "amber")
    p.line((330, 73), (330, 106), (202, 106), (202, 138), kind="thin", arrow=True)
    p.line((388, 73), (388, 228), kind="thin", arrow=True)
    p.line((566, 73), (566, 228), kind="thin", arrow=True)
    p.text(24, 167, "new kv")
    p.line((76, 162), (158, 162), arrow=True)
    p.labelled(160, 140, 84, 44, "write", "blue", "title")
    p.line((244, 162), (264, 162), (264, 190), arrow=True)
    p.labelled(190, 192, 148, 44, "PagedCache\nlatent rows, index keys", "green")
    p.text(24, 264, "index inputs")
    p.line((110, 259), (344, 259), arrow=True)
    p.line((264, 237), (264, 259))
    p.labelled(346, 230, 84, 58, "index\nscore, select", "blue", "title")
    p.line((430, 259), (522, 259), arrow=True)
    p.text(476, 251, "positions", "middle small")
    p.line((476, 330), (476, 262), arrow=True)
    p.text(476, 346, "given by an earlier layer, or by you", "middle small muted")
    p.labelled(524, 230, 84, 58, "translate\nto slots", "blue", "title")
    p.line((608, 259), (646, 259), arrow=True)
    p.labelled(648, 230, 84, 58, "attend\npartials", "blue", "title")
    p.line((338, 214), (690, 214), (690, 228), arrow=True)
    p.text(520, 207, "Selection(cache, slots, lengths)", "middle small muted")
    p.line((690, 330), (690, 290), arrow=True)
    p.text(690, 346, "q", "middle")
    p.line((732, 259), (770, 259), arrow=True)
    p.labelled(772, 230, 84, 58, "combine\n+ sink", "blue", "title")
    p.line((814, 288), (814, 330), arrow=True)
    p.text(814, 346, "out, lse", "middle")
    return p.render()


def draw_pages() -> str:
    """One request's tokens in pages, and selected positions becoming slots, as `translate_positions` computes them."""
    size, table, positions = 4, [5, 2, 7], [1, 6, 9, 14]
    slots = translate_positions(
        torch.tensor([positions], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([table], dtype=torch.int32),
        page_size=size,
    ).slots[0]
    cell, left, step = 44.0, 150.0, 23.5
    p = Picture(2 * 24 + 880, 300, "From positions in a request to slots of the cache")
    p.text(24, 57, "a request's tokens")
    p.text(24, 75, "position", "small muted")
    for position in range(size * len(table)):
        kind = "blue" if position in positions else "box"
        p.labelled(left + cell * position, 36, cell, 36, str(position), kind, "code")
    p.text(24, 125, "its block table")
    for number, page in enumerate(table):
        x = left + cell * size * number
        p.line((x + 2, 80), (x + 2, 86), (x + cell * size - 2, 86), (x + cell * size - 2, 80), kind="thin")
        p.labelled(x + cell * size / 2 - 44, 104, 88, 34, f"page {page}", "amber", "code")
        p.line((x + cell * size / 2, 87), (x + cell * size / 2, 102), kind="thin")
    p.text(24, 199, "the cache")
    p.text(24, 217, "slot", "small muted")
    chosen = {int(slot) for slot in slots if slot >= 0}
    for page in range(8):
        for row in range(size):
            slot = page * size + row
            kind = "blue" if slot in chosen else "box" if page in table else "grey"
            x = left + step * slot
            p.box(x, 178, step, 36, kind, round_=2)
            if slot in chosen:
                p.text(x + step / 2, 201, str(slot), "middle code small")
        p.text(left + step * (page * size + size / 2), 230, f"page {page}", "middle small muted")
        if page in table:
            x = left + cell * size * (table.index(page) + 0.5)
            p.line((x, 139), (x, 150), (left + step * (page * size + 2), 164), (left + step * (page * size + 2), 176))
    listed = ", ".join(str(position) for position in positions)
    found = ", ".join(str(int(slot)) for slot in slots)
    p.text(24, 274, f"positions [{listed}]  \u2192  slots [{found}]", "code")
    p.text(470, 274, "14 lies past the block table: -1, which every stage skips", "small muted")
    return p.render()


def draw_entries() -> str:
    """The rows that a V4 token attends to: a window of raw tokens, and entries of several tokens each."""
    tokens, window, ratio, cell = 24, 6, 4, 33
    chosen = {0, 3, 4}
    p = Picture(2 * 24 + 872, 236, "What a DeepSeek-V4 token attends to")
    left = 104
    p.text(24, 60, "tokens")
    for token in range(tokens):
        kind = "green" if token >= tokens - window else "box"
        p.labelled(left + cell * token, 36, cell, 36, "q" if token == tokens - 1 else "", kind, "title")
    p.text(left + cell * (tokens - window / 2), 26, "window: raw rows", "middle small muted")
    p.text(24, 142, "entries")
    for entry in range(tokens // ratio):
        x = left + cell * ratio * entry
        p.line((x + 3, 80), (x + cell * ratio / 2, 116), (x + cell * ratio - 3, 80), kind="thin")
        kind = "blue" if entry in chosen else "box"
        p.labelled(x + cell * ratio / 2 - 40, 118, 80, 36, f"entry {entry}", kind)
    p.text(left, 196, "compress: the token that ends a span pools it into one row of the cache")
    note = "index: of the entries behind a token, its top-k; layers with long spans attend to all of them"
    p.text(left, 218, note, "muted")
    return p.render()
