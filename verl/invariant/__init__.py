"""Products, attention and log-probs whose result for a token does not depend on what else is computed with it.

A sum in floating point depends on its order, and libraries choose the order by the shape of the whole call: one token
of many rows, as in generation, and whole rows, as in training, are rounded differently. Here the order is fixed: the
same tiles for any number of tokens, the keys of a row in blocks counted from its position 0, no sum split over
programs. So a token has the same bits alone, in a batch, in a prompt, in training, and out of a cache.

- `pieces`: on a CPU, calls of a library in pieces of one shape
- `functions`: the linear map and elementwise functions, with gradients
- `attention`: of whole rows, and of one token per row over a cache
- `kernels`: the product and the attention of a GPU, in Triton

Only forward passes are like this. Gradients are those of the ordinary functions at the same inputs.
"""
