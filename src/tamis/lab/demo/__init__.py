"""Tiny DeepSeek-V3.2- and V4-shaped models served over paged caches, with their accuracy measured: `tamis demo`."""
