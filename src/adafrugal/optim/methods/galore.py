"""GaLore: AdamW in the leading singular subspace of each gradient, nothing outside of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adafrugal.optim.finite import CheckFinite
from adafrugal.optim.rounding import Rounding
from adafrugal.optim.split import SplitOptimizer


class GaLore(SplitOptimizer):
    """Low-rank gradients: the rank is density * min(rows, cols).

    Args:
        params: A model, parameters, named parameters, or groups.
        lr: Learning rate; the paper's pre-training uses 1e-2.
        density: Rank over full rank, in [0, 1].
        update_gap: Steps between two decompositions.
        stateful_lr_scale: GaLore's alpha: multiplies lr inside the subspace.
        on_refresh: ``"carry"`` is GaLore's: the numbers stay under the new basis. ``"project"`` and ``"reset"`` too.
        subspace: ``"svd"``, or ``"random"``.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: Decoupled, on whole tensors.
        seed: Of the fall-back for zero gradients and of random bases.
        state_dtype: Of the moments; None means float32.
        rounding: How bfloat16 weights take an update.
        check_finite: See `SplitOptimizer`.

    Cost:
        A refresh decomposes every matrix: seconds on a CPU. The bases are held besides the moments.

    Source:
        GaLore (arXiv 2403.03507), algorithm 2.

    Deviations:
        Embeddings, head, norms and biases are trained by AdamW at the full rate, as in FRUGAL's comparison.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        *,
        density: float = 0.25,
        update_gap: int = 200,
        stateful_lr_scale: float = 0.25,
        on_refresh: str = "carry",
        subspace: str = "svd",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
        state_dtype: torch.dtype | str | None = None,
        rounding: Rounding = "stochastic",
        check_finite: CheckFinite = "deferred",
    ) -> None:
        super().__init__(
            params,
            lr,
            density=density,
            update_gap=update_gap,
            subspace=subspace,
            on_refresh=on_refresh,
            stateless_rule="none",
            stateful_lr_scale=stateful_lr_scale,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            seed=seed,
            state_dtype=state_dtype,
            rounding=rounding,
            check_finite=check_finite,
        )
