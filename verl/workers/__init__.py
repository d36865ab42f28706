"""Workers: an engine, a rollout and the maths joined, with methods that a controller calls."""
