"""The attention of one layer, stage by stage, for DeepSeek-V3.2 (`mla`) and DeepSeek-V4 (`v4`)."""
