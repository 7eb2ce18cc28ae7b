"""`document`: one HTML file with its style, its data and its script inside, which loads nothing."""

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses what would come from elsewhere."""


def escape(text: object) -> str:
    """Text for HTML, attributes included."""
    return html.escape(str(text))


def document(
    title: str,
    body: str,
    *,
    style: str = "",
    script: str = "",
    data: Any = None,
    blobs: Mapping[str, str] | None = None,
) -> str:
    """A page.

    Args:
        title: plain text.
        body: HTML.
        style: CSS after what all reports share.
        script: JavaScript, run when the page is there.
        data: for the script, as JSON in the element `data`.
        blobs: base64 texts for the script, each in an element of its name.
    """
    shared = files("tamis.report").joinpath("style.css").read_text(encoding="utf-8")
    # "</script>" must not appear in data, and JSON allows this way of writing the same text.
    embedded = "" if data is None else json.dumps(data, ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    embedded = embedded.replace("<!--", "<\\u0021--")
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{shared}\n{style}</style>",
        "</head>",
        "<body>",
        body,
    ]
    if data is not None:
        parts.append(f'<script type="application/json" id="data">{embedded}</script>')
    for name, text in (blobs or {}).items():
        parts.append(f'<script type="text/plain" id="{escape(name)}">{text}</script>')
    if script:
        parts.append(f"<script>\n{script}</script>")
    return "\n".join([*parts, "</body>", "</html>", ""])
