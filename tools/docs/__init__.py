"""Generates the figures, tables and command list of the documents from code and results."""
