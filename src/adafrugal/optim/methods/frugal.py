"""FRUGAL: AdamW on a share of every matrix that is drawn anew every `update_gap` steps, SignSGD on the rest."""

from __future__ import annotations

from adafrugal.optim.split import SplitOptimizer


class FRUGAL(SplitOptimizer):
    """A constant density and a constant gap: the engine with its defaults. Arguments are `SplitOptimizer`'s.

    Source:
        FRUGAL (arXiv 2411.07837).

    Deviations:
        Moments are kept line by line at a refresh (FRUGAL's own is ``on_refresh="reset"``); columns are a window that
        wraps around instead of scattered ones; the stateless scale is 0.1, where the paper's pre-training has 1.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        >>> FRUGAL(model, lr=1e-3, density=0.5).param_groups[0]["density"]
        0.5
    """
