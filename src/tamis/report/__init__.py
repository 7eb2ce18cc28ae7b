"""What reports share: one HTML file that needs nothing else, in light and in dark."""

from tamis.report.document import document, escape

__all__ = ["document", "escape"]
