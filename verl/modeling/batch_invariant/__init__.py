"""Batch-invariant computation: the result for a token does not depend on the other tokens of the batch."""
