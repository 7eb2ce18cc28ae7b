"""Writes simple shapes as SVG, for light and dark schemes, with a background."""

from html import escape

STYLE = """\
.page{fill:#fbfbfa} text{font:13px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;fill:#24292f}
.code{font-family:ui-monospace,"SF Mono","DejaVu Sans Mono",monospace;font-size:12px} .small{font-size:11px}
.muted{fill:#68717a} .title{font-weight:600;font-size:14px} .middle{text-anchor:middle} .end{text-anchor:end}
.box{fill:#fff;stroke:#b6bec6} .blue{fill:#cfe3ff;stroke:#7fa8dc} .amber{fill:#ffe0a3;stroke:#d3a23f}
.green{fill:#cdeccf;stroke:#7dba84} .rose{fill:#ffd5d9;stroke:#dd8f98} .grey{fill:#e8eaed;stroke:#b6bec6}
.line{stroke:#7b858f;stroke-width:1.3;fill:none} .thin{stroke:#9aa4ae;stroke-width:.7;fill:none} .tip{fill:#7b858f}
.win{fill:#2f6fc4} .loss{fill:#cf4a2e} .strong{font-weight:600} .tiny{font-size:10px} .faint{stroke-opacity:.45}
@media (prefers-color-scheme:dark){
.page{fill:#1b2027} text{fill:#e3e8ee} .muted{fill:#9aa5b1}
.box{fill:#262d36;stroke:#56616d} .blue{fill:#20477a;stroke:#4f82c0} .amber{fill:#6e4f0f;stroke:#b58a35}
.green{fill:#1f5a34;stroke:#4d9463} .rose{fill:#74313c;stroke:#b8626d} .grey{fill:#39414b;stroke:#56616d}
.line{stroke:#9aa5b1} .thin{stroke:#6f7a86} .tip{fill:#9aa5b1}
.win{fill:#5b9bea} .loss{fill:#ee7a5c}}"""


class Picture:
    """Shapes in the order in which they are drawn. Coordinates are pixels from the top left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        """Start an empty picture; screen readers read the title."""
        self._size, self._title = (width, height), title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", *, round_: float = 3) -> None:
        """A rectangle."""
        size = f'width="{_n(width)}" height="{_n(height)}" rx="{_n(round_)}"'
        self._shapes.append(f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" {size}/>')

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """One line of text; y is its baseline."""
        mark = f' class="{kind}"' if kind else ""
        self._shapes.append(f'<text{mark} x="{_n(x)}" y="{_n(y)}">{escape(words, quote=False)}</text>')

    def labelled(
        self, x: float, y: float, width: float, height: float, words: str, kind: str = "box", style: str = ""
    ) -> None:
        """A box with one or more lines of text in its middle."""
        self.box(x, y, width, height, kind)
        lines = words.split("\n")
        top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            under = "small muted" if number else style
            self.text(x + width / 2, top + 16 * number, line, f"middle {under}".strip())

    def line(self, *points: tuple[float, float], kind: str = "line", arrow: bool = False) -> None:
        """A line through points, with an arrowhead at its end if `arrow`."""
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._shapes.append(f'<path class="{kind}" d="{path}"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2], points[-1]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            dx, dy = (x - x0) / length, (y - y0) / length
            corners = [(x, y), (x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx)]
            shape = " ".join(f"{_n(a)},{_n(b)}" for a, b in corners)
            self._shapes.append(f'<polygon class="tip" points="{shape}"/>')

    def render(self) -> str:
        """The file's text."""
        width, height = (_n(side) for side in self._size)
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img">\n<title>{escape(self._title)}</title>\n<style>\n{STYLE}\n</style>\n'
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n{shapes}\n</svg>\n'
        )


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
