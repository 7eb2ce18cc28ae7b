"""Helpers for HTML reports: a single file that loads nothing, with a light and a dark scheme, written atomically."""

from tamis.lab.html.document import document, escape
from tamis.lab.html.files import write_whole

__all__ = ["document", "escape", "write_whole"]
