"""`rollout.name=sglang`: SGLang, in processes of its own. Modules of this package import SGLang at use only."""
