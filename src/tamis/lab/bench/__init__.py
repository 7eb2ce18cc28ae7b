"""Measurements of the stages: suites of shapes, cold-cache timing, rooflines, peers, and rows for CSV and JSON."""
