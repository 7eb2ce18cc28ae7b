"""What reports share: one HTML file that needs nothing else, in light and in dark."""

from tamis.report.document import document, escape
from tamis.report.files import write_whole

__all__ = ["document", "escape", "write_whole"]
