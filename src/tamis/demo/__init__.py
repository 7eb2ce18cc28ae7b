"""A tiny DeepSeek-V3.2-shaped model served over paged caches, with its accuracy measured: `tamis demo`."""
