"""megatron-core on a CPU, for tests: replaces what it needs CUDA for."""
