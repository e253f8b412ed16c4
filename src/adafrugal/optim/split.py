"""SplitOptimizer: AdamW (or another rule) on a part of every gradient, a stateless rule on the rest.

A step reads top to bottom: look at the gradients, turn the clocks (shrink, refresh), give every tensor that has a
gradient the frame it is due, update group by group, count. All memory is numbers, names and tensors: settings, clocks
and cursors live in `param_groups`, moments in `state`; both travel with pickle, accelerate and distributed checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adafrugal.core.errors import NotSupportedError
from adafrugal.optim import adamw_state, clocks, state
from adafrugal.optim.attach import Attachment, refuse_unfusable, refuse_wrapped
from adafrugal.optim.describe import Description, describe
from adafrugal.optim.dispatch import Dispatch, Path, numbers_of
from adafrugal.optim.finite import CHECKS, CheckFinite, FiniteGuard
from adafrugal.optim.groups import Group, as_groups, split_by_shape
from adafrugal.optim.memory import measure
from adafrugal.optim.placing import Placement
from adafrugal.optim.rounding import Rounding
from adafrugal.optim.rules import rule_of
from adafrugal.optim.settings import check_choice, check_group, complete_group, dtype_name

StateLayout = Literal["compact", "padded"]
_CARRIED = {"path": "auto", "check_finite": "deferred", "state_layout": "compact"}  # with what old pickles meant


class SplitOptimizer(Optimizer):
    """The engine under every method here: it takes numbers, never policies.

    At each step, for every split tensor with gradient g: p <- p (1 - lr wd); the part of g inside the frame goes to
    ``rule``, times lr * stateful_lr_scale; the rest to ``stateless_rule``, times lr * stateless_lr_scale.

    Args:
        params: A model, parameters, named parameters, or groups (see `param_groups`). Without a model, tensors are
            sorted by shape, and `describe` says so.
        lr: Learning rate; a float or a tensor of one element. A scheduler may write it.
        density: Share of each split tensor's elements that is stateful, in [0, 1].
        update_gap: Steps between refreshes.
        subspace: How the stateful part is chosen; a name of ``SUBSPACES``.
        on_refresh: What happens to moments at a refresh; None takes the subspace's own (lines keep, bases project).
        rule: Of the stateful part; a name of ``RULES``.
        stateless_rule: Of the rest: ``"sign"``, ``"sgd"`` or ``"none"``.
        stateful_lr_scale, stateless_lr_scale: Multiply lr inside the frame of split tensors, and outside of it.
        betas, eps: Of the rule.
        weight_decay: Decoupled, on every parameter of the group.
        seed: Of frames and of stochastic rounding; the global stream is never touched.
        state_dtype: Of the moments; None means float32 (float64 for float64 weights). ``torch.bfloat16`` halves them.
        rounding: How bfloat16 weights take an update: ``"stochastic"``, ``"kahan"`` (one more buffer of the weights'
            size) or ``"nearest"`` (small updates are lost).
        check_finite: ``"deferred"`` remembers on the device and raises at the next refresh, `verify_finite`,
            `state_dict` or observation; ``"before"`` waits for the device and raises before weights move; ``"off"``.
        compile: Compile the update of split tensors; `step` stays an ordinary method.
        freeze_idle: Take ``requires_grad`` from tensors that are neither stateful nor touched by the rest rule.
        state_layout: ``"padded"`` makes saved shapes independent of density and frame; always so under FSDP2.
        differentiable: Always False; here to refuse True with a reason.
        extra: Further settings that a method keeps in its groups.

    Raises:
        ConfigError: For a value outside its range, an unknown name, or a density that a subspace cannot hold.
        TypeError: For a set or a lone tensor.

    Cost:
        State: 8 bytes (float32) for each stateful element. Step: see benchmarks/optimizer_step.py.

    Source:
        FRUGAL (arXiv 2411.07837), algorithm 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        >>> opt = SplitOptimizer(model, lr=1e-2, density=0.25)
        >>> model(torch.ones(4, 32)).square().mean().backward()
        >>> opt.step()
        >>> opt.memory()["state_bytes"], opt.memory()["adamw_state_bytes"]
        (4608, 16896)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        density: float = 0.25,
        update_gap: int = 200,
        subspace: str = "columns",
        on_refresh: str | None = None,
        rule: str = "adamw",
        stateless_rule: str = "sign",
        stateful_lr_scale: float = 1.0,
        stateless_lr_scale: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
        state_dtype: torch.dtype | str | None = None,
        rounding: Rounding = "stochastic",
        check_finite: CheckFinite = "deferred",
        compile: bool = False,
        freeze_idle: bool = False,
        state_layout: StateLayout = "compact",
        differentiable: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._method = type(self).__name__
        check_choice(f"{self._method}(check_finite=...)", check_finite, CHECKS)
        check_choice(f"{self._method}(state_layout=...)", state_layout, ("compact", "padded"))
        if differentiable:
            raise NotSupportedError(
                f"{self._method}(differentiable=True)",
                "differentiable=True",
                "False: weights change in place, and sign has no useful derivative",
                "Use torch.optim.AdamW(differentiable=True) for meta-learning.",
            )
        defaults: dict[str, Any] = {
            "lr": lr,
            "density": density,
            "density_start": density,
            "update_gap": update_gap,
            "subspace": subspace,
            "on_refresh": on_refresh,
            "rule": rule,
            "stateless_rule": stateless_rule,
            "stateful_lr_scale": stateful_lr_scale,
            "stateless_lr_scale": stateless_lr_scale,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "seed": seed,
            "state_dtype": dtype_name(state_dtype),
            "rounding": rounding,
            "freeze_idle": freeze_idle,
            **(extra or {}),
        }
        self.path: Path = "compile" if compile else "auto"
        self.check_finite: CheckFinite = check_finite
        self.state_layout: StateLayout = state_layout
        self._start_afresh()
        super().__init__(as_groups(params), defaults)

    def _start_afresh(self) -> None:
        """Forget all that is worked out from groups and state."""
        self._placement: Placement | None = None
        self._guard: FiniteGuard | None = None
        self._dispatch = Dispatch()
        self._attachment: Attachment | None = None
        self._in_step = self._applied = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that says neither role nor subspace is split by shape, and may become two.

        Raises:
            ConfigError: As the constructor.
        """
        self.verify_finite()
        handed_over = sum(len(group["params"]) for group in self.param_groups)
        parts = [param_group] if "reasons" in param_group else split_by_shape(param_group, handed_over)
        for part in parts:
            group = complete_group(part, self.defaults, self.param_groups, self._method)
            super().add_param_group(group)
        self._placement = None

    @property
    def split_groups(self) -> list[Group]:
        """The groups whose density and gap may move."""
        return [group for group in self.param_groups if group["role"] == "split"]

    def set_density(self, density: float) -> None:
        """Write a density into all split groups; a fall takes effect at the next step, a rise at the next refresh."""
        self._write("density", density)

    def set_update_gap(self, update_gap: int) -> None:
        """Write a gap in steps into all split groups; it is compared with the steps since the last refresh."""
        self._write("update_gap", update_gap)

    def _write(self, name: str, value: float) -> None:
        for group in self.split_groups:
            check_group({**group, name: value}, self.defaults, f"{self._method}.set_{name}")
            group[name] = value

    @torch._disable_dynamo  # a compiled training step calls this one as it is; compile=True compiles inside
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient.

        Nothing advances where no parameter has one. Attached to backward, the updates have happened, and this counts.

        Args:
            closure: Runs forward and backward, with autograd on, and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            NotSupportedError: For sparse gradients, or a GradScaler on an attached optimizer.
            NonFiniteError: See ``check_finite``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._attachment is not None and getattr(self, "grad_scale", None) is not None:
            refuse_unfusable(accumulation_steps=1, max_grad_norm=None, grad_scaler=self, check_finite="off")
        waiting = [
            [(i, param) for i, param in enumerate(group["params"]) if param.grad is not None]
            for group in self.param_groups
        ]
        if not self._in_step and not any(waiting):
            return loss
        self._look_at([param for members in waiting for _, param in members])
        self._begin_step()
        for group, members in zip(self.param_groups, waiting, strict=True):
            self._update(group, members)
        self._finish_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does."""
        self._applied = False
        super().zero_grad(set_to_none)

    @property
    def last_step_applied(self) -> bool:
        """Whether `step` has updated weights since the last `zero_grad`: False after a GradScaler skipped it."""
        return self._applied

    def _look_at(self, params: Sequence[Tensor]) -> None:
        """Refuse gradients that cannot be used, before any weight moves."""
        self._places().refuse_sparse(params, f"{self._method}.step()")
        if self.check_finite == "before":
            places = self._places().places
            grads = ((places[p].slot, cast(Tensor, p.grad)) for p in params)
            self._finite().check_before(grads, self.param_groups[0]["step"] + 1)

    def _begin_step(self) -> None:
        """Turn every group's clocks, once a step."""
        if self._in_step:
            return
        self._in_step = True
        self._turn(self.param_groups)

    def _turn(self, groups: Sequence[Group]) -> None:
        """Shrink what has fallen, refresh what is due."""
        if any(group["refreshed_at"] is not None and clocks.refresh_is_due(group) for group in groups):
            self.verify_finite()
        placement = self._places()
        for group in groups:
            items = placement.items(group)
            shrunk = clocks.shrink(group, items)
            if shrunk:
                placement.let_go(group, self.state)
            due = clocks.refresh_is_due(group)
            if due:
                clocks.refresh(group, items)
                placement.let_go(group, self.state)
            if (shrunk or due) and group["freeze_idle"]:
                self._freeze_idle(group)

    def _update(self, group: Group, members: Sequence[tuple[int, Tensor]]) -> None:
        """Update some tensors of one group, each on the path that its device and frame ask for."""
        if not members:
            return
        placement = self._places()
        jobs = [placement.job(param, i, group, self.state, cast(Tensor, param.grad)) for i, param in members]
        guard = self._finite() if self.check_finite == "deferred" else None
        self._dispatch.update(jobs, numbers_of(group), guard, self.path)

    def _finish_step(self) -> None:
        """Count the step; groups that freeze what is idle turn now, so that the next backward knows."""
        if self._guard is not None:
            self._guard.close_step(self.param_groups[0]["step"] + 1)
        for group in self.param_groups:
            group["step"] += 1
        self._in_step, self._applied = False, True
        if self._attachment is not None:
            self._attachment.done.clear()
        self._turn([g for g in self.param_groups if g["freeze_idle"] and clocks.refresh_is_due(g)])

    def _freeze_idle(self, group: Group) -> None:
        """Only tensors with a stateful part, or with a rest rule that acts, need a gradient."""
        for param, width in zip(group["params"], group["widths"], strict=True):
            param.requires_grad_(width > 0 or group["stateless_rule"] != "none")
            if self._attachment is not None:
                self._attachment.watch(param)

    def attach(
        self,
        model: nn.Module,
        *,
        accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        grad_scaler: object | None = None,
    ) -> None:
        """Fuse the update into backward: each gradient is used and freed as soon as it is complete.

        `step`, `zero_grad`, schedulers and `state_dict` work as before; `step` ends the step.

        Args:
            model: The model that is trained.
            accumulation_steps: What the loop does; more than 1 is refused.
            max_grad_norm: What the loop clips to; anything but None or 0 is refused.
            grad_scaler: What the loop scales with; anything but None is refused.

        Raises:
            NotSupportedError: For these, for several processes, and for other libraries' hooks on gradients.
        """
        refuse_unfusable(
            accumulation_steps=accumulation_steps,
            max_grad_norm=max_grad_norm,
            grad_scaler=grad_scaler,
            check_finite=self.check_finite,
        )
        refuse_wrapped(model)
        if self._attachment is not None:
            raise NotSupportedError("optimizer.attach(model)", "a second one", "one at a time", "Call detach() first.")
        names = {p: place.item.name for p, place in self._places().places.items()}
        self._attachment = Attachment(self.update_parameter, names)

    def detach(self) -> None:
        """Take the hooks off; from the next backward on, gradients stay and `step` updates as usual."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    @property
    def attached(self) -> bool:
        """Whether the update is fused into backward."""
        return self._attachment is not None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Makes a GradScaler hand its scale to `step` while attached, where it is refused."""
        return self._attachment is not None

    def update_parameter(self, param: Tensor) -> None:
        """Update one parameter from its gradient now; the step that this belongs to ends with `step`.

        For a gradient source that hands gradients over one by one; `attach` calls it from hooks of its own.
        """
        self._look_at([param])
        self._begin_step()
        at = self._places().places[param]
        self._update(self.param_groups[at.group], [(at.index, param)])

    def verify_finite(self) -> None:
        """Read what the deferred check remembers.

        Raises:
            NonFiniteError: Names the parameters and steps.
        """
        if self.check_finite != "deferred" or self._placement is None:
            return
        moments: dict[int, Tensor] = {}
        for group in self.param_groups:
            first = next(iter(rule_of(group["rule"], group).moment_powers), None)
            for param in group["params"]:
                kept = self.state.get(param, {}).get(first)
                if kept is not None:
                    moments[self._placement.places[param].slot] = kept
        self._finite().report(moments, self.param_groups[0]["step"])

    def memory(self) -> dict[str, int]:
        """Bytes, counted exactly.

        Returns:
            ``state_bytes`` (moments), ``index_bytes`` (index vectors, bases, steps of entry), ``compensation_bytes``
            (Kahan's buffers), ``total_bytes`` of these three, ``step_bytes`` (largest temporaries of a step on a CPU),
            ``planned_state_bytes`` (what the widths in force promise), ``adamw_state_bytes`` (what torch's AdamW would
            hold for the same parameters).
        """
        return measure(self.param_groups, self.state, self._places())

    def describe(self) -> Description:
        """Who is split, stateful and stateless, and why; printing it shows a table."""
        return describe(self.param_groups, self.state, self._places())

    def state_dict(self) -> dict[str, Any]:
        """Settings, clocks and moments: tensors, numbers, strings, lists and dicts only.

        Raises:
            NonFiniteError: If the deferred check has found something: a broken state is not worth saving.
        """
        self.verify_finite()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        layout = "padded" if self._places().sharded else self.state_layout
        saved = state.saved_state(self.param_groups, self.state, self._places(), layout)
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, by name where names are known on both sides.

        Settings that are numbers come from the checkpoint, as in torch; write to `param_groups` afterwards to change
        one. State keeps its dtype and shares nothing with ``state_dict``.

        Raises:
            CheckpointError: If groups, names, shapes, method or format do not match; says which.
        """
        saved = state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            saved = hook(self, saved) or saved
        groups, states = state.loaded_state(saved, self.param_groups)
        attached = self._attachment
        self.__setstate__({"state": defaultdict(dict, states), "param_groups": groups})
        self._attachment = attached
        for group in self.param_groups:
            if group["freeze_idle"] and group["widths"]:
                self._freeze_idle(group)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def adamw_state_dict(self) -> dict[str, Any]:
        """The state as ``torch.optim.AdamW(model.parameters())`` loads it; missing moments are zeros."""
        return adamw_state.exported(self.param_groups, self.state, self._places())

    def load_adamw_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start from the state of ``torch.optim.AdamW`` over the same parameters: what fits the frames is kept."""
        self._turn(self.param_groups)
        adamw_state.imported(state_dict, self.param_groups, self.state, self._places())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild after pickling, copying or loading."""
        super().__setstate__(state)
        self._method = type(self).__name__
        self.__dict__.update({**_CARRIED, **self.__dict__})
        self._start_afresh()

    def __getstate__(self) -> dict[str, Any]:
        """What pickling and copying carry: settings and state, never hooks."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _CARRIED}}

    def _places(self) -> Placement:
        if self._placement is None or not self._placement.is_of(self.param_groups):
            self._placement = Placement(self.param_groups)
            self._guard = None
        return self._placement

    def _finite(self) -> FiniteGuard:
        placement = self._places()
        if self._guard is None:
            self._guard = FiniteGuard(placement.names)
        return self._guard
