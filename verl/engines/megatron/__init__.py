"""The training engine of `strategy=megatron`: megatron-core's parallelism behind `TrainEngine`.

Tensor, pipeline, context and sequence parallelism, the distributed optimizer and activation recomputation are
megatron-core's. Weights are read and written with HuggingFace names; losses, packing and micro-batches are those of the
other engines.
"""
