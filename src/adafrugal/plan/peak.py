"""The peak memory of a training step: weights, gradients, optimizer state and activations at the worst of its moments.

The optimizer is a real one, built over parameters without storage (`meta_parameters`), and says itself what it holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from torch.optim import Optimizer

from adafrugal.core.errors import ConfigError, NotSupportedError
from adafrugal.optim import clocks
from adafrugal.optim.groups import Group
from adafrugal.optim.placing import Placement
from adafrugal.optim.schedules import DensityDecay
from adafrugal.optim.split import SplitOptimizer
from adafrugal.optim.subspaces import SUBSPACES, FixedSubspace
from adafrugal.plan.activations import StepSetting
from adafrugal.plan.parallel import Layout, laid_out
from adafrugal.plan.shapes import ModelShape
from adafrugal.plan.updates import DeviceKind, OptimizerBytes, optimizer_bytes, promised


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """Bytes of a step at its worst moment, by what they are; the six terms add up to the peak.

    Args:
        weight_bytes: Weights and buffers.
        gradient_bytes: Gradients held at the peak.
        state_bytes: Moments of the optimizer.
        index_bytes: Its bases, index vectors and step counts.
        activation_bytes: What forward has saved, and what forward and backward are working on, at the peak.
        temporary_bytes: What the optimizer's update holds for itself at the peak.
        phases: The most bytes in all at each moment: ``forward``, ``head``, ``norm``, ``blocks``, ``embedding``,
            ``update`` and, for a subspace that is fitted to gradients, ``refresh``.
        peak_bytes: The most of all moments.
        peak_phase: The moment's name.
    """

    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    index_bytes: int
    activation_bytes: int
    temporary_bytes: int
    phases: Mapping[str, int]
    peak_bytes: int
    peak_phase: str


@dataclass(frozen=True, kw_only=True)
class StatePath:
    """Bytes of optimizer state over a run whose density moves: moments, bases and index vectors.

    Args:
        peak_bytes: The most after any step.
        mean_bytes: The mean over all steps.
        final_bytes: After the last step.
    """

    peak_bytes: int
    mean_bytes: float
    final_bytes: int


def step_peak(
    shape: ModelShape,
    setting: StepSetting,
    optimizer: Optimizer | OptimizerBytes,
    layout: Layout = Layout(),  # noqa: B008 a frozen value
    *,
    device: DeviceKind = "cpu",
) -> StepPeak:
    """Predict the peak memory of one training step on one process.

    The most of: the moments of forward and backward; the optimizer's update after backward, with all gradients; a
    refresh of its subspace. An update that is fused into backward comes on top of what is held when a gradient is
    complete.

    Args:
        shape: The model.
        setting: Batch, precision, and what is traded for memory.
        optimizer: Built over ``meta_parameters(shape, dtype)``: ours, or torch's AdamW, Adam or SGD; or what
            `optimizer_bytes` read off it, where many settings are tried with one optimizer.
        layout: How the model lies over processes.
        device: Decides which of torch's implementations an optimizer takes, and so its temporaries.

    Returns:
        Bytes by what they are, and by moment.

    Raises:
        NotSupportedError: For a fused backward with torch's own optimizers or over several processes.

    Cost:
        Some milliseconds, whatever the sizes.

    Source:
        plan/activations for forward and backward, plan/updates for the optimizer, plan/parallel for several processes.

    Deviations:
        The allocator's own frame is not counted (fragments, context, libraries), nor what products in bfloat16 hold
        inside a CPU's kernels.

    Example:
        >>> import torch
        >>> from adafrugal.plan.parameters import meta_parameters
        >>> from adafrugal.plan.shapes import PRESETS
        >>> tiny = PRESETS.create("tiny")
        >>> adamw = torch.optim.AdamW(meta_parameters(tiny).parameters())
        >>> peak = step_peak(tiny, StepSetting(micro_batch=8, sequence_length=128), adamw)
        >>> peak.weight_bytes, peak.state_bytes, peak.peak_phase
        (3479040, 6958080, 'forward')
    """
    held = optimizer if isinstance(optimizer, OptimizerBytes) else optimizer_bytes(optimizer, layout, device=device)
    if setting.fused_backward:
        _refuse_unfusable(held, layout)
    laid = laid_out(shape, setting, layout)
    resident = laid.weight_bytes + held.state_bytes + held.index_bytes
    moments = {name: (total, gradients, 0) for name, (total, gradients) in laid.moments.items()}
    if setting.fused_backward:
        for numel, level in laid.arrivals.items():
            temporary = held.fused.get(numel, 0)
            if level + temporary > moments.get("update", (0, 0, 0))[0]:
                moments["update"] = (level + temporary, 0, temporary)
    else:
        steps = {"update": held.update_bytes}
        if held.refresh_bytes is not None:
            steps["refresh"] = held.refresh_bytes
        for name, temporary in steps.items():
            moments[name] = (laid.after_backward + laid.gradients + temporary, laid.gradients, temporary)
    phase = max(moments, key=lambda name: moments[name][0])
    total, gradients, temporary = moments[phase]
    return StepPeak(
        weight_bytes=laid.weight_bytes,
        gradient_bytes=gradients,
        state_bytes=held.state_bytes,
        index_bytes=held.index_bytes,
        activation_bytes=total - gradients - temporary,
        temporary_bytes=temporary,
        phases={name: resident + moment[0] for name, moment in moments.items()},
        peak_bytes=resident + total,
        peak_phase=phase,
    )


def _refuse_unfusable(held: OptimizerBytes, layout: Layout) -> None:
    if not held.can_fuse:
        raise NotSupportedError(
            "step_peak(setting) with fused_backward=True",
            "an optimizer of torch's",
            "one of this package, which can update inside backward",
            "Use FRUGAL at density 1, which is AdamW, or leave fused_backward off.",
        )
    if layout.kind != "none":
        raise NotSupportedError(
            "step_peak(setting, layout) with fused_backward=True",
            f"{layout.kind} on {layout.num_processes} processes",
            "one process, since gradients are averaged over several only after backward",
            "Leave fused_backward off.",
        )


def state_path(optimizer: Optimizer, total_steps: int) -> StatePath:
    """Optimizer state over a run: its peak, mean and end, as the optimizer itself would report them after each step.

    Density follows AdaFRUGAL's own policy, and every share and shrink is the optimizer's own, on copies of its groups.
    A gap that would grow with the validation loss is taken as it is: it changes when blocks take turns, not how much
    is held.

    Args:
        optimizer: Built over parameters of any device, meta as well; before its first step. It is not touched.
        total_steps: Steps of the run, at least 1.

    Raises:
        ConfigError: For no steps.

    Cost:
        One share for each refresh and each fall of the density.

    Deviations:
        Steps of entry (4 bytes a line that is younger than others) are counted as if every line needed one.
    """
    if total_steps < 1:
        raise ConfigError(f"state_path(total_steps={total_steps})", total_steps, "at least 1", "Count the steps.")
    if not isinstance(optimizer, SplitOptimizer):
        same = optimizer_bytes(optimizer)
        total = same.state_bytes + same.index_bytes
        return StatePath(peak_bytes=total, mean_bytes=float(total), final_bytes=total)
    groups: list[Group] = [{**group} for group in optimizer.param_groups]
    placement = Placement(groups)
    held_at: dict[tuple[int, tuple[int, ...]], int] = {}

    def held(number: int, group: Group) -> int:
        key = number, tuple(group["widths"])
        if key not in held_at:
            members = zip(group["params"], group["widths"], strict=True)
            held_at[key] = sum(sum(promised(placement.places[p], p, group, width)) for p, width in members)
        return held_at[key]

    peak = final = area = step = 0
    while step < total_steps:
        for group in groups:
            group["step"] = step
            group["density"] = _density(group, step, total_steps)
            items = placement.items(group)
            clocks.shrink(group, items)
            if clocks.refresh_is_due(group):
                clocks.refresh(group, items)
        final = sum(held(number, group) for number, group in enumerate(groups))
        following = min(_next_event(group, step, total_steps) for group in groups)
        peak, area, step = max(peak, final), area + final * (following - step), following
    return StatePath(peak_bytes=peak, mean_bytes=area / total_steps, final_bytes=final)


def _decay(group: Group) -> DensityDecay | None:
    """AdaFRUGAL's own policy for a group, where it has one and the optimizer itself follows it."""
    end = group.get("density_end")
    if group["role"] != "split" or end is None or group.get("policies") != "own":
        return None
    return DensityDecay(start=group["density_start"], end=end)


def _density(group: Group, step: int, total_steps: int) -> float:
    policy = _decay(group)
    if policy is None or (group["paper_timing"] and not clocks.refresh_is_due(group)):
        return group["density"]
    return policy.density(policy.level(step / total_steps))


def _next_event(group: Group, step: int, total_steps: int) -> int:
    """The next step at which a group's widths may change."""
    events = [total_steps]
    if not isinstance(SUBSPACES.create(group["subspace"]), FixedSubspace):
        events.append(group["refreshed_at"] + group["update_gap"])
    policy = _decay(group)
    if policy is not None:
        level = policy.level(step / total_steps)
        found = bisect_left(range(total_steps), level + 1, lo=step + 1, key=lambda at: policy.level(at / total_steps))
        events.append(found)
    return min(event for event in events if event > step)
