"""SignSGD: a step of the same size for every coordinate, and no state at all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adafrugal.optim.finite import CheckFinite
from adafrugal.optim.groups import as_groups
from adafrugal.optim.rounding import Rounding
from adafrugal.optim.split import SplitOptimizer


class SignSGD(SplitOptimizer):
    """p <- p (1 - lr wd) - lr sign(g), for every parameter, embeddings and norms included.

    Args:
        params: A model, parameters, named parameters, or groups.
        lr: Learning rate: how far every coordinate moves.
        weight_decay: Decoupled: it never enters the sign.
        seed: Of stochastic rounding.
        rounding: How bfloat16 weights take an update.
        check_finite: See `SplitOptimizer`.

    Source:
        Bernstein et al. (arXiv 1802.04434).

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.tensor([-3.0])
        >>> SignSGD([weight], lr=0.5).step()
        >>> weight.item()
        1.5
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        *,
        weight_decay: float = 0.0,
        seed: int = 0,
        rounding: Rounding = "stochastic",
        check_finite: CheckFinite = "deferred",
    ) -> None:
        super().__init__(
            [{**group, "role": "stateless"} for group in as_groups(params)],
            lr,
            weight_decay=weight_decay,
            stateless_lr_scale=1.0,
            seed=seed,
            rounding=rounding,
            check_finite=check_finite,
        )
