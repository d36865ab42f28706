"""Generation with the modules of transformers: for architectures that `native.model` cannot read as a `Decoder`.

- `support`: which models run, decided from class and config before weights are loaded.
- `attention`: the attention function that the modules call, over the KV cache of the engine.
- `model`: the model as the engine sees it, and the forward pass over prompts.
- `slots`: decoding on a CPU.
- `cuda`, `kernels`: decoding on a GPU.
"""
