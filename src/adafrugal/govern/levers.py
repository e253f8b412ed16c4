"""What can be moved while the run goes on: density, refreshes, batches, evaluations; each says what it is worth.

Every lever is a function from an outlook to a proposal, or to None where it cannot move: a setting that the run does
not have, a measurement that was not made, an end that is reached. Each moves one way only, but for memory that
overflows, so that all of them come to rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from adafrugal.core.values import Budget, Cost
from adafrugal.govern.outlook import Outlook, Proposal

_BATCH_GROWTH = 2


def micro_batch(outlook: Outlook) -> Proposal | None:
    """Larger micro-batches for the same batch, in bytes that are free or that a lower density frees.

    Each micro-batch has a part of its time that does not grow with its size (launches, reading the weights); fewer
    of them save it. Needs ``memory_bytes``, and ``peak_bytes`` and ``bytes_per_sequence`` measured; where a lower
    density has to help, ``bytes_per_density`` too. A measured peak over the limit takes the last step back.

    Args:
        outlook: The run.

    Returns:
        The best of all larger micro-batches that divide the batch and fit, or the one that must be taken back.
    """
    micro, sequences = outlook.number("micro_sequences"), outlook.number("sequences")
    room = _free_bytes(outlook)
    each = outlook.snapshot.measured.get("bytes_per_sequence")
    if micro is None or sequences is None or room is None or not each:
        return None
    sizes = [size for size in range(1, int(sequences) + 1) if sequences % size == 0]
    if room < 0:
        smaller = [size for size in sizes if size < micro and (micro - size) * each >= -room] or sizes[:1]
        if smaller[-1] >= micro:
            return None
        reason = f"the measured peak is {-room:.3g} bytes over what may be held"
        slower = -_saved_by_pieces(outlook, micro, smaller[-1], sequences).seconds
        harm = outlook.worth(Cost(seconds=slower))
        return outlook.propose(
            "micro_batch", {"micro_sequences": smaller[-1]}, reason, saves=Cost(), harm_nats=harm, required=True
        )
    most = outlook.most_micro_sequences
    larger = [size for size in sizes if size > micro and (most is None or size <= most)]
    found = [made for size in larger if (made := _grow(outlook, micro, size, sequences, room, each)) is not None]
    return max(found, key=lambda made: (made.value_nats, made.saves.seconds), default=None)


def _grow(outlook: Outlook, micro: float, size: int, sequences: float, room: float, each: float) -> Proposal | None:
    """Micro-batches of one larger size, with as many falls of density as their bytes need."""
    lacking = (size - micro) * each - room
    saves = _saved_by_pieces(outlook, micro, size, sequences)
    if lacking <= 0:
        reason = f"{room:.3g} free bytes hold micro-batches of {size} sequences"
        return outlook.propose("micro_batch", {"micro_sequences": size}, reason, saves=saves)
    density = _density_for(outlook, lacking)
    now = outlook.number("density")
    if density is None or now is None:
        return None
    reason = f"a density of {density:.3g} frees {lacking:.3g} bytes for micro-batches of {size} sequences"
    harm = _density_harm(outlook, now - density)
    return outlook.propose(
        "micro_batch", {"micro_sequences": size, "density": density}, reason, saves=saves, harm_nats=harm
    )


def _saved_by_pieces(outlook: Outlook, micro: float, size: float, sequences: float) -> Cost:
    """Seconds that another size of micro-batches saves over the rest of the run; negative for a smaller one."""
    before, after = math.ceil(sequences / micro), math.ceil(sequences / size)
    step = outlook.snapshot.costs.get("step", Cost()).seconds
    assumed = outlook.config.piece_overhead_fraction * step / before
    piece = outlook.snapshot.measured.get("piece_seconds", assumed)
    return Cost(seconds=outlook.remaining_steps * piece * (before - after))


def _free_bytes(outlook: Outlook) -> float | None:
    """Bytes under the limit and its reserve that nothing holds; negative where the peak is over it."""
    limit, peak = outlook.config.memory_bytes, outlook.snapshot.measured.get("peak_bytes")
    return None if limit is None or peak is None else limit * (1.0 - outlook.config.reserve_fraction) - peak


def _density_for(outlook: Outlook, lacking_bytes: float) -> float | None:
    """The highest density, in whole falls, that frees so many bytes; None where none does."""
    now, first = outlook.number("density"), outlook.first_density
    each = outlook.snapshot.measured.get("bytes_per_density")
    end = outlook.config.density_end
    if now is None or first is None or not each or now <= end:
        return None
    fall = (first - end) / outlook.config.density_falls
    falls = math.ceil(lacking_bytes / each / fall - 1e-9) if fall > 0 else 0
    density = max(end, now - falls * fall)
    return density if (now - density) * each >= lacking_bytes * (1 - 1e-9) else None


def _density_harm(outlook: Outlook, fall: float) -> float:
    """What a fall adds to the final loss, if it acts over the rest of the run."""
    return outlook.config.density_harm_nats * fall * (1.0 - outlook.snapshot.clock.progress)


def density(outlook: Outlook) -> Proposal | None:
    """A lower density: fewer moments to hold and to update.

    Saves the ``update`` cost in the share of its density that ``update_seconds_per_density`` measures. A measured peak
    over the limit makes it required.

    Args:
        outlook: The run.

    Returns:
        One fall, or as many as the limit demands.
    """
    now, first, end = outlook.number("density"), outlook.first_density, outlook.config.density_end
    if now is None or first is None or now <= end or first <= end:
        return None
    room = _free_bytes(outlook)
    required = room is not None and room < 0
    fall = (first - end) / outlook.config.density_falls
    target = _density_for(outlook, -room) if required and room is not None else None
    lower = target if target is not None else max(end, now - fall)
    each = outlook.snapshot.measured.get("update_seconds_per_density", 0.0)
    saves = Cost(seconds=outlook.remaining_steps * each * (now - lower))
    return outlook.propose(
        "density",
        {"density": lower},
        f"a density of {lower:.3g} holds fewer moments",
        saves=saves,
        harm_nats=_density_harm(outlook, now - lower),
        required=required and target is not None,
    )


def update_gap(outlook: Outlook) -> Proposal | None:
    """A longer gap between refreshes, once the loss has settled: fewer of them are paid for.

    Needs the cost of a ``refresh``. No harm is assumed while the loss changes by less than ``gap_tolerance`` per
    evaluation: on C4 it cost none.

    Args:
        outlook: The run.
    """
    gap, refresh = outlook.number("update_gap"), outlook.snapshot.costs.get("refresh")
    if gap is None or gap < 1 or refresh is None or abs(outlook.loss_change) >= outlook.config.gap_tolerance:
        return None
    longer = min(outlook.config.update_gap_max, math.floor(gap * outlook.config.gap_growth + 0.5))
    if longer <= gap:
        return None
    saves = _times(refresh, outlook.remaining_steps * (1 / gap - 1 / longer))
    reason = f"the loss changes by {outlook.loss_change:.2%} per evaluation: it has settled"
    return outlook.propose("update_gap", {"update_gap": longer}, reason, saves=saves)


def batch(outlook: Outlook) -> Proposal | None:
    """Twice the batch, where gradients are so noisy that a token still teaches almost as much; updates are halved.

    A batch of B tokens needs 1 + B / N times the fewest tokens, with N the noise scale: doubling it costs the share
    x / (1 + x) of what the rest promises, x = B / N, and saves every other ``update``. Needs ``noise_tokens``
    measured, ``sequences_max`` set, and the cost of an ``update``. Larger batches also lower the noise of the weights,
    but the anneal takes that away at the end in any case, so it does not count.

    Args:
        outlook: The run.

    Source:
        McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162), section 2.
    """
    sequences, most = outlook.number("sequences"), outlook.config.sequences_max
    noise, step = outlook.snapshot.measured.get("noise_tokens"), outlook.snapshot.costs.get("step")
    update = outlook.snapshot.costs.get("update")
    if sequences is None or most is None or not noise or noise < 0 or step is None or update is None:
        return None
    if sequences * _BATCH_GROWTH > most:
        return None
    share = step.tokens / noise
    saves = _times(update, outlook.remaining_steps * (1 - 1 / _BATCH_GROWTH))
    return outlook.propose(
        "batch",
        {"sequences": int(sequences) * _BATCH_GROWTH},
        f"the batch is {share:.2g} of the gradient's noise scale",
        saves=saves,
        harm_nats=outlook.promise_nats * share / (1 + share),
        disturbs=True,
    )


def eval_interval(outlook: Outlook) -> Proposal | None:
    """Twice the steps between evaluations, where they cost more than a later decision would waste.

    A decision takes ``confirmations`` evaluations. If the run ends early, which is the worst case, all steps by which
    it comes later are wasted.

    Args:
        outlook: The run.
    """
    every, cost = outlook.number("eval_every_steps"), outlook.snapshot.costs.get("evaluation")
    step = outlook.snapshot.costs.get("step")
    if every is None or cost is None or step is None or 2 * every > outlook.config.eval_every_max:
        return None
    saves = _times(cost, outlook.remaining_steps / (2 * every))
    wasted = _times(step, outlook.confirmations * every)
    return outlook.propose(
        "eval_interval",
        {"eval_every_steps": int(2 * every)},
        f"evaluations every {int(every)} steps cost more than deciding later",
        saves=saves,
        harm_nats=outlook.worth(wasted),
    )


LEVERS: Mapping[str, Callable[[Outlook], Proposal | None]] = {
    "micro_batch": micro_batch,
    "density": density,
    "update_gap": update_gap,
    "batch": batch,
    "eval_interval": eval_interval,
}


def proposals(outlook: Outlook) -> list[Proposal]:
    """All that the levers of the configuration propose, the best first.

    What a hard limit demands comes first; then the worth decides, and of equal worth the seconds that are saved.

    Args:
        outlook: The run.

    Returns:
        None that would spend more than is left.
    """
    made = [LEVERS[name](outlook) for name in outlook.config.names]
    inside = [one for one in made if one is not None and _fits(outlook.budget, outlook, one.costs)]
    return sorted(inside, key=lambda one: (-int(one.required), -one.value_nats, -one.saves.seconds, one.lever))


def _fits(budget: Budget, outlook: Outlook, cost: Cost) -> bool:
    """Whether a cost is within what is left of every limit."""
    shares = budget.shares(steps=outlook.snapshot.clock.step, cost=outlook.snapshot.spent + cost)
    return all(share <= 1.0 for share in shares.values())


def _times(cost: Cost, count: float) -> Cost:
    """A cost, so many times."""
    return Cost(
        flops=round(cost.flops * count),
        tokens=round(cost.tokens * count),
        seconds=cost.seconds * count,
        peak_bytes=cost.peak_bytes,
        written_bytes=round(cost.written_bytes * count),
    )
