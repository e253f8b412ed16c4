"""BAdam: block coordinate descent. AdamW trains one layer at a time, for `update_gap` steps; the rest is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adafrugal.core.errors import ConfigError
from adafrugal.optim.blocks import has_layer
from adafrugal.optim.finite import CheckFinite
from adafrugal.optim.groups import Group, as_groups, canonical_name
from adafrugal.optim.rounding import Rounding
from adafrugal.optim.split import SplitOptimizer

_PER_PARAMETER = ("params", "param_names", "param_index", "stacked", "reasons")


class BAdam(SplitOptimizer):
    """A layer is all tensors whose names share everything up to their first number.

    Frozen tensors lose ``requires_grad`` while they are frozen, so that backward stops early and keeps no gradient for
    them; the next layer is chosen at the end of the last step of the present one.

    Args:
        params: A model, named parameters, or groups with names.
        lr: Learning rate.
        update_gap: Steps for each layer: exactly so many.
        order: ``"random"`` (a new permutation for each round), ``"ascending"`` or ``"descending"``.
        always_active: Patterns over canonical names of parameters outside the layers (a new head, say) that AdamW
            trains throughout.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: Decoupled, on what is active.
        seed: Of the order.
        state_dtype: Of the moments; None means float32.
        rounding: How bfloat16 weights take an update. BAdam keeps a float32 master of the block instead.
        check_finite: See `SplitOptimizer`.

    Raises:
        ConfigError: If no name holds a layer number, or a pattern matches nothing.

    Source:
        BAdam (arXiv 2404.02827), algorithm 1.

    Deviations:
        Every layer gets ``update_gap`` steps; the published code gives the first one fewer. Weight decay acts on norms
        as on any other tensor of the layer.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        update_gap: int = 50,
        order: Literal["random", "ascending", "descending"] = "random",
        always_active: Sequence[str] = (),
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
        state_dtype: torch.dtype | str | None = None,
        rounding: Rounding = "stochastic",
        check_finite: CheckFinite = "deferred",
    ) -> None:
        names = {"random": "one_layer", "ascending": "one_layer_ascending", "descending": "one_layer_descending"}
        if order not in names:
            raise ConfigError(f"BAdam(order={order!r})", order, f"one of {', '.join(names)}", "Use 'random'.")
        super().__init__(
            _layered(params, names[order], always_active),
            lr,
            density=1.0,
            update_gap=update_gap,
            subspace=names[order],
            on_refresh="reset",
            stateless_rule="none",
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            seed=seed,
            state_dtype=state_dtype,
            rounding=rounding,
            check_finite=check_finite,
            freeze_idle=True,
        )
        self._turn(self.param_groups)


def _layered(params: Any, subspace: str, always_active: Sequence[str]) -> list[Group]:
    """Sort parameters into layers, always active ones, and frozen ones."""
    named = list(params.named_parameters()) if isinstance(params, nn.Module) else params
    if isinstance(params, nn.Module):
        named = [{"params": [(n, p) for n, p in named if p.requires_grad], "role": "split", "subspace": "whole"}]
    unused = set(always_active)
    groups: list[Group] = []
    for group in as_groups(named):
        sorted_out: dict[str, list[int]] = {"split": [], "stateful": [], "stateless": []}
        for i, name in enumerate(group["param_names"] or [f"tensor {i}" for i in range(len(group["params"]))]):
            matches = {pattern for pattern in always_active if fnmatchcase(canonical_name(name), pattern)}
            unused -= matches
            sorted_out["stateful" if matches else "split" if has_layer(name) else "stateless"].append(i)
        for role, members in sorted_out.items():
            if members:
                part = {**group, "role": role, "label": "layers" if role == "split" else "outside the layers"}
                part |= {key: [group[key][i] for i in members] for key in _PER_PARAMETER if group[key]}
                part["reasons"] = [
                    {"split": "in a layer", "stateful": "always active", "stateless": "outside the layers"}[role]
                ] * len(members)
                part["subspace"] = subspace if role == "split" else part.get("subspace")
                groups.append(part)
    if unused:
        raise ConfigError(
            f"BAdam(always_active={sorted(unused)!r})",
            sorted(unused)[0],
            "patterns that match a parameter",
            "Check the names.",
        )
    if not any(group["role"] == "split" for group in groups):
        raise ConfigError(
            "BAdam(params)",
            "parameters without a layer number in their names",
            "a model or named parameters, such as 'layers.3.mlp.weight'",
            "Hand over the model, or model.named_parameters().",
        )
    return groups
