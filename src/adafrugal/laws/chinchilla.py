"""Chinchilla's law: loss as a floor and two falling powers, with its best split of FLOPs in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from adafrugal.core.errors import ConfigError
from adafrugal.laws.allocation import (
    FLOPS_PER_PARAMETER_AND_TOKEN,
    UNKNOWN_RANGE,
    Allocation,
    FittedRange,
    Marginals,
    check_positive,
    within_limits,
)


@dataclass(frozen=True, kw_only=True)
class ChinchillaLaw:
    """The law L(N, D) = E + A / N^alpha + B / D^beta, each token seen once.

    Args:
        E: The loss that neither parameters nor tokens remove, in nats.
        A: Weight of the parameters' term.
        B: Weight of the tokens' term.
        alpha: Exponent of the parameters, embeddings included.
        beta: Exponent of the tokens.
        source: Where the constants come from.
        fitted_range: What the runs behind them spanned.

    Source:
        Hoffmann et al. (arXiv 2203.15556), section 3.3.

    Example:
        >>> law = ChinchillaLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
        >>> best = law.optimum(1e21)
        >>> f"{best.num_parameters:.2e} parameters, {best.tokens:.2e} tokens, {law.loss(*best):.3f} nats"
        '2.78e+09 parameters, 6.00e+10 tokens, 2.306 nats'
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str = "your own fit"
    fitted_range: FittedRange = UNKNOWN_RANGE

    def loss(self, num_parameters: float, tokens: float) -> float:
        """Loss in nats per token. Infinity is allowed: what is left when the other alone limits."""
        check_positive("ChinchillaLaw.loss", num_parameters=num_parameters, tokens=tokens)
        return self.E + self.A * num_parameters**-self.alpha + self.B * tokens**-self.beta

    @property
    def exponent(self) -> float:
        """The exponent g = alpha * beta / (alpha + beta): along best splits the loss above E falls as C^-g."""
        return self.alpha * self.beta / (self.alpha + self.beta)

    @property
    def ratio(self) -> float:
        """The constant G = (alpha * A / (beta * B))^(1 / (alpha + beta)) of the optimum."""
        return (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))

    def optimum(
        self, flops: float, *, max_parameters: float | None = None, max_tokens: float | None = None
    ) -> Allocation:
        """Parameters and tokens of least loss for some FLOPs, in closed form.

        N* = G * (C / 6)^(beta / (alpha + beta)), D* = (C / 6)^(alpha / (alpha + beta)) / G. Along C = 6ND the loss has
        one valley, so under a limit the best split is the nearest that is allowed.

        Args:
            flops: C.
            max_parameters: The largest model that fits, or None.
            max_tokens: Tokens that there are, each seen once, or None.

        Returns:
            The split. It spends C exactly, unless both limits bind: then it is both limits.
        """
        check_positive("ChinchillaLaw.optimum", flops=flops, max_parameters=max_parameters, max_tokens=max_tokens)
        share = self.beta / (self.alpha + self.beta)
        best = self.ratio * (flops / FLOPS_PER_PARAMETER_AND_TOKEN) ** share
        return within_limits(flops, best, max_parameters, max_tokens)

    def optimum_for_tokens(self, tokens: float) -> Allocation:
        """The split whose best number of tokens is this one: N such that D is D*(6ND)."""
        check_positive("ChinchillaLaw.optimum_for_tokens", tokens=tokens)
        return Allocation(self.ratio * (tokens * self.ratio) ** (self.beta / self.alpha), tokens)

    def flops_for_loss(self, loss: float) -> float:
        """FLOPs at which the best split reaches a loss: the inverse of ``loss(*optimum(flops))``.

        Raises:
            ConfigError: If the loss is not above E, where no FLOPs suffice.
        """
        if not loss > self.E:
            raise ConfigError(
                "ChinchillaLaw.flops_for_loss(loss=...)",
                loss,
                f"a loss above E = {self.E:g}",
                "No compute reaches E under this law.",
            )
        excess = self.A * self.ratio**-self.alpha + self.B * self.ratio**self.beta
        return FLOPS_PER_PARAMETER_AND_TOKEN * (excess / (loss - self.E)) ** (1 / self.exponent)

    def marginals(self, num_parameters: float, tokens: float) -> Marginals:
        """Derivatives of the loss at one point, and along best splits at its compute."""
        check_positive("ChinchillaLaw.marginals", num_parameters=num_parameters, tokens=tokens)
        flops = Allocation(num_parameters, tokens).flops
        return Marginals(
            per_parameter=-self.alpha * self.A * num_parameters ** (-self.alpha - 1),
            per_token=-self.beta * self.B * tokens ** (-self.beta - 1),
            per_log_flops=-self.exponent * (self.loss(*self.optimum(flops)) - self.E),
            flops=flops,
        )

    def caveats(
        self, *, num_parameters: float | None = None, tokens: float | None = None, flops: float | None = None
    ) -> tuple[str, ...]:
        """What to know before trusting the law at a point, as plain sentences; none inside its fitted range."""
        return self.fitted_range.caveats(num_parameters, tokens, flops)
