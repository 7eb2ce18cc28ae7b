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
"""The browser itself refuses what would come from elsewhere, and every script and style that is not one of ours."""


def escape(text: object) -> str:
    """Text for HTML, attributes included."""
    return html.escape(str(text))


def _hashed(text: str) -> str:
    """How a policy names an inline script or style."""
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
    """A page.

    Args:
        title: plain text.
        body: HTML.
        style: CSS after what all reports share.
        script: JavaScript, run when the page is there.
        data: for the script, as JSON in the element `data`.
        blobs: base64 texts for the script, each in an element of its name.
        styled: whether elements of the body have styles of their own, as those of drawings do.
    """
    shared = files("tamis.lab.html").joinpath("style.css").read_text(encoding="utf-8")
    # No tag may begin in data, "</script>" least of all, and JSON allows this way of writing the same text.
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
