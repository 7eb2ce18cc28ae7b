"""`document`: one HTML file with its style, its data and its script inside, which loads nothing."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; style-src-attr {attributes}; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""The content security policy: the browser refuses everything from elsewhere, and unknown scripts and styles."""


def escape(text: object) -> str:
    """Escape a text for HTML, also inside attributes."""
    return html.escape(str(text))


def _hashed(text: str) -> str:
    """The hash by which the policy allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def document(
    title: str,
    body: str,
    *,
    style: str = "",
    script: str = "",
    data: Any = None,
    blobs: Mapping[str, str] | None = None,
    styled: bool = False,
) -> str:
    """An HTML page.

    Args:
        title: plain text.
        body: HTML.
        style: CSS that follows the style sheet of all reports.
        script: JavaScript, run once the page is loaded.
        data: data for the script, as JSON in the element `data`.
        blobs: base64 texts for the script, each in an element of its name.
        styled: whether elements of the body have style attributes, as those of figures do.
    """
    shared = files("tamis.lab.html").joinpath("style.css").read_text(encoding="utf-8")
    # Data must not contain a tag such as "</script>"; JSON allows "<" to be escaped.
    embedded = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    style, script = f"\n{shared}\n{style}", f"\n{script}" if script else ""
    policy = _POLICY.format(
        scripts=_hashed(script) if script else "'none'",
        styles=_hashed(style),
        attributes="'unsafe-inline'" if styled else "'none'",
    )
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        body,
    ]
    if data is not None:
        parts.append(f'<script type="application/json" id="data">{embedded}</script>')
    for name, text in (blobs or {}).items():
        parts.append(f'<script type="text/plain" id="{escape(name)}">{text}</script>')
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body>", "</html>", ""])
