"""How a gradient becomes a direction: AdamW, Lion, momentum, SignSGD, SGD, and nothing at all.

Every rule is a frozen value built from a group's numbers at each step, since schedulers write those. The same rules
serve as the stateful part and, where they have no state, as the stateless rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from adafrugal.core.catalog import Catalog
from adafrugal.core.protocols import Rule, State


def _zeros(names: Sequence[str], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> State:
    return {name: torch.zeros(tuple(shape), dtype=dtype, device=device) for name in names}


def _bytes(num_tensors: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    return num_tensors * math.prod(shape) * dtype.itemsize


def _bias_correction(beta: float, step: int | Tensor) -> float | Tensor:
    """1 - beta**step, exact in double for a number and to float32's precision for a tensor of steps."""
    if isinstance(step, int):
        return 1.0 - beta**step
    return torch.ones_like(step) if beta == 0.0 else -torch.expm1(step * math.log(beta))


@dataclass(frozen=True)
class AdamW:
    """Adam's direction, in torch's convention: bias correction on both moments, eps outside the root.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  d = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        betas: Decay of the two moments, each in [0, 1).
        eps: Added to the root, above 0.

    Source:
        Loshchilov and Hutter (arXiv 1711.05101); torch.optim.AdamW for the order of operations. Decay is the engine's.
    """

    betas: tuple[float, float]
    eps: float

    @property
    def moment_powers(self) -> Mapping[str, int]:
        """First and second moment."""
        return {"exp_avg": 1, "exp_avg_sq": 2}

    def init(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> State:
        """Both moments at zero."""
        return _zeros(("exp_avg", "exp_avg_sq"), shape, dtype, device)

    def direction(self, grad: Tensor, state: State, step: int | Tensor, out: Tensor | None = None) -> Tensor:
        """See the class; moments in another dtype than the gradient are computed in the gradient's."""
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        fused = isinstance(step, int) and grad.device.type == "cpu" and not torch.compiler.is_compiling()
        if fused and grad.is_contiguous() and mean.dtype == grad.dtype:
            # On a CPU the fused kernel is the fastest way to a direction: a zero weight stepped at rate -1.
            out = torch.zeros_like(grad) if out is None else out.zero_()
            assert isinstance(step, int)
            self.update_many([out], [grad], [state], [step], lr=-1.0, weight_decay=0.0)
            return out
        beta1, beta2 = self.betas
        if mean.dtype == grad.dtype:
            mean.lerp_(grad, 1.0 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        else:
            wide_mean = mean.to(grad.dtype).lerp_(grad, 1.0 - beta1)
            wide_square = square.to(grad.dtype).mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            mean.copy_(wide_mean)
            square.copy_(wide_square)
            mean, square = wide_mean, wide_square
        first, second = _bias_correction(beta1, step), _bias_correction(beta2, step)
        root = second.sqrt() if isinstance(second, Tensor) else math.sqrt(second)
        denominator = torch.sqrt(square, out=out).div_(root).add_(self.eps)
        return torch.div(mean, denominator.mul_(first), out=denominator)

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
        """Update contiguous tensors with torch's fused kernel.

        Raises:
            ValueError: If a tensor is not contiguous: the kernel would write outside of a strided view, in silence.
        """
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        for tensor in (*params, *grads, *means, *squares):
            if not tensor.is_contiguous():
                raise ValueError("the fused kernel takes contiguous tensors only: it writes outside of strided views")
        device = params[0].device
        counters = {step: torch.tensor(float(step), device=device) for step in set(steps)}
        torch._fused_adamw_(
            params,
            grads,
            means,
            squares,
            [],
            [counters[step] for step in steps],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def direction_many(self, grads: list[Tensor], states: list[State], steps: list[int]) -> list[Tensor]:
        """The same in lists, where the moments have the gradients' dtype; else one by one."""
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        if any(mean.dtype != grad.dtype for mean, grad in zip(means, grads, strict=True)):
            return [self.direction(g, s, t) for g, s, t in zip(grads, states, steps, strict=True)]
        beta1, beta2 = self.betas
        torch._foreach_lerp_(means, grads, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, [math.sqrt(1.0 - beta2**step) for step in steps])
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_mul_(denominators, [1.0 - beta1**step for step in steps])
        return list(torch._foreach_div(means, denominators))

    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Two tensors."""
        return _bytes(2, shape, dtype)


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum: d = sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g.

    Args:
        betas: Interpolation and decay; the paper uses (0.9, 0.99).

    Source:
        Chen et al. (arXiv 2302.06675), algorithm 2.
    """

    betas: tuple[float, float]

    @property
    def moment_powers(self) -> Mapping[str, int]:
        """First moment."""
        return {"exp_avg": 1}

    def init(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> State:
        """The momentum at zero."""
        return _zeros(("exp_avg",), shape, dtype, device)

    def direction(self, grad: Tensor, state: State, step: int | Tensor, out: Tensor | None = None) -> Tensor:
        """See the class; there is no bias to correct in a sign."""
        beta1, beta2 = self.betas
        mean = state["exp_avg"]
        wide = mean.to(grad.dtype)
        direction = torch.lerp(wide, grad, 1.0 - beta1, out=out).sign_()
        mean.copy_(torch.lerp(wide, grad, 1.0 - beta2))
        return direction

    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """One tensor."""
        return _bytes(1, shape, dtype)


@dataclass(frozen=True)
class Momentum:
    """Heavy-ball momentum: m <- b1 m + g, d = m.

    Args:
        beta: Decay of the buffer, in [0, 1).

    Source:
        torch.optim.SGD with dampening 0. Deviation from FRUGAL's code: the buffer starts at zero, not at the weights.
    """

    beta: float

    @property
    def moment_powers(self) -> Mapping[str, int]:
        """First moment."""
        return {"momentum_buffer": 1}

    def init(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> State:
        """The buffer at zero."""
        return _zeros(("momentum_buffer",), shape, dtype, device)

    def direction(self, grad: Tensor, state: State, step: int | Tensor, out: Tensor | None = None) -> Tensor:
        """See the class."""
        buffer = state["momentum_buffer"]
        direction = torch.mul(buffer.to(grad.dtype), self.beta, out=out).add_(grad)
        buffer.copy_(direction)
        return direction

    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """One tensor."""
        return _bytes(1, shape, dtype)


@dataclass(frozen=True)
class _Stateless:
    """What the rules without state share."""

    @property
    def moment_powers(self) -> Mapping[str, int]:
        """No moments."""
        return {}

    def init(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> State:
        """No tensors."""
        return {}

    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Nothing."""
        return 0


@dataclass(frozen=True)
class Sign(_Stateless):
    """SignSGD: d = sign(g), and 0 where g is 0.

    Source:
        Bernstein et al. (arXiv 1802.04434). On a CPU sign(NaN) is 0, so the engine checks for NaN itself.
    """

    def direction(self, grad: Tensor, state: State, step: int | Tensor, out: Tensor | None = None) -> Tensor:
        """See the class."""
        return torch.sign(grad, out=out)

    def direction_many(self, grads: list[Tensor], states: list[State], steps: list[int]) -> list[Tensor]:
        """The same in one list."""
        return list(torch._foreach_sign(grads))


@dataclass(frozen=True)
class SGD(_Stateless):
    """Plain gradient descent: d = g."""

    def direction(self, grad: Tensor, state: State, step: int | Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of the gradient."""
        return grad.clone() if out is None else out.copy_(grad)


@dataclass(frozen=True)
class Nothing(_Stateless):
    """No update at all: d = 0. As the stateless rest, it freezes what is outside the subspace."""

    def direction(self, grad: Tensor, state: State, step: int | Tensor, out: Tensor | None = None) -> Tensor:
        """Zeros."""
        return torch.zeros_like(grad) if out is None else out.zero_()


def _lion(betas: tuple[float, float], eps: float) -> Rule:
    return Lion(betas)


def _momentum(betas: tuple[float, float], eps: float) -> Rule:
    return Momentum(betas[0])


def _stateless(rule: Rule) -> Callable[[tuple[float, float], float], Rule]:
    return lambda betas, eps: rule


RULES: Catalog[Rule] = Catalog("rule")
RULES.add("adamw", AdamW)
RULES.add("lion", _lion)
RULES.add("momentum", _momentum)
RULES.add("sign", _stateless(Sign()))
RULES.add("sgd", _stateless(SGD()))
RULES.add("none", _stateless(Nothing()))

STATELESS_RULES = ("sign", "sgd", "none")


@lru_cache(maxsize=64)
def _cached(name: str, beta1: float, beta2: float, eps: float) -> Rule:
    return RULES.create(name, (beta1, beta2), eps)


def rule_of(name: str, group: Mapping[str, Any]) -> Rule:
    """Build a rule from the numbers that a group holds now.

    Args:
        name: A name of the catalogue.
        group: An optimizer group with ``betas`` and ``eps``.

    Raises:
        ConfigError: If the name is unknown.
    """
    beta1, beta2 = group["betas"]
    return _cached(name, float(beta1), float(beta2), float(group["eps"]))
