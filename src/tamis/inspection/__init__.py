"""Looking at selections: which tokens a model's layers select for a prompt, and what that leaves of dense attention.

    inspection = inspect_model(model, tokens)
    describe_layers(inspection)  # numbers
    render_page(inspection, ...)  # one HTML file

Needs Hugging Face transformers.
"""

from tamis.inspection.collect import Inspection, inspect_model
from tamis.inspection.page import render_page
from tamis.inspection.summary import describe_layers, describe_query, layer_overlap

__all__ = ["Inspection", "describe_layers", "describe_query", "inspect_model", "layer_overlap", "render_page"]
