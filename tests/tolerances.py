"""Tolerances, each with its reason. Nobody loosens one to pass."""

# Two float64 programs that differ in the order of a few hundred operations on numbers of order 1.
FLOAT64 = 1e-12

# float32 has 6e-8; fifty steps of a few roundings each, on weights of order 1, add up to under 1e-5.
FLOAT32 = 1e-5

# Our update against torch.optim.AdamW in float32: the same formula in another order, at lr 1e-3, over 50 steps.
AS_ADAMW = 1e-6
