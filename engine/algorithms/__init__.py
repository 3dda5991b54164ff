"""The mathematics of every algorithm: plain functions, tensors and numbers in, tensors out.

Token tensors are [B, R] with a bool mask [B, R]; whatever stands in a masked slot, NaN included, changes neither a
result nor a gradient. Sums over ranks and microbatches arrive as arguments, so that no result depends on how a batch is
split.
"""
