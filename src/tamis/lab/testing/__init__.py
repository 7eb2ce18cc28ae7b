"""What verification, benchmarks and tests share: hostile inputs, slow definitions, comparisons."""
