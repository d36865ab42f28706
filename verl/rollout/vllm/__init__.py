"""`rollout.name=vllm`: vLLM in the rollout process. Modules of this package import vLLM at use only."""
