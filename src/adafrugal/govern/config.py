"""The settings of the governor: what to compare the marginal gain with, how sure to be, and what it may move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from adafrugal.core.errors import ConfigError, nearest_name

ThresholdName = Literal["opportunity", "price", "shadow"]
Currency = Literal["flops", "tokens", "seconds"]
LEVER_NAMES = ("micro_batch", "density", "update_gap", "batch", "eval_interval")


@dataclass(frozen=True, kw_only=True)
class LeverConfig:
    """Which settings the governor may move, how far, and what each move is assumed to do to the loss.

    The assumptions are figures of papers, not measurements of the run. Each decision repeats them in its numbers.

    Args:
        names: The levers, of micro_batch, density, update_gap, batch and eval_interval; none of them lets the governor
            only anneal and stop.
        memory_bytes: The most that may be held at once; a hard limit. None leaves micro-batches and density alone.
        reserve_fraction: Share of memory_bytes that is kept free: allocators round, and peaks are measured late.
        density_end: Density falls no further.
        density_falls: Equal falls from the density in force at first down to density_end.
        density_harm_nats: Final loss that one whole unit of density is worth if it is missing for a whole run.
            0.064 is 130M on C4: perplexity 18.60 at a density of .25 against 18.90 at 0.
        update_gap_max: The gap grows no further, in steps.
        gap_growth: Factor of each growth, above 1.
        gap_tolerance: The gap grows only while the loss changes by less than this share per evaluation: on C4 a growing
            gap then cost nothing (18.58 against 18.60).
        sequences_max: The batch grows no further, in sequences; None leaves it alone.
        eval_every_max: The interval between evaluations grows no further, in steps.
        piece_overhead_fraction: Share of a micro-batch's time that does not grow with its size, where it is not
            measured.
        margin_nats: A lever moves for more than this.

    Source:
        FRUGAL (arXiv 2411.07837) and AdaFRUGAL (arXiv 2601.11568), tables on C4.
    """

    names: tuple[str, ...] = LEVER_NAMES
    memory_bytes: int | None = None
    reserve_fraction: float = 0.05
    density_end: float = 0.05
    density_falls: int = 8
    density_harm_nats: float = 0.064
    update_gap_max: int = 1000
    gap_growth: float = 1.5
    gap_tolerance: float = 5e-3
    sequences_max: int | None = None
    eval_every_max: int = 1000
    piece_overhead_fraction: float = 0.1
    margin_nats: float = 1e-4

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in LEVER_NAMES:
                raise ConfigError(
                    "governor.levers.names",
                    name,
                    f"any of {', '.join(LEVER_NAMES)}",
                    f"Leave it out.{nearest_name(name, LEVER_NAMES)}",
                )
        shares = {"reserve_fraction": self.reserve_fraction, "density_end": self.density_end}
        shares["piece_overhead_fraction"] = self.piece_overhead_fraction
        for name, value in shares.items():
            _check(f"levers.{name}", value, 0.0 <= value < 1.0, "a share in [0, 1)", "Try 0.05.")
        for name, value in (("density_harm_nats", self.density_harm_nats), ("margin_nats", self.margin_nats)):
            _check(f"levers.{name}", value, value >= 0.0, "nats, at least 0", "Write 0 to leave it out of account.")
        for name in ("density_falls", "update_gap_max", "eval_every_max", "memory_bytes", "sequences_max"):
            value = getattr(self, name)
            _check(f"levers.{name}", value, value is None or value >= 1, "a whole number from 1", "Raise it.")
        _check("levers.gap_growth", self.gap_growth, self.gap_growth > 1.0, "a factor above 1", "Try 1.5.")
        _check("levers.gap_tolerance", self.gap_tolerance, self.gap_tolerance >= 0.0, "at least 0", "Try 0.005.")


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    """When the governor acts.

    Args:
        threshold: What the marginal gain is compared with. ``opportunity``: what the curve had promised for the rest of
            the budget. ``price``: nats per unit of compute. ``shadow``: what another use of the same budget buys.
        price: Under ``price``: nats that one unit must remove to be worth it, such as 1e-16 for a FLOP.
        currency: The unit of compute of curves, price and shadow price.
        phi: Under ``opportunity``: it acts when what is delivered is under this share of what was promised.
        smallest_gain_nats: Under ``opportunity``: it acts when all of the rest surely removes less than this.
        window: Evaluations in the line that says what is delivered.
        span: Evaluations at less than the present compute divided by this are forgotten.
        confidence: Of each bound, one-sided: how sure to be before acting.
        confirmations: Evaluations in a row that must agree.
        hysteresis: Share above the threshold at which agreement so far is forgotten; in between it is kept.
        settle: First evaluations of a phase, which are left out: they are its transient.
        dwell: Evaluations between two moves of levers.
        anneal_fraction: Share of the compute at a run's end over which the learning rate falls; 0 stops at once.
        anneal_floor: Factor of the learning rate at the end.
        levers: What it may move.
        num_draws: Bootstrap draws of each forecast.
        seed: Of the draws.
    """

    threshold: ThresholdName = "opportunity"
    price: float | None = None
    currency: Currency = "flops"
    phi: float = 0.5
    smallest_gain_nats: float = 1e-3
    window: int = 10
    span: float = 20.0
    confidence: float = 0.95
    confirmations: int = 3
    hysteresis: float = 0.1
    settle: int = 3
    dwell: int = 5
    anneal_fraction: float = 0.2
    anneal_floor: float = 0.0
    levers: LeverConfig = field(default_factory=LeverConfig)
    num_draws: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _choice("threshold", self.threshold, ("opportunity", "price", "shadow"))
        _choice("currency", self.currency, ("flops", "tokens", "seconds"))
        needs = self.threshold == "price"
        _check(
            "price",
            self.price,
            (self.price is None) if not needs else (self.price is not None and self.price > 0),
            f"nats per unit of {self.currency}, above 0" if needs else "nothing, unless the threshold is price",
            "Write --governor.price 1e-16, or choose --governor.threshold opportunity.",
        )
        _check("phi", self.phi, 0.0 < self.phi <= 1.0, "a share in (0, 1]", "Try 0.5.")
        gain = self.smallest_gain_nats
        _check("smallest_gain_nats", gain, gain >= 0.0, "nats, at least 0", "Write 0 to use the whole budget.")
        _check("window", self.window, self.window >= 4, "a whole number from 4", "Try 10.")
        _check("span", self.span, self.span > 2.0, "a factor above 2", "Try 20.")
        _check("confidence", self.confidence, 0.5 < self.confidence < 1.0, "a share in (0.5, 1)", "Try 0.95.")
        _check("confirmations", self.confirmations, self.confirmations >= 1, "a whole number from 1", "Try 3.")
        _check("hysteresis", self.hysteresis, self.hysteresis >= 0.0, "a share, at least 0", "Try 0.1.")
        _check("settle", self.settle, self.settle >= 0, "a whole number from 0", "Try 3.")
        _check("dwell", self.dwell, self.dwell >= 0, "a whole number from 0", "Try 5.")
        _check("anneal_fraction", self.anneal_fraction, 0.0 <= self.anneal_fraction < 1.0, "a share", "Try 0.2.")
        _check("anneal_floor", self.anneal_floor, 0.0 <= self.anneal_floor <= 1.0, "a share", "Try 0.")
        _check("num_draws", self.num_draws, self.num_draws >= 50, "a whole number from 50", "Try 100.")

    @property
    def two_sided(self) -> float:
        """The confidence of an interval whose ends are the one-sided bounds."""
        return 2 * self.confidence - 1


def _check(name: str, value: object, holds: bool, allowed: str, action: str) -> None:
    if not holds:
        raise ConfigError(f"governor.{name}={value}", value, allowed, action)


def _choice(name: str, value: str, known: tuple[str, ...]) -> None:
    near = nearest_name(value, known)
    _check(name, value, value in known, f"one of {', '.join(known)}", f"Write --governor.{name} {known[0]}.{near}")
