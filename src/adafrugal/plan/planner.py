"""What fits into a memory limit, which of it is fastest, what dominates, and what each single change would save.

Every candidate is an optimizer, a precision, and what is traded for memory; its largest micro-batch that fits is found
by halving, since a larger one never needs less. Candidates are ranked by counted FLOPs and bytes, never by a timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from adafrugal.core.errors import ConfigError, NotSupportedError
from adafrugal.laws.flops import training_step_flops
from adafrugal.plan.activations import PRECISIONS, PrecisionName, StepSetting
from adafrugal.plan.parallel import Layout
from adafrugal.plan.parameters import meta_parameters
from adafrugal.plan.peak import StepPeak, step_peak
from adafrugal.plan.shapes import ModelShape
from adafrugal.plan.updates import DeviceKind, OptimizerBytes, optimizer_bytes

# What a byte moved costs in FLOPs, for ranking alone: of the order of GPUs and CPUs of the last years (50 to 300).
FLOPS_PER_BYTE = 100
# Costs that differ by less than this share are alike: the model of speed is no better.
NEAR = 0.1
# Matrix products of fewer rows than this leave cores idle: their time is that of so many.
_FULL_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What is taken from a limit before anything is planned into it.

    Args:
        fixed_bytes: Interpreter, libraries, and on a GPU its context.
        fraction: Of the limit, for what an allocator cannot use.
    """

    fixed_bytes: int
    fraction: float

    def usable(self, limit_bytes: int) -> int:
        """What is left to plan with; not below 0."""
        return max(0, int(limit_bytes * (1 - self.fraction)) - self.fixed_bytes)


