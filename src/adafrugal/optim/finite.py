"""Finds gradients that are not finite, with no extra pass over the stateful part and no wait for a device.

The sign of NaN is 0 on a CPU and hides a broken gradient, so what the stateless rule sees is summed: a sum is NaN or
infinite where an element is. In the stateful part a NaN stays in the first moment, which is looked at when the guard
reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, cast

import torch
from torch import Tensor

from adafrugal.core.errors import NonFiniteError

CheckFinite = Literal["deferred", "before", "off"]
CHECKS: tuple[CheckFinite, ...] = ("deferred", "before", "off")
_NEVER = torch.iinfo(torch.int32).max


def _sum(tensor: Tensor) -> Tensor:
    """The sum in float32 or better: a float16 sum would overflow by itself."""
    return tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


class FiniteGuard:
    """Collects sums during a step and remembers, on the device, the first step at which each tensor's was not finite.

    Args:
        names: What to call each tensor, by slot.

    Cost:
        4 bytes read per stateless float32 gradient element, from cache where the update follows at once.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._seen: list[tuple[int, Tensor]] = []
        self._first_bad: dict[torch.device, Tensor] = {}
        self._slots: dict[tuple[int, ...], Tensor] = {}
        self._clean_step = 0

    def see(self, slot: int, grad: Tensor) -> None:
        """Sum what the stateless rule is about to use."""
        if not grad.is_meta:
            self._seen.append((slot, _sum(grad)))

    def close_step(self, step: int) -> None:
        """Fold this step's sums into the memory on each device; nothing is read back."""
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for slot, total in self._seen:
            by_device.setdefault(total.device, []).append((slot, total))
        self._seen.clear()
        for device, seen in by_device.items():
            memory = self._first_bad.get(device)
            if memory is None:
                memory = torch.full((len(self._names),), _NEVER, dtype=torch.int32, device=device)
                self._first_bad[device] = memory
            sums = torch.stack([total.to(torch.float32) for _, total in seen])
            steps = torch.where(torch.isfinite(sums), _NEVER, step).to(torch.int32)
            slots = self._slot_index(tuple(slot for slot, _ in seen), device)
            memory[slots] = torch.minimum(memory[slots], steps)

    def _slot_index(self, slots: tuple[int, ...], device: torch.device) -> Tensor:
        """The slots as an index on the device; the same ones are seen at every step, so it is kept."""
        if slots not in self._slots:
            self._slots = {slots: torch.tensor(slots, device=device)}
        return self._slots[slots].to(device)

    def report(self, moments: Mapping[int, Tensor], step: int) -> None:
        """Read the memory, look at the first moments, and raise if anything was not finite.

        Args:
            moments: By slot, a state tensor in which a NaN or infinity of the gradient stays.
            step: Steps taken so far.

        Raises:
            NonFiniteError: Names the parameters and the steps.
        """
        found: dict[str, str] = {}
        for memory in self._first_bad.values():
            steps = cast(list[int], memory.tolist())
            for slot, first in enumerate(steps):
                if first != _NEVER:
                    found[self._names[slot]] = f"step {first}"
        sums = {slot: _sum(moment) for slot, moment in moments.items() if moment.device.type != "meta"}
        for slot, total in sums.items():
            if not torch.isfinite(total):
                found.setdefault(self._names[slot], f"a step from {self._clean_step + 1} to {step}")
        if found:
            raise _error(found, "optimizer.step()", "Go back to the last good checkpoint.")
        self._clean_step = step

    def check_before(self, grads: Iterable[tuple[int, Tensor]], step: int) -> None:
        """Look at all gradients now, before any weight moves; waits for the device once.

        Raises:
            NonFiniteError: Names the parameters and the step.
        """
        items = [(slot, grad) for slot, grad in grads if not grad.is_meta]
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for slot, grad in items:
            by_device.setdefault(grad.device, []).append((slot, _sum(grad)))
        bad: list[int] = []
        for seen in by_device.values():
            finite = cast(list[bool], torch.stack([total for _, total in seen]).isfinite().tolist())
            bad += [slot for (slot, _), good in zip(seen, finite, strict=True) if not good]
        if bad:
            found = {self._names[slot]: f"step {step}" for slot in bad}
            raise _error(found, "optimizer.step() with check_finite='before'", "No weight has moved; skip this batch.")

    def forget(self) -> None:
        """Drop all memory, as after a checkpoint was loaded."""
        self._seen.clear()
        self._first_bad.clear()


def _error(found: Mapping[str, str], call: str, action: str) -> NonFiniteError:
    shown = [f"{name} ({when})" for name, when in list(found.items())[:5]]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return NonFiniteError(
        call, f"a gradient with NaN or infinity in {', '.join(shown)}{more}", "finite gradients", action
    )
