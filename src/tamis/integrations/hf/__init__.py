"""The modules behind `tamis.integrations.transformers`: the cache of a generation (`cache`), the forward pass in chunks
(`forward`), the attention modules of the supported models (`layers`, `mla_models`, `v4_layers`; their names are in
`names`), and recorded selections (`replay`).

Those that begin with `train` are loaded by `attach(model, train=True)`: the changes to the model (`train_attach`), its
forward pass and loss (`train_forward`), what layers share in a step (`train_step`, `train_selection`), and the
attention modules with gradients (`train_v32`, `train_v4`).
"""
