"""AdaFRUGAL: FRUGAL whose density falls as training goes on, and whose gap grows when the validation loss settles."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from adafrugal.core.errors import ConfigError
from adafrugal.core.ranks import mean_over_ranks
from adafrugal.core.values import Clock, Decision, Snapshot
from adafrugal.optim import clocks
from adafrugal.optim.finite import CheckFinite
from adafrugal.optim.groups import Group
from adafrugal.optim.rounding import Rounding
from adafrugal.optim.schedules import DensityDecay, OnRise, PlateauGap
from adafrugal.optim.settings import check_choice
from adafrugal.optim.split import SplitOptimizer, StateLayout

_log = logging.getLogger("adafrugal")
Policies = Literal["own", "external"]


class AdaFRUGAL(SplitOptimizer):
    """AdamW on a moving share of every matrix, SignSGD on the rest; works in any loop.

    Tell it how long the run is (``total_steps``), or where it stands (`set_progress`), and the validation loss
    (`observe`). The paper's three variants are settings: ``density_end=None`` keeps the density,
    ``update_gap_max=None`` keeps the gap, the defaults move both.

    Args:
        params: A model, parameters, named parameters, or groups (see `param_groups`).
        lr: Learning rate.
        total_steps: Optimizer steps of the run; None if `set_progress` is called.
        density: Starting share of each split tensor's elements that has AdamW's moments, in [0, 1]. It sets the peak.
        density_end: The share at the end; None keeps the density.
        update_gap: Starting number of steps between refreshes.
        update_gap_max: The gap grows no further; None keeps the gap.
        gap_growth: Factor of each growth, above 1.
        plateau_tolerance: Relative change of the loss **per observation** under which it counts as settled.
        plateau_window: How many observations lie between the losses compared.
        on_rise: What a rising loss does to the gap: ``"keep"`` it, or ``"restart"`` from the first one.
        paper_timing: Let density fall only at refreshes, as the paper does, and not as soon as it is due.
        subspace: How the share is chosen; see `FRUGAL`.
        on_refresh: What happens to moments at a refresh; None takes the subspace's default.
        stateful_lr_scale: Multiplies lr inside the frame.
        stateless_lr_scale: Multiplies lr for the rest; the paper has 1.0 in pre-training and 0.1 in fine-tuning.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: Decoupled.
        rule: Of the stateful part, in place of AdamW.
        stateless_rule: Of the rest, in place of the sign.
        seed: Of the frames.
        state_dtype: Of the moments; None means float32.
        rounding: How bfloat16 weights take an update.
        check_finite: See `SplitOptimizer`.
        policies: ``"own"``: this class writes density and gap. ``"external"``: somebody else does, through
            `set_density` and `set_update_gap`, and `observe` and `set_progress` are refused.
        compile: See `SplitOptimizer`.
        state_layout: See `SplitOptimizer`.
        differentiable: Always False.

    Raises:
        ConfigError: For a value outside its range, or at the first step if the length of the run is not known.

    Source:
        AdaFRUGAL (arXiv 2601.11568).

    Deviations:
        Density falls in 8 levels, as soon as each is due; steps since the last refresh count, not k mod T; a rising
        loss is no plateau; moments are kept line by line at a refresh.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        >>> opt = AdaFRUGAL(model, lr=1e-3, total_steps=100, update_gap=20)
        >>> [opt.observe(loss) for loss in (2.0, 1.999)], opt.param_groups[0]["update_gap"]
        ([False, True], 30)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        total_steps: int | None = None,
        *,
        density: float = 0.25,
        density_end: float | None = 0.05,
        update_gap: int = 200,
        update_gap_max: int | None = 1000,
        gap_growth: float = 1.5,
        plateau_tolerance: float = 5e-3,
        plateau_window: int = 1,
        on_rise: OnRise = "keep",
        paper_timing: bool = False,
        subspace: str = "columns",
        on_refresh: str | None = None,
        stateful_lr_scale: float = 1.0,
        stateless_lr_scale: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rule: str = "adamw",
        stateless_rule: str = "sign",
        seed: int = 0,
        state_dtype: torch.dtype | str | None = None,
        rounding: Rounding = "stochastic",
        check_finite: CheckFinite = "deferred",
        policies: Policies = "own",
        compile: bool = False,
        state_layout: StateLayout = "compact",
        differentiable: bool = False,
    ) -> None:
        check_choice(f"AdaFRUGAL(policies={policies!r})", policies, ("own", "external"))
        check_choice(f"AdaFRUGAL(on_rise={on_rise!r})", on_rise, ("keep", "restart"))
        _check_moving(total_steps, update_gap, update_gap_max, gap_growth, plateau_tolerance, plateau_window)
        super().__init__(
            params,
            lr,
            density=density,
            update_gap=update_gap,
            subspace=subspace,
            on_refresh=on_refresh,
            rule=rule,
            stateless_rule=stateless_rule,
            stateful_lr_scale=stateful_lr_scale,
            stateless_lr_scale=stateless_lr_scale,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            seed=seed,
            state_dtype=state_dtype,
            rounding=rounding,
            check_finite=check_finite,
            compile=compile,
            state_layout=state_layout,
            differentiable=differentiable,
            extra={
                "density_end": density_end,
                "density_level": 0,
                "density_written": None,
                "update_gap_start": update_gap,
                "update_gap_max": update_gap_max,
                "update_gap_written": None,
                "gap_growth": gap_growth,
                "plateau_tolerance": plateau_tolerance,
                "plateau_window": plateau_window,
                "on_rise": on_rise,
                "losses": [],
                "total_steps": total_steps,
                "paper_timing": paper_timing,
                "policies": policies,
            },
        )

    # --- density --------------------------------------------------------------------------------------------------

    def set_progress(self, progress: float) -> None:
        """Say which share of the budget is spent; density follows at the next step.

        Args:
            progress: In [0, 1].

        Raises:
            ConfigError: For a value outside [0, 1], or if ``total_steps`` or an external policy drives progress.
        """
        self._own("set_progress")
        if not (0.0 <= progress <= 1.0):
            raise ConfigError(
                f"opt.set_progress({progress!r})", progress, "the share of the budget spent, in [0, 1]", "Divide by it."
            )
        for group in self.param_groups:
            if group["total_steps"] is not None:
                raise ConfigError(
                    f"opt.set_progress({progress!r})",
                    f"total_steps={group['total_steps']} as well",
                    "one writer of progress",
                    "Build AdaFRUGAL with total_steps=None to set progress yourself.",
                )
            group["progress"] = float(progress)

    def _begin_step(self) -> None:
        """Move the density first; shrinks and refreshes follow it."""
        if not self._in_step:
            for group in self.split_groups:
                if group["policies"] == "own" and group["density_end"] is not None:
                    self._move_density(group)
        super()._begin_step()

    def _move_density(self, group: Group) -> None:
        self._only_writer(group, "density", group["density_start"])
        if group["total_steps"] is not None:
            group["progress"] = min(1.0, group["step"] / group["total_steps"])
        if group["progress"] is None:
            raise ConfigError(
                "AdaFRUGAL(total_steps=None).step()",
                "no progress",
                "a known length of the run, since density follows it",
                "Pass total_steps=..., call opt.set_progress(share) before each step, or set density_end=None.",
            )
        if group["paper_timing"] and not clocks.refresh_is_due(group):
            return
        policy = DensityDecay(start=group["density_start"], end=group["density_end"])
        decision, memory = policy.decide(_snapshot(group, None), None, {"level": group["density_level"]})
        group["density_level"] = memory["level"]
        self._apply([group], decision)

    # --- gap ------------------------------------------------------------------------------------------------------

    def observe(self, val_loss: float | Tensor, step: int | None = None) -> bool:
        """Tell the validation loss; the gap may grow.

        With several processes the loss is averaged over all ranks, so that they refresh at the same steps: a
        collective call, which every rank must make.

        Args:
            val_loss: In any unit; only relative changes matter.
            step: The step that it was measured at, for the log; None takes the optimizer's own count.

        Returns:
            Whether the gap grew.

        Raises:
            ConfigError: If an external policy drives the gap.
            NonFiniteError: If the deferred check has found something.
        """
        self._own("observe")
        self.verify_finite()
        groups = self.split_groups
        if not groups:
            return False
        group = groups[0]
        self._only_writer(group, "update_gap", group["update_gap_start"])
        loss = mean_over_ranks(float(val_loss.detach() if isinstance(val_loss, Tensor) else val_loss))
        at = group["step"] if step is None else step
        if not math.isfinite(loss):
            warnings.warn(
                f"AdaFRUGAL.observe: the validation loss at step {at} is {loss}; it is left out", stacklevel=2
            )
            return False
        maximum = group["update_gap_max"]
        policy = PlateauGap(
            start=group["update_gap_start"],
            maximum=group["update_gap"] if maximum is None else maximum,
            growth=group["gap_growth"],
            tolerance=group["plateau_tolerance"],
            window=group["plateau_window"],
            on_rise=group["on_rise"],
        )
        before = group["update_gap"]
        decision, memory = policy.decide(_snapshot(group, loss), None, {"losses": group["losses"]})
        for member in groups:
            member["losses"] = list(memory["losses"])
        self._apply(groups, decision)
        if decision.settings:
            _log.info("step %d: update_gap %d -> %d: %s", at, before, group["update_gap"], decision.reason)
        return group["update_gap"] > before

    # --- who writes -----------------------------------------------------------------------------------------------

    def set_density(self, density: float) -> None:
        """Write a density; only with ``policies="external"``.

        Raises:
            ConfigError: If this class's own policy writes it.
        """
        self._external("set_density")
        super().set_density(density)

    def set_update_gap(self, update_gap: int) -> None:
        """Write a gap; only with ``policies="external"``.

        Raises:
            ConfigError: If this class's own policy writes it.
        """
        self._external("set_update_gap")
        super().set_update_gap(update_gap)

    def _apply(self, groups: list[Group], decision: Decision) -> None:
        """Write a decision's settings into groups, and remember that it was us."""
        for group in groups:
            for name, value in decision.settings.items():
                group[name] = value
                group[f"{name}_written"] = value

    def _only_writer(self, group: Group, name: str, start: Any) -> None:
        """Refuse to go on if somebody else has written a number that this class's policy writes."""
        expected = start if group[f"{name}_written"] is None else group[f"{name}_written"]
        if group[name] != expected:
            raise ConfigError(
                f"param_groups[...][{name!r}] = {group[name]!r}",
                f"a second writer of {name}, which the optimizer's own policy had set to {expected!r}",
                "one writer",
                "Build AdaFRUGAL(policies='external') and use set_density and set_update_gap.",
            )

    def _own(self, call: str) -> None:
        self._need("own", call, "Leave it to the external policy, or build AdaFRUGAL(policies='own').")

    def _external(self, call: str) -> None:
        self._need("external", call, "Build AdaFRUGAL(policies='external') to write density and gap yourself.")

    def _need(self, policies: Policies, call: str, action: str) -> None:
        for group in self.split_groups:
            if group["policies"] != policies:
                raise ConfigError(f"opt.{call}(...)", f"policies={group['policies']!r}", "one writer", action)


