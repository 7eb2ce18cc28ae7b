"""tamis under other interfaces: drop-in modules for FlashMLA, FlashInfer and DeepGEMM, and adapters for Hugging Face
transformers and vLLM."""
