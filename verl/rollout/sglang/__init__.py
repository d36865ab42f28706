"""`rollout.name=sglang`: SGLang's engine, in processes of its own. Modules of this package import SGLang at use only."""
