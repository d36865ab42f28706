"""`rollout.name=sglang`: SGLang, in separate processes. Modules of this package import SGLang at use only."""
