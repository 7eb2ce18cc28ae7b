"""Shared by verification, benchmarks and tests: adversarial inputs, slow float64 definitions, comparisons, probes."""
