"""Peak memory by watching a step: of a real model traced without storage at two depths, and of anything that runs.

Three tiers answer one question. The closed form (plan/activations) needs a shape; a trace needs the model's code, and
also knows what no shape says; a measurement needs the memory. A trace costs seconds, and sees all tensors that torch's
dispatcher makes, but not what a kernel holds inside; it can add no gradients in place, as torch does outside of a
dispatch mode, which makes it high by up to two tensors of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adafrugal.core.errors import ConfigError

PHASES = ("forward", "early backward", "late backward")


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is active, until each is freed.

    Attributes:
        now_bytes: Held now.
        peaks: The most in each phase.
        phase: What the next allocations belong to.

    Example:
        >>> with StorageTracker() as tracker:
        ...     kept = torch.zeros(1024)
        ...     passing = [kept + 1]
        ...     passing.clear()
        >>> tracker.now_bytes, tracker.peaks["forward"]
        (4096, 8192)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.phase = PHASES[0]
        self.peaks: dict[str, int] = {}
        self._known: dict[int, Any] = {}

    def track(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, once however many tensors share it."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.now_bytes -= num_bytes

        self._known[key] = ref(storage, freed)
        self.now_bytes += num_bytes
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return result


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step to trace.

    Args:
        model: Its gradients are what backward computes.
        loss: Runs forward and returns the loss.
        fused_backward: Whether each gradient is freed as soon as it is complete.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    fused_backward: bool = False


def traced_bytes(build: Callable[[int], TracedStep], num_layers: int, depths: tuple[int, int] = (2, 4)) -> int:
    """The most bytes that forward and backward hold besides weights, at a depth that is not built.

    A step is traced at two depths without storage. The peak of each phase grows by the same amount with each block, so
    that two depths give all others; backward is cut in two, since it has one peak at its beginning and one at its end,
    of which one grows with what is saved and the other with gradients.

    Args:
        build: Makes the step of a model with so many blocks; called under a fake tensor mode, where tensors have no
            storage: it may neither read values nor load weights.
        num_layers: The depth that is asked for, at least 1.
        depths: Those that are traced, two different ones.

    Returns:
        Bytes; what `plan.activations.step_bytes` predicts as its ``peak``.

    Raises:
        ConfigError: For depths that are not two.

    Cost:
        Seconds; the memory of Python's own objects.
    """
    shallow, deep = sorted(depths)
    if shallow < 1 or shallow == deep or num_layers < 1:
        raise ConfigError(
            f"traced_bytes(num_layers={num_layers}, depths={depths})",
            f"depths {depths}",
            "two different depths from 1, and a model of at least one block",
            "Leave depths at (2, 4).",
        )
    below, above = _trace(build, shallow), _trace(build, deep)
    return max(
        round(below[phase] + (above[phase] - below[phase]) * (num_layers - shallow) / (deep - shallow))
        for phase in PHASES
    )


def _trace(build: Callable[[int], TracedStep], depth: int) -> dict[str, int]:
    """Peaks by phase of one step, without weights."""
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        step = build(depth)
        trained = [param for param in step.model.parameters() if param.requires_grad]
        tracker = StorageTracker()
        arrived = 0

        def complete(param: Tensor) -> None:
            nonlocal arrived
            arrived += 1
            if 2 * arrived >= len(trained):
                tracker.phase = PHASES[2]
                tracker.peaks[PHASES[2]] = max(tracker.peaks.get(PHASES[2], 0), tracker.now_bytes)
            if step.fused_backward:
                param.grad = None

        handles: list[Any] = [param.register_post_accumulate_grad_hook(complete) for param in trained]
        known = [*step.model.parameters(), *step.model.buffers()]
        with tracker:
            for tensor in known:
                tracker.track(tensor)
            weights = tracker.now_bytes
            tracker.peaks.clear()
            loss = step.loss()
            tracker.phase = PHASES[1]
            loss.backward()
        for handle in handles:
            handle.remove()
        return {phase: tracker.peaks[phase] - weights for phase in PHASES}


def measured_peak(call: Callable[[], object], device: torch.device | None = None) -> int:
    """The most bytes that a call holds beyond what was held before it, as torch's allocators saw it.

    Args:
        call: Anything; it runs once. On a CPU it is not noticed when it frees what was made before, unless that was
            made in another measured call.
        device: A GPU, whose allocator keeps count itself; None or a CPU listens to torch's profiler.

    Returns:
        Bytes.

    Cost:
        The call, and on a CPU a profile of it.

    Example:
        >>> 8192 <= measured_peak(lambda: torch.zeros(1024) + 1) < 9000
        True
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = cast(Any, profile.profiler).kineto_results.events()
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
