"""The governor: continue, move a lever, or anneal and stop, decided from values alone at every evaluation.

pi(S_t, B_t). One decision, in this order: a loss that is not finite stops; a hard limit that is exceeded moves a lever;
an anneal that is under way runs to its end; otherwise the newest loss joins the curve of its phase, the curve is
judged, and of everything that could be moved the best is taken. When the judgement has been *below* often enough and no
lever pays, the learning rate is annealed, and the run ends with it. Nothing here reads a clock or keeps a state: what
is remembered goes out and comes in as plain data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adafrugal.core.errors import BudgetError
from adafrugal.core.protocols import PolicyMemory
from adafrugal.core.values import Budget, Decision, Setting, Snapshot
from adafrugal.govern.config import GovernorConfig
from adafrugal.govern.forecast import Forecast, make_forecast
from adafrugal.govern.levers import proposals
from adafrugal.govern.outlook import Outlook, Proposal, in_currency
from adafrugal.govern.thresholds import Verdict, judge

Numbers = dict[str, Setting]


@dataclass(frozen=True, kw_only=True)
class Governor:
    """A policy that watches what the next unit of compute buys.

    It writes density, update_gap, micro_sequences, sequences and eval_every_steps, as far as the run has them, and
    ``anneal_from`` and ``anneal_until``: shares of the budget between which the learning rate falls, and at whose end
    the run is over. `anneal_factor` turns them into a factor. An optimizer under it must leave its settings to others:
    AdaFRUGAL is built with ``policies="external"``.

    Args:
        config: When it acts.

    Cost:
        Ten milliseconds on one busy core at an evaluation, microseconds between two.

    Source:
        The loop is that of the survey arXiv 2606.10706: act when the marginal gain falls under a threshold that
        depends on what is left.

    Deviations:
        The survey's formula for the threshold is not used; the three forms are ours (see `thresholds`).

    Example:
        >>> from adafrugal.core.values import Clock, Cost
        >>> seen = Snapshot(clock=Clock(step=10, progress=0.1), val_loss=math.nan, checkpoint="step-5")
        >>> decision, memory = Governor().decide(seen, Budget(steps=100), {})
        >>> decision.action, decision.numbers["checkpoint"]
        ('stop', 'step-5')
    """

    config: GovernorConfig = field(default_factory=GovernorConfig)

    def decide(self, snapshot: Snapshot, budget: Budget | None, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """Decide; call it at every evaluation, and once more when a training loss was not finite.

        Args:
            snapshot: Where the run stands. Without a validation loss nothing is judged.
            budget: What it may spend; at least one limit.
            memory: What this method returned the last time, or an empty mapping at the start.

        Returns:
            The decision, and what to pass in next time: dictionaries, lists, numbers, strings and None.

        Raises:
            BudgetError: Without a limit.
            ConfigError: Under the shadow price, without a rate elsewhere.
        """
        if budget is None or budget == Budget():
            raise BudgetError(
                "Governor.decide(budget=...)", budget, "at least one limit", "Set --budget.flops, however high."
            )
        known = _remembered(memory, self.config, snapshot)
        loss, progress = snapshot.val_loss, snapshot.clock.progress
        if not snapshot.finite or (loss is not None and not math.isfinite(loss)):
            return _broken(snapshot), known
        if progress >= known["anneal_until"]:
            return Decision(action="stop", reason="the anneal is done", numbers={"progress": progress}), known
        annealing = progress >= known["anneal_from"]
        known = known if annealing else self._with_point(known, snapshot)
        if not memory:
            return self._first(known), known
        needed = [one for one in proposals(self._outlook(snapshot, budget, known, None)) if one.required]
        if needed:
            return _moved(needed[0], needed[1:], {"progress": progress}, known, snapshot)
        if annealing:
            return Decision(reason="the learning rate anneals; losses are not judged until the end"), known
        return (Decision(), known) if loss is None else self._judge(snapshot, budget, known)

    # --- what is known ------------------------------------------------------------------------------------------

    def _first(self, known: Mapping[str, Any]) -> Decision:
        """Say at the start when the run anneals if nothing else happens."""
        settings = {name: known[name] for name in ("anneal_from", "anneal_until")}
        return Decision(action="reallocate", settings=settings, reason="the budget's last share is kept for the anneal")

    def _with_point(self, known: Mapping[str, Any], snapshot: Snapshot) -> dict[str, Any]:
        """The memory with the newest loss in the curve of its phase; a new phase begins a new curve."""
        same = known["phase"] == snapshot.phase
        now = {**known} if same else {**known, **_no_points(snapshot.phase)}
        spent, loss = in_currency(snapshot.spent, self.config.currency), snapshot.val_loss
        if loss is None or loss <= 0 or spent <= 0 or _is_warmup(snapshot.phase):
            return now
        if now["skipped"] < self.config.settle:
            return {**now, "skipped": now["skipped"] + 1}
        if now["compute"] and spent <= now["compute"][-1]:
            return now  # judged twice at one place: the first loss stays
        return {
            **now,
            "compute": [*now["compute"], spent],
            "losses": [*now["losses"], float(loss)],
            "rest": now["rest"] + 1,
        }

    # --- one judgement ------------------------------------------------------------------------------------------

    def _judge(self, snapshot: Snapshot, budget: Budget, known: dict[str, Any]) -> tuple[Decision, PolicyMemory]:
        config, progress = self.config, snapshot.clock.progress
        forecast = None
        if known["compute"] and progress > 0:
            forecast = make_forecast(
                known["compute"],
                known["losses"],
                horizon=in_currency(snapshot.spent, config.currency) / progress,
                window=config.window,
                confidence=config.two_sided,
                span=config.span,
                num_draws=config.num_draws,
                seed=config.seed,
            )
        if forecast is None:
            return Decision(reason=f"{len(known['compute'])} losses of this phase are too few to judge"), known
        verdict = judge(forecast, config, snapshot.measured.get("elsewhere_rate"))
        streak = known["streak"] + 1 if verdict.below else 0 if verdict.above else known["streak"]
        known = {**known, "streak": streak}
        made = proposals(self._outlook(snapshot, budget, known, forecast))
        numbers = _numbers(forecast, verdict, streak, progress)
        best = next((one for one in made if self._pays(one, known)), None)
        if best is not None:
            return _moved(best, [one for one in made if one is not best], numbers, known, snapshot)
        lost = tuple(one.record() for one in made)
        if streak < config.confirmations:
            reason = verdict.reason if not verdict.below else f"{verdict.reason}; {streak} of {config.confirmations}"
            return Decision(reason=reason, numbers=numbers, alternatives=(_end(forecast, verdict), *lost)), known
        return self._end_run(progress, verdict, numbers, lost, known)

    def _outlook(
        self, snapshot: Snapshot, budget: Budget, known: Mapping[str, Any], forecast: Forecast | None
    ) -> Outlook:
        """What the levers see; without a forecast a saving is worth nothing, and only hard limits move them."""
        config = self.config
        elsewhere = snapshot.measured.get("elsewhere_rate")
        return Outlook(
            snapshot=snapshot,
            budget=budget,
            config=config.levers,
            end_rate=forecast.end_rate() if forecast else 0.0,
            horizon=forecast.horizon if forecast else 0.0,
            promise_nats=forecast.promise() if forecast else 0.0,
            loss_change=_change(known, forecast) if forecast else math.inf,
            price=elsewhere if config.threshold == "shadow" else config.price,
            currency=config.currency,
            confirmations=config.confirmations,
            first_density=known["first_density"],
            most_micro_sequences=known["most_micro_sequences"],
        )

    def _pays(self, one: Proposal, known: Mapping[str, Any]) -> bool:
        """Whether a proposal is to be taken now: worth it, and long enough after the last one."""
        rested = known["rest"] >= self.config.dwell
        return rested and (one.value_nats > self.config.levers.margin_nats or one.is_free)

    def _end_run(
        self, progress: float, verdict: Verdict, numbers: Numbers, lost: Sequence[Numbers], known: dict[str, Any]
    ) -> tuple[Decision, PolicyMemory]:
        """Anneal now, then stop; the anneal is the last share of what is then the whole run, as it was planned."""
        reason = f"{verdict.reason}, {known['streak']} times in a row, and no lever pays"
        if self.config.anneal_fraction == 0.0:
            return Decision(action="stop", reason=reason, numbers=numbers, alternatives=tuple(lost)), known
        span = {"anneal_from": progress, "anneal_until": min(1.0, progress / (1.0 - self.config.anneal_fraction))}
        reason = f"{reason}: anneal, then stop"
        decision = Decision(
            action="reallocate", settings=span, reason=reason, numbers=numbers, alternatives=tuple(lost)
        )
        return decision, {**known, **span}


def anneal_factor(progress: float, anneal_from: float, anneal_until: float, floor: float = 0.0) -> float:
    """The factor of the learning rate: 1 before the anneal, then linear down to the floor.

    Args:
        progress: Share of the budget spent.
        anneal_from: Where the fall begins.
        anneal_until: Where it ends, and the run with it.
        floor: The factor there.

    Example:
        >>> [round(anneal_factor(p, 0.4, 0.5), 3) for p in (0.3, 0.45, 0.5)]
        [1.0, 0.5, 0.0]
    """
    if progress <= anneal_from:
        return 1.0
    if progress >= anneal_until:
        return floor
    return floor + (1.0 - floor) * (anneal_until - progress) / (anneal_until - anneal_from)


def _is_warmup(phase: str) -> bool:
    return phase.startswith("warmup")


def _no_points(phase: str) -> dict[str, Any]:
    """The part of the memory that a new phase begins anew."""
    return {"phase": phase, "compute": [], "losses": [], "skipped": 0, "streak": 0, "rest": 0}


def _remembered(memory: PolicyMemory, config: GovernorConfig, snapshot: Snapshot) -> dict[str, Any]:
    """The memory, or the one that a run begins with."""
    if memory:
        return dict(memory)
    density = snapshot.settings.get("density")
    return {
        **_no_points(snapshot.phase),
        "anneal_from": 1.0 - config.anneal_fraction,
        "anneal_until": 1.0,
        "first_density": None if density is None else float(density),
        "most_micro_sequences": None,
    }


def _broken(snapshot: Snapshot) -> Decision:
    """Stop for a loss that is not finite, and say where to resume."""
    what = "a training loss" if not snapshot.finite else "the validation loss"
    last = snapshot.checkpoint
    advice = f"resume from {last} with a lower rate" if last else "no checkpoint is good: start again with a lower rate"
    return Decision(
        action="stop",
        reason=f"{what} is not finite at step {snapshot.clock.step}: {advice}",
        numbers={"step": snapshot.clock.step, "checkpoint": last},
    )


def _change(known: Mapping[str, Any], forecast: Forecast) -> float:
    """The relative change of the loss that the line expects from the newest evaluation to the next one."""
    compute, losses = known["compute"], known["losses"]
    return forecast.line.log_slope * math.log(compute[-1] / compute[-2]) / losses[-1]


def _numbers(forecast: Forecast, verdict: Verdict, streak: int, progress: float) -> Numbers:
    """What a decision rests on."""
    band, curve = forecast.final_band(), forecast.fit.curve
    return {
        "progress": progress,
        "compute": forecast.compute,
        "horizon": forecast.horizon,
        "rate": verdict.rate,
        "rate_low": verdict.low,
        "rate_high": verdict.high,
        "threshold": verdict.threshold,
        "basis": verdict.basis,
        "streak": streak,
        "final_loss": forecast.final_loss(),
        "final_loss_low": band.low,
        "final_loss_high": band.high,
        "floor": curve.floor,
        "exponent": curve.exponent,
        "noise_fraction": forecast.fit.noise_fraction,
        "num_points": forecast.fit.num_points,
        "line_points": forecast.line.num_points,
    }


def _end(forecast: Forecast, verdict: Verdict) -> Numbers:
    """Ending now, as an alternative: what the rest would have removed, less what it costs at the threshold."""
    left = forecast.horizon - forecast.compute
    return {
        "lever": "anneal",
        "value_nats": verdict.threshold * left - forecast.promise(),
        "harm_nats": forecast.promise(),
    }


def _moved(
    best: Proposal, others: Sequence[Proposal], numbers: Numbers, known: dict[str, Any], snapshot: Snapshot
) -> tuple[Decision, PolicyMemory]:
    """Take a proposal: confirmations are counted anew, and where losses change their meaning the curve begins anew."""
    decision = Decision(
        action="reallocate",
        settings=best.settings,
        reason=f"{best.lever}: {best.reason}; worth {best.value_nats:.2g} nats",
        numbers={**numbers, **best.record()},
        alternatives=tuple(one.record() for one in others),
    )
    after = {**known, "streak": 0, "rest": 0}
    before = snapshot.settings.get("micro_sequences")
    smaller = best.settings.get("micro_sequences")
    if best.required and smaller is not None and before is not None:
        after["most_micro_sequences"] = int(before) - 1
    if best.disturbs:
        after = {**after, **_no_points(known["phase"])}
    return decision, after
