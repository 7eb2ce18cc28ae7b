"""DeepSeek-V4's attention as backend, metadata-builder and impl classes, for engines that construct attention by class.

These classes implement vLLM's interfaces for V4: `v4_backend` (the properties of a backend, read during setup),
`v4_metadata` and `v4_index_metadata` (the per-step records of caches, window and indexer, and their builders),
`v4_indices` (vLLM's index functions under their own names) and `v4_impl` (attention over one mixed list of indices).

vLLM itself constructs none of them. Its V4 layers choose among fixed classes and build their own records, so the plugin
replaces the layer's class by that of `tamis.integrations.vllm.v4_layer`, which calls `v4_forward`. The classes here are
for engines that let a backend bring its builder and its impl, as vLLM does for V3.2. `v4_forward` reads their records
as well as vLLM's own.
"""
