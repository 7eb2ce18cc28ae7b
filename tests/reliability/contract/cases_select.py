"""Rows that follow from positions alone: windows, entries, what an indexer chose, gathered and mixed tables."""

from typing import Any

import torch
from torch import Tensor

from contract.calls import Call, outside_unchanged, require
from contract.cases_attend import hostile_slots, translated
from contract.draw import INT_MAX, Draw
from tamis import ops

Arguments = dict[str, Any]


def tokens_of(draw: Draw, *, page_size: int) -> Arguments:
    """Positions, requests and a table; padding, unknown requests and absent pages among them."""
    total, requests, width = draw.size(0, 4), draw.size(1, 3), draw.size(1, 4)
    return {
        "positions": draw.ints(-2, width * page_size + 2, total),
        "request_ids": draw.ints(-1, requests, total),
        "block_table": draw.table(requests, width, draw.pick([9, 9, 2**31 - 1])),
    }


def own_slots(draw: Draw, total: int) -> Tensor | None:
    return draw.ints(-2, 99, total, dtype=draw.pick([torch.int32, torch.int64])) if draw.chance(0.5) else None


def known(before: Arguments, token: int, requests: int) -> bool:
    """Whether a token is real: not padding, of a request that there is, written somewhere."""
    own, positions = before.get("own"), before.get("positions")
    real = 0 <= int(before["request_ids"][token]) < requests
    real = real and (positions is None or int(positions[token]) >= 0)
    return real and (own is None or int(own[token]) >= 0)


def check_rows(name: str, found: Tensor, wanted: list[list[int]]) -> None:
    for token, row in enumerate(wanted):
        row = row[: found.shape[1]] + [-1] * (found.shape[1] - len(row))
        require(found[token].tolist() == row, f"{name}[{token}] is {found[token].tolist()}, not {row}")


def buffers(draw: Draw, total: int, columns: int) -> Arguments:
    return {"slots": draw.rows_apart(draw.ints(-9, 9, total, columns)), "lengths": draw.ints(-9, 9, total).contiguous()}


def unchanged_beside(before: Arguments, after: Arguments, *names: str) -> None:
    for name in names:
        if before[name] is not None:
            outside_unchanged(name, before[name], after[name])


def select_window(draw: Draw) -> Call:
    page_size, window = draw.pick([1, 3, 4, 64]), draw.pick([1, 4, 9])
    arguments = tokens_of(draw, page_size=page_size)
    total, requests = len(arguments["positions"]), len(arguments["block_table"])
    blocks = None
    if draw.chance(0.3):
        context = draw.ints(0, 9, requests)
        blocks = (context, (context + draw.ints(0, 3, requests)).to(torch.int32))
    arguments |= {"page_size": page_size, "window": window, "own": own_slots(draw, total), "blocks": blocks}
    arguments |= {**buffers(draw, total, window + draw.pick([0, 3])), "backend": "auto"}

    def check(_: None, before: Arguments, after: Arguments) -> None:
        rows, table, width = [], before["block_table"].tolist(), before["slots"].shape[1]
        for token in range(len(before["positions"])):
            row: list[int] = []
            if known(before, token, len(table)):
                position, request = int(before["positions"][token]), int(before["request_ids"][token])
                begin, end = position + 1 - before["window"], position + 1
                if before["blocks"] is not None:
                    begin, end = int(before["blocks"][0][request]) - before["window"], int(before["blocks"][1][request])
                begin = max(0, begin)
                row = [
                    translated(p, table[request], before["page_size"], before["page_size"])
                    for p in range(begin, min(end, begin + width))
                ]
            rows.append(row)
        check_rows("slots", after["slots"], rows)
        require(after["lengths"].tolist() == [len(row) for row in rows], "lengths")
        unchanged_beside(before, after, "slots", "lengths")

    written = ("slots", "lengths")
    return Call("ops.select_window", ops.select_window, arguments, check, written, optional=("own", "blocks"))


