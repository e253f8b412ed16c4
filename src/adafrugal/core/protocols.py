"""The contracts between the layers: Rule, Subspace, Frame, GradientSource, Policy, MomentView."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from adafrugal.core.values import Backward, Budget, Decision, Snapshot

State = dict[str, Tensor]
PolicyMemory = Mapping[str, Any]
GradSink = Callable[[nn.Parameter, Tensor], None]


@runtime_checkable
class Rule(Protocol):
    """How a gradient becomes a direction: AdamW, Lion, SignSGD. Frozen and without state of its own.

    A rule knows neither the learning rate nor weight decay nor any other parameter; the engine multiplies its
    direction by the rate and subtracts it.
    """

    @property
    def moment_powers(self) -> Mapping[str, int]:
        """The names of the state tensors, each with the power of the gradient that it averages (1 or 2)."""
        ...

    def init(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> State:
        """Named zero tensors, each of ``shape``."""
        ...

    def direction(self, grad: Tensor, state: State, step: int | Tensor, out: Tensor | None = None) -> Tensor:
        """Advance ``state`` in place by ``grad`` and return the direction, in the gradient's shape.

        Args:
            grad: The gradient, float32 or float64, any shape.
            state: The tensors that ``init`` made, of the same shape.
            step: How many updates each coordinate has had, this one included: one number for all, or a
                tensor that broadcasts against the gradient.
            out: Where to write the direction, or None for a new tensor; contiguous, of the gradient's shape and dtype.

        Returns:
            A tensor that the caller may overwrite; it shares no memory with the state.
        """
        ...

    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The exact bytes of what ``init`` returns, without making it."""
        ...


@runtime_checkable
class FusedRule(Rule, Protocol):
    """A rule that has a kernel which updates many whole tensors at once."""

    def update_many(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[State],
        steps: list[int],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Decay and update contiguous parameters in place; all tensors share one dtype and one device."""
        ...


@runtime_checkable
class ListRule(Rule, Protocol):
    """A rule that finds many directions with few kernel launches."""

    def direction_many(self, grads: list[Tensor], states: list[State], steps: list[int]) -> list[Tensor]:
        """`direction` for each tensor; all share one dtype and one device."""
        ...


class Frame(Protocol):
    """Which part of one tensor is stateful, at one moment. Made by a subspace; never saved."""

    @property
    def width(self) -> int:
        """How many lines, or directions of a basis, are stateful."""
        ...

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of each state tensor."""
        ...

    @property
    def frame_bytes(self) -> int:
        """The exact bytes that the frame itself holds (index vectors, bases)."""
        ...

    def prefix(self, width: int) -> Frame:
        """The frame of the first ``width`` lines or directions, in this frame's own order."""
        ...

    def down(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """The stateful part of a (stack, rows, cols) tensor, in ``state_shape``; a view where possible without out."""
        ...

    def rest(self, full: Tensor, part: Tensor) -> Tensor:
        """What the stateless rule sees, given ``part = down(full)``; what `merge` overwrites may be anything."""
        ...

    def merge(self, full: Tensor, part: Tensor, scale: float = 1.0) -> None:
        """Put ``scale`` times the stateful part into a full tensor whose remainder is done; ``part`` may be changed."""
        ...


class Subspace(Protocol):
    """How the stateful part of a group is chosen. Pure: the same arguments give the same frames anywhere.

    ``items`` are the tensors of a group in the order of their canonical names, each with a name and a geometry.
    """

    @property
    def on_refresh_choices(self) -> tuple[str, ...]:
        """What may happen to moments at a refresh; the first one is the default."""
        ...

    @property
    def takes_vectors(self) -> bool:
        """Whether tensors of fewer than two dimensions may be in the group."""
        ...

    @property
    def reads_gradient(self) -> bool:
        """Whether `fit` looks at the gradient, so that its frames cannot be drawn again from a seed."""
        ...

    def geometry(self, shape: Sequence[int], stacked: bool, lowest_density: float) -> Any:
        """View a tensor as (stack, rows, cols); the same for a whole run."""
        ...

    def full_width(self, geometry: Any) -> int:
        """The width at which every coordinate is stateful."""
        ...

    def check(self, items: Sequence[Any], density: float, density_end: float) -> None:
        """Raise ConfigError for a density that can never work."""
        ...

    def share(
        self, items: Sequence[Any], density: float, cursor: int, draw: Callable[[int], torch.Generator]
    ) -> tuple[list[int], int]:
        """The width of each tensor's frame, and the cursor after this one."""
        ...

    def fit(self, geometry: Any, tensor: Tensor, width: int, generator: torch.Generator) -> Frame:
        """Draw one frame."""
        ...

    def state_shape(self, geometry: Any, width: int) -> tuple[int, ...]:
        """The shape of each state tensor, without a frame."""
        ...

    def frame_bytes(self, geometry: Any, width: int, dtype: torch.dtype) -> int:
        """The exact bytes of a frame, without one."""
        ...


class Task(Protocol):
    """What is learnt: a loss that is a sum over targets, so that micro-batches of any size add up."""

    def num_targets(self, batch: Tensor) -> int:
        """How many targets a micro-batch has; known before the model has run."""
        ...

    def num_tokens(self, batch: Tensor) -> int:
        """How many tokens a micro-batch bills; what only fills it up is none."""
        ...

    def loss_sum(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The loss in nats, summed over the targets of a micro-batch; a scalar in float32 with a graph."""
        ...


class GradientSource(Protocol):
    """Where gradients come from: plain backprop, backprop fused with the update, later replayed seeds."""

    def run(self, model: nn.Module, batches: Sequence[Tensor], task: Task, sink: GradSink) -> Backward:
        """Hand the gradient of each trainable parameter to the sink exactly once.

        Args:
            model: The model, in training mode.
            batches: The micro-batches of one global batch; the gradient is that of their mean loss over all targets.
            task: The loss.
            sink: Receives (parameter, gradient).

        Returns:
            The mean loss, the norm of the gradient where it is known, and what it cost.
        """
        ...


class Policy(Protocol):
    """Decides from values alone: no clock, no global, no effect. Its memory is plain data that is saved."""

    def decide(self, snapshot: Snapshot, budget: Budget | None, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """Return what to change, and the memory to pass in next time."""
        ...


class MomentView(Protocol):
    """A reader's view of an optimizer's moments, by canonical parameter name."""

    def moments(self, name: str) -> Mapping[str, Tensor]:
        """The full-shape moments of a parameter, zero where it is stateless, and the mask ``stateful``."""
        ...
