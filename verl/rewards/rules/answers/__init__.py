"""The answer layer: extract the final answer of a response, normalize it, compare it with the ground truth."""
