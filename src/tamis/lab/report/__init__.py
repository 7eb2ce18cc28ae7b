"""What reports share: one HTML file that needs nothing else, in light and in dark."""

from tamis.lab.report.document import document, escape
from tamis.lab.report.files import write_whole

__all__ = ["document", "escape", "write_whole"]
