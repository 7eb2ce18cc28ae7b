"""Pictures of byte formats, drawn from `tamis.cache.layout` to scale."""

from dataclasses import dataclass

from tamis.cache.fields import Field
from tamis.cache.layout import Layout, named
from tamis.checks import dtype_name
from tools.docs.svg import Picture

NAMES = ("v32-fp8", "v32-bf16", "plain-fp8", "v4-fp8", "v4-bf16", "v41-fp8", "v41-fp4", "index-fp8", "index-mxfp4")
PAGE_SIZE = 64
LEFT, WIDTH = 24, 712


@dataclass(frozen=True)
class Piece:
    """Some bytes of a row."""

    plane: int
    offset: int
    size: int
    stride: int
    kind: str
    words: str
    tiles: int = 1


def pieces(layout: Layout) -> list[Piece]:
    """The fields of a row, in the order of its bytes."""
    values = layout.values
    size = values.count * values.dtype.itemsize
    what = "e2m1 values, two to a byte" if layout.packed else f"{_element(layout)} values"
    found = []
    if layout.tail is None and layout.rope:
        # One field holds latent and rope.
        latent = layout.latent * values.dtype.itemsize
        found.append(_piece(values, "blue", f"{layout.latent} {what}: the latent part", 0, latent))
        found.append(_piece(values, "green", f"{layout.rope} {what}: the rope part", latent, size - latent))
    else:
        tiles = layout.latent // layout.tile if layout.tile else 1
        found.append(_piece(values, "blue", f"{layout.latent} {what}", 0, size, tiles))
    if layout.scales is not None:
        used = layout.latent // layout.tile
        unused = f", {layout.scales.count - used} unused" if layout.scales.count > used else ""
        one = "exponent byte" if layout.scale_mode == "exponent" else f"{dtype_name(layout.scales.dtype)} scale"
        words = f"{used} {one}{'s' if used > 1 else ''}, one per {layout.tile} values{unused}"
        count, size = layout.scales.count, layout.scales.dtype.itemsize
        found.append(_piece(layout.scales, "amber", words, 0, count * size, count))
    if layout.tail is not None:
        words = f"{layout.tail.count} {dtype_name(layout.tail.dtype)}: the rope part"
        found.append(_piece(layout.tail, "green", words, 0, layout.tail.count * layout.tail.dtype.itemsize))
    return sorted(found, key=lambda piece: (piece.plane, piece.offset))


def draw(name: str) -> str:
    """The picture of one format: one row, and a page if values and scales are in separate planes."""
    layout = named(name)
    found = pieces(layout)
    planes = sorted({piece.plane for piece in found})
    bars = len(planes) + (len(planes) > 1)
    top = 64 if len(planes) > 1 else 56
    height = top + 64 * bars + 22 * len(found) + 8
    picture = Picture(2 * LEFT + WIDTH, height, f"Bytes of the format {name}")
    picture.text(LEFT, 32, name, "title code")
    total = layout.page_bytes(PAGE_SIZE)
    what = f"{layout.row_bytes} bytes a row"
    picture.text(LEFT + WIDTH, 32, f"{what}; {total} bytes a page of {PAGE_SIZE}", "end muted")
    y = float(top)
    if len(planes) > 1:
        _page(picture, y, layout, found, total)
        y += 64
    longest = max(piece.stride for piece in found)
    for plane in planes:
        row = [piece for piece in found if piece.plane == plane]
        # A row of exponents is far shorter than one of values, so each is drawn at its own scale.
        wide = WIDTH if row[0].stride == longest else max(WIDTH * row[0].stride / longest, 88)
        _row(picture, y, row, wide, "" if len(planes) == 1 else f"row i of plane {planes.index(plane)}")
        y += 64
    for piece in found:
        picture.box(LEFT, y - 11, 14, 14, piece.kind, round_=2)
        picture.text(LEFT + 24, y, _where(piece), "code")
        picture.text(LEFT + 236, y, piece.words)
        y += 22
    return picture.render()


def _piece(field: Field, kind: str, words: str, start: int, size: int, tiles: int = 1) -> Piece:
    return Piece(field.plane, field.offset + start, size, field.stride, kind, words, tiles)


def _element(layout: Layout) -> str:
    return "e4m3" if layout.quantised else dtype_name(layout.values.dtype)


def _where(piece: Piece) -> str:
    start = f"{piece.plane * PAGE_SIZE} + " if piece.plane else ""
    return f"{start}i*{piece.stride} + {piece.offset}..{piece.offset + piece.size - 1}"


def _page(picture: Picture, y: float, layout: Layout, found: list[Piece], total: int) -> None:
    """A whole page to scale: planes one after the other, then padding."""
    scale = WIDTH / total
    picture.text(LEFT, y - 5, f"a page of {PAGE_SIZE} rows", "small muted")
    starts = {piece.plane: piece for piece in reversed(found)}
    end = 0
    for number, plane in enumerate(sorted(starts)):
        begin, size = plane * PAGE_SIZE, starts[plane].stride * PAGE_SIZE
        picture.labelled(LEFT + begin * scale, y, size * scale, 26, "", starts[plane].kind)
        if size * scale > 60:
            picture.text(LEFT + (begin + size / 2) * scale, y + 17.5, f"plane {number}: values", "middle small")
        at, side = (LEFT + begin * scale, "") if begin * scale < WIDTH - 40 else (LEFT + WIDTH, "end ")
        picture.text(at, y + 40, str(begin), f"{side}code small muted")
        end = begin + size
    if total > end:
        picture.box(LEFT + end * scale, y, (total - end) * scale, 26, "grey")
        note = f"{total - end} bytes of padding to a multiple of {layout.page_align}"
        picture.text(LEFT + WIDTH, y - 5, note, "end small muted")


def _row(picture: Picture, y: float, row: list[Piece], wide: float, note: str) -> None:
    """One row to scale, with the offsets of its fields."""
    stride = row[0].stride
    scale = wide / stride
    if note:
        picture.text(LEFT, y - 5, note, "small muted")
    for piece in row:
        x, width = LEFT + piece.offset * scale, piece.size * scale
        picture.box(x, y, width, 26, piece.kind)
        for tile in range(1, piece.tiles):
            at = x + width * tile / piece.tiles
            picture.line((at, y + 1), (at, y + 25), kind="thin")
        first_or_apart = piece.offset == 0 or width > 24 or piece.offset * scale > 40
        if first_or_apart:
            shift = "end " if 0 < width < 30 and piece is not row[0] else ""
            picture.text(x + (2 if shift else 0), y + 40, str(piece.offset), f"{shift}code small muted")
    picture.text(LEFT + wide, y + 40, str(stride), "end code small muted")
