"""The attention of one layer: `mla` for DeepSeek-V3.2 and GLM-5, `v4` for DeepSeek-V4."""
