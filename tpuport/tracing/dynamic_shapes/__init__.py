"""Tensors with a data-dependent size, stored in arrays of a static bound.

`x[mask]`, `nonzero` and slices with traced ends return a tensor whose physical array has the
largest possible size and whose first `count` elements along a dim are the real ones. An op is
allowed here only if it keeps those exact: elementwise, rows independent of each other, reductions
with the rest masked out, and gathers, scatters and concatenations that move them. All other ops are
refused.
"""
