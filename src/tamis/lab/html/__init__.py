"""What the HTML pages share: one file that needs nothing else, in light and in dark, and is written whole."""

from tamis.lab.html.document import document, escape
from tamis.lab.html.files import write_whole

__all__ = ["document", "escape", "write_whole"]
