"""The modules behind `tamis.integrations.transformers`: the cache of a generation (`cache`), the forward pass in chunks
(`forward`), and the attention modules of the supported models (`layers`)."""
