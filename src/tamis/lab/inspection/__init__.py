"""Inspection: which tokens a model's layers select for a prompt, and how much of dense attention these cover.

    inspection = inspect_model(model, tokens)
    describe_layers(inspection)  # numbers
    render_page(inspection, ...)  # one HTML file

Needs Hugging Face transformers.
"""

from tamis.lab.inspection.collect import Inspection, inspect_model
from tamis.lab.inspection.needle import describe_needle
from tamis.lab.inspection.page import render_page
from tamis.lab.inspection.summary import describe_layers, describe_query, layer_overlap

__all__ = [
    "Inspection",
    "describe_layers",
    "describe_needle",
    "describe_query",
    "inspect_model",
    "layer_overlap",
    "render_page",
]