# A process with torch and transformers holds 0.4 to 0.6 GB; a CUDA context .3 to .6 GiB, fragments 2 to 10 %.
FRAMES: Mapping[DeviceKind, Frame] = {
    "cpu": Frame(fixed_bytes=600 * 10**6, fraction=0.02),
    "cuda": Frame(fixed_bytes=600 * 2**20, fraction=0.06),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """An optimizer that may be planned with.

    Args:
        name: What to call it, such as ``"adafrugal"``.
        make: Builds it over parameters without storage.
    """

    name: str
    make: Callable[[nn.Module], Optimizer]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked.

    Args:
        shape: The model.
        memory_bytes: The limit of one process.
        sequence_length: Tokens of a window.
        sequences: Windows of an optimizer step on one process; micro-batches divide it.
        methods: Optimizers to consider, in the order in which they are preferred where all else is alike.
        layout: How the model lies over processes.
        device: Decides frame and temporaries.
        clips: Whether gradients are clipped by a global norm, which rules a fused backward out.
        precisions: To consider.

    Raises:
        ConfigError: If windows are longer than the model's positions, or there is nothing to consider.
    """

    shape: ModelShape
    memory_bytes: int
    sequence_length: int
    sequences: int
    methods: Sequence[Method]
    layout: Layout = Layout()  # noqa: RUF009 a frozen value
    device: DeviceKind = "cpu"
    clips: bool = True
    precisions: Sequence[PrecisionName] = PRECISIONS

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "sequence_length", "sequences"):
            value: int = getattr(self, name)
            if value < 1:
                raise ConfigError(f"Request({name}={value})", value, "a whole number above 0", f"Raise {name}.")
        if self.sequence_length > self.shape.max_sequence_length:
            raise ConfigError(
                f"--length {self.sequence_length}",
                self.sequence_length,
                f"at most the {self.shape.max_sequence_length} positions of the model",
                f"Set --length {self.shape.max_sequence_length}.",
            )
        if not self.methods or not self.precisions:
            raise ConfigError("Request(methods, precisions)", "nothing", "at least one of each", "Name one.")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train the model.

    Args:
        method: The optimizer's name.
        setting: Micro-batch, precision, what is traded.
        peak: Predicted bytes.
        step_flops: FLOPs of an optimizer step, what is computed again included.
        relative_cost: FLOPs, and bytes moved times `FLOPS_PER_BYTE`, of a token: what candidates are ranked by.
    """

    method: str
    setting: StepSetting
    peak: StepPeak
    step_flops: int
    relative_cost: float

    @property
    def needed_bytes(self) -> int:
        """The predicted peak."""
        return self.peak.peak_bytes

    def words(self) -> str:
        """In one line for people."""
        setting = self.setting
        traded = [
            *(["checkpointing"] if setting.checkpointing else []),
            *(["fused backward"] if setting.fused_backward else []),
        ]
        micro = f"micro-batch {setting.micro_batch}" + (
            f" x {setting.accumulation}" if setting.accumulation > 1 else ""
        )
        return ", ".join([self.method, setting.precision, micro, *traded])


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one change to a candidate would do.

    Args:
        what: In words.
        saved_bytes: Of the peak; negative where it needs more.
        candidate: What comes of it.
    """

    what: str
    saved_bytes: int
    candidate: Candidate


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Args:
        request: What was asked.
        usable_bytes: The limit without the frame.
        fitting: All that fits, each at its largest micro-batch, the fastest first.
        changes: What each single change of the recommendation would save; where nothing fits, of the smallest.
        smallest: The candidate that needs least, whether it fits or not.
    """

    request: Request
    usable_bytes: int
    fitting: tuple[Candidate, ...]
    changes: tuple[Change, ...]
    smallest: Candidate

    @property
    def recommended(self) -> Candidate | None:
        """Of those within a tenth of the fastest, the one whose optimizer was named first; None where nothing fits.

        Speed alone would always choose the optimizer with the least state, which learns less from each step.
        """
        if not self.fitting:
            return None
        near = [one for one in self.fitting if one.relative_cost <= (1 + NEAR) * self.fitting[0].relative_cost]
        order = [method.name for method in self.request.methods]
        return min(near, key=lambda one: order.index(one.method))  # the first, which is the fastest of its method

    @property
    def missing_bytes(self) -> int:
        """How many bytes are missing for the smallest; 0 where something fits."""
        return max(0, self.smallest.needed_bytes - self.usable_bytes)


def plan(request: Request) -> Plan:
    """Try all candidates and order what fits.

    Args:
        request: What is asked.

    Returns:
        The plan; ``fitting`` is empty if nothing does.

    Cost:
        Some milliseconds a candidate, whatever the sizes; nothing is built but parameters without storage.
    """
    usable = FRAMES[request.device].usable(request.memory_bytes)
    search = _Search(request)
    fitting: list[Candidate] = []
    smallest: Candidate | None = None
    for method in request.methods:
        for base in search.settings(method.name):
            least = search.candidate(method.name, base)
            if smallest is None or least.needed_bytes < smallest.needed_bytes:
                smallest = least
            best = search.largest(method.name, base, usable)
            if best is not None:
                fitting.append(best)
    assert (
        smallest is not None
    )  # a request has at least one method and precision, and plain training is always possible
    fitting.sort(key=lambda one: (one.relative_cost, one.needed_bytes))
    found = Plan(request=request, usable_bytes=usable, fitting=tuple(fitting), changes=(), smallest=smallest)
    return replace(found, changes=search.changes(found.recommended or smallest))


class _Search:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.held: dict[tuple[str, PrecisionName], OptimizerBytes] = {}
        for dtype in (torch.float32, torch.bfloat16):
            alike: list[PrecisionName] = [
                precision for precision in request.precisions if (precision == "bfloat16") == (dtype == torch.bfloat16)
            ]
            weights = meta_parameters(request.shape, dtype) if alike else nn.Module()
            for method in request.methods if alike else ():
                built = optimizer_bytes(method.make(weights), request.layout, device=request.device)
                for precision in alike:
                    self.held[method.name, precision] = built

    def settings(self, method: str) -> list[StepSetting]:
        """All trades, with one window at a time."""
        request = self.request
        fused = (False,) if request.clips else (False, True)
        found: list[StepSetting] = []
        for precision in request.precisions:
            for checkpointing in (False, True):
                for fuse in fused:
                    if fuse and not self.may_fuse(method, precision):
                        continue
                    micro = request.sequences if fuse else 1
                    found.append(self.setting(micro, precision, checkpointing, fuse))
        return found

    def may_fuse(self, method: str, precision: PrecisionName) -> bool:
        """Whether an update inside backward is possible."""
        request = self.request
        return not request.clips and request.layout.kind == "none" and self.held[method, precision].can_fuse

    def setting(self, micro: int, precision: PrecisionName, checkpointing: bool, fused: bool) -> StepSetting:
        """A setting of the request's batch."""
        return StepSetting(
            micro_batch=micro,
            sequence_length=self.request.sequence_length,
            precision=precision,
            checkpointing=checkpointing,
            fused_backward=fused,
            accumulation=self.request.sequences // micro,
        )

    def micro_batches(self) -> list[int]:
        """Divisors of the batch, the largest first."""
        sequences = self.request.sequences
        return [micro for micro in range(sequences, 0, -1) if sequences % micro == 0]

    def candidate(self, method: str, setting: StepSetting) -> Candidate:
        """Bytes and cost of one way."""
        request = self.request
        held = self.held[method, setting.precision]
        peak = step_peak(request.shape, setting, held, request.layout, device=request.device)
        flops = training_step_flops(
            request.shape.matrices,
            batch_size=request.sequences,
            sequence_length=request.sequence_length,
            checkpointing=setting.checkpointing,
        )
        padded = flops * max(1.0, _FULL_ROWS / setting.tokens)
        # Weights are read in forward and twice in backward of each micro-batch; an update reads and writes moments.
        weights = request.shape.num_parameters * setting.weight_bytes
        moved = 3 * weights * setting.accumulation + 4 * weights + 2 * held.state_bytes
        tokens = request.sequences * request.sequence_length
        return Candidate(
            method=method,
            setting=setting,
            peak=peak,
            step_flops=flops,
            relative_cost=(padded + FLOPS_PER_BYTE * moved) / tokens,
        )

    def largest(self, method: str, base: StepSetting, usable: int) -> Candidate | None:
        """The largest micro-batch of a setting that fits, or None."""
        if base.fused_backward:
            found = self.candidate(method, base)
            return found if found.needed_bytes <= usable else None
        sizes = self.micro_batches()
        low, high = 0, len(sizes)  # sizes[high:] fit, sizes[:low] do not
        while low < high:
            middle = (low + high) // 2
            setting = self.setting(sizes[middle], base.precision, base.checkpointing, False)
            if self.candidate(method, setting).needed_bytes <= usable:
                high = middle
            else:
                low = middle + 1
        if high == len(sizes):
            return None
        return self.candidate(method, self.setting(sizes[high], base.precision, base.checkpointing, False))

    def changes(self, shown: Candidate) -> tuple[Change, ...]:
        """Each single change of one candidate, the largest saving first."""
        setting, request = shown.setting, self.request
        tried: list[tuple[str, str, StepSetting]] = []
        if not setting.checkpointing:
            tried.append(("checkpointing", shown.method, replace(setting, checkpointing=True)))
        if setting.micro_batch > 1 and not setting.fused_backward:
            less = next(m for m in self.micro_batches() if m < setting.micro_batch)
            smaller = self.setting(less, setting.precision, setting.checkpointing, False)
            tried.append((f"micro-batch {less}", shown.method, smaller))
        tried += [
            (precision, shown.method, replace(setting, precision=precision))
            for precision in request.precisions
            if precision != setting.precision
        ]
        if not setting.fused_backward and setting.accumulation == 1 and self.may_fuse(shown.method, setting.precision):
            tried.append(("fused backward", shown.method, replace(setting, fused_backward=True)))
        tried += [(m.name, m.name, setting) for m in request.methods if m.name != shown.method]
        found: list[Change] = []
        for what, method, changed in tried:
            try:
                candidate = self.candidate(method, changed)
            except NotSupportedError:  # torch's own optimizers have no fused backward
                continue
            found.append(
                Change(what=what, saved_bytes=shown.needed_bytes - candidate.needed_bytes, candidate=candidate)
            )
        found.sort(key=lambda change: -change.saved_bytes)
        return tuple(found)


def longest_that_fits(request: Request) -> int | None:
    """The longest window, to a multiple of 64, with which anything fits; None if even the shortest is too long.

    Args:
        request: With windows that are too long.
    """
    low, high = 0, request.sequence_length // 64
    while low < high:
        middle = (low + high + 1) // 2
        if plan(replace(request, sequence_length=64 * middle)).fitting:
            low = middle
        else:
            high = middle - 1
    return 64 * low or None