def _snapshot(group: Group, val_loss: float | None) -> Snapshot:
    """What the policies may look at."""
    progress = group["progress"] if group["progress"] is not None else 0.0
    settings = {"density": group["density"], "update_gap": group["update_gap"]}
    return Snapshot(clock=Clock(step=group["step"], progress=progress), val_loss=val_loss, settings=settings)


def _check_moving(
    total_steps: int | None,
    update_gap: int,
    update_gap_max: int | None,
    gap_growth: float,
    plateau_tolerance: float,
    plateau_window: int,
) -> None:
    """Check the settings that only AdaFRUGAL has."""
    checks = (
        (total_steps is None or total_steps >= 1, f"total_steps={total_steps}", "at least 1, or None", "Count steps."),
        (
            update_gap_max is None or update_gap_max >= update_gap,
            f"update_gap={update_gap}, update_gap_max={update_gap_max}",
            "a maximum of at least the starting gap, or None to keep the gap",
            "Raise update_gap_max.",
        ),
        (gap_growth > 1.0, f"gap_growth={gap_growth}", "a factor above 1", "Try 1.5."),
        (plateau_tolerance >= 0.0, f"plateau_tolerance={plateau_tolerance}", "at least 0", "Try 0.005."),
        (plateau_window >= 1, f"plateau_window={plateau_window}", "at least 1 observation", "Try 1."),
    )
    for holds, value, allowed, action in checks:
        if not holds:
            raise ConfigError(f"AdaFRUGAL({value})", value, allowed, action)
