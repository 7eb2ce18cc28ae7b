"""What `tamis.integrations.transformers` is made of: caches of a generation, and layers of the supported models."""