def select_entries(draw: Draw) -> Call:
    ratio, page_size = draw.pick([1, 3, 4]), draw.pick([1, 2, 4])
    arguments = tokens_of(draw, page_size=page_size * ratio)
    total = len(arguments["positions"])
    columns = draw.pick([1, 4, 9])
    arguments |= {
        "ratio": ratio,
        "page_size": page_size,
        "completed": draw.ints(-9, 9, total, dtype=torch.int64).contiguous() if draw.chance(0.7) else None,
        "visible": draw.ints(-9, 9, total).contiguous() if draw.chance(0.7) else None,
        "lengths": draw.ints(-9, 9, total).contiguous() if draw.chance(0.7) else None,
        "every": draw.rows_apart(draw.ints(-9, 9, total, columns)) if draw.chance(0.7) else None,
        "columns": draw.pick([None, columns - 1]),
        "own": own_slots(draw, total),
        "local_from": draw.pick([None, 0, 1]),
        "backend": "auto",
    }

    def check(_: None, before: Arguments, after: Arguments) -> None:
        table, total = before["block_table"].tolist(), len(before["positions"])
        real = [known(before, token, len(table)) for token in range(total)]
        count = [
            (int(p) + 1) // before["ratio"] if is_real else 0
            for p, is_real in zip(before["positions"], real, strict=True)
        ]
        size = before["page_size"]
        if before["completed"] is not None:
            wanted = []
            for token in range(total):
                position = int(before["positions"][token])
                ends = real[token] and (position + 1) % before["ratio"] == 0
                page = table[int(before["request_ids"][token])] if ends else []
                wanted.append(translated(position // before["ratio"], page, size, size) if ends else -1)
            require(after["completed"].tolist() == wanted, f"completed {after['completed'].tolist()}, not {wanted}")
        if before["visible"] is not None:
            require(after["visible"].tolist() == count, "visible")
        if before["lengths"] is not None:
            limit = before["columns"]
            limit = limit if limit is not None else INT_MAX if before["every"] is None else before["every"].shape[1]
            require(after["lengths"].tolist() == [min(c, limit) for c in count], "lengths")
        if before["every"] is not None:
            local = total if before["local_from"] is None else before["local_from"]
            rows = []
            for token in range(total):
                numbers = range(min(count[token], before["every"].shape[1]))
                pages = table[int(before["request_ids"][token])] if real[token] else []
                rows.append([n if token >= local else translated(n, pages, size, size) for n in numbers])
            check_rows("every", after["every"], rows)
        unchanged_beside(before, after, "completed", "visible", "lengths", "every")

    written = ("completed", "visible", "lengths", "every")
    optional = (*written, "columns", "own", "local_from")
    return Call("ops.select_entries", ops.select_entries, arguments, check, written, optional=optional)


def select_chosen(draw: Draw) -> Call:
    page_size, columns = draw.pick([1, 3, 4]), draw.pick([0, 1, 6])
    arguments = tokens_of(draw, page_size=page_size)
    total = len(arguments.pop("positions"))
    width = arguments["block_table"].shape[1]
    arguments |= {"chosen": hostile_slots(draw, width * page_size + 2, total, columns), "page_size": page_size}
    arguments |= {"own": own_slots(draw, total), **buffers(draw, total, columns), "backend": "auto"}

    def check(_: None, before: Arguments, after: Arguments) -> None:
        rows, table, size = [], before["block_table"].tolist(), before["page_size"]
        for token in range(len(before["chosen"])):
            real = known(before, token, len(table))
            pages = table[int(before["request_ids"][token])] if real else []
            found = [translated(n, pages, size, size) for n in before["chosen"][token].tolist()]
            rows.append([slot for slot in found if slot >= 0])
        check_rows("slots", after["slots"], rows)
        require(after["lengths"].tolist() == [len(row) for row in rows], "lengths")
        unchanged_beside(before, after, "slots", "lengths")

    return Call("ops.select_chosen", ops.select_chosen, arguments, check, ("slots", "lengths"), optional=("own",))


def select_gathered(draw: Draw) -> Call:
    total, group, first_request = draw.size(0, 4), draw.size(1, 3), draw.size(0, 2)
    columns, window, entries = draw.pick([0, 2, 5]), draw.pick([1, 4]), draw.pick([0, 3, 6])
    arguments: Arguments = {
        "positions": draw.ints(-2, 20, total),
        "request_ids": draw.ints(first_request - 1, first_request + group, total),
        "first": draw.ints(0, 9, group),
        "chosen": hostile_slots(draw, entries + 2, total, columns) if draw.chance(0.5) else None,
        "ratio": draw.pick([1, 4]),
        "window": window,
        "entries": entries,
        "rows": entries + draw.pick([0, 5, 12]),
        "columns": columns,
        "first_request": first_request,
        **buffers(draw, total, columns + window + draw.pick([0, 2])),
        "backend": "auto",
    }

    def check(_: None, before: Arguments, after: Arguments) -> None:
        rows = []
        for token in range(len(before["positions"])):
            position, request = (
                int(before["positions"][token]),
                int(before["request_ids"][token]) - before["first_request"],
            )
            row: list[int] = []
            if position >= 0 and 0 <= request < len(before["first"]):
                base = request * before["rows"]
                for number in range(min((position + 1) // before["ratio"], before["columns"])):
                    entry = number if before["chosen"] is None else int(before["chosen"][token, number])
                    row.append(base + entry if 0 <= entry < before["entries"] else -1)
                for raw in range(max(0, position + 1 - before["window"]), position + 1):
                    place = raw - int(before["first"][request])
                    inside = 0 <= place < before["rows"] - before["entries"]
                    row.append(base + before["entries"] + place if inside else -1)
            rows.append(row)
        check_rows("slots", after["slots"], rows)
        require(after["lengths"].tolist() == [len(row) for row in rows], "lengths")
        unchanged_beside(before, after, "slots", "lengths")

    written = ("slots", "lengths")
    return Call("ops.select_gathered", ops.select_gathered, arguments, check, written, optional=("chosen",))


def select_groups(draw: Draw) -> Call:
    total, size, columns = draw.size(0, 4), draw.pick([1, 3, 4]), draw.pick([0, 1, 5])
    width = columns * size + size - 1 + draw.size(0, 2)
    arguments: Arguments = {
        "chosen": hostile_slots(draw, 9, total, columns),
        "visible": draw.ints(-2, 40, total),
        "size": size,
        "positions": draw.rows_apart(draw.ints(-9, 9, total, width)),
        "backend": "auto",
    }

    def check(_: Tensor, before: Arguments, after: Arguments) -> None:
        rows, size = [], before["size"]
        for chosen, seen in zip(before["chosen"].tolist(), before["visible"].tolist(), strict=True):
            whole = max(seen, 0) // size
            row = [n * size + inside for n in chosen if 0 <= n < whole for inside in range(size)]
            rows.append([*row, *range(whole * size, seen)])
        check_rows("positions", after["positions"], rows)
        unchanged_beside(before, after, "positions")

    return Call("ops.select_groups", ops.select_groups, arguments, check, ("positions",), optional=("positions",))


CASES = (select_window, select_window, select_entries, select_entries, select_chosen, select_gathered, select_groups)
