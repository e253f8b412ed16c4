"""Muennighoff's law: what tokens are worth when they are seen again, and the best split when text is short."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adafrugal.laws.allocation import (
    FLOPS_PER_PARAMETER_AND_TOKEN,
    UNKNOWN_RANGE,
    Allocation,
    FittedRange,
    Marginals,
    check_positive,
)
from adafrugal.laws.chinchilla import ChinchillaLaw


@dataclass(frozen=True, kw_only=True)
class RepeatedDataLaw:
    """Chinchilla's form where tokens are seen more than once: a repetition is worth less each time.

    With U unique tokens and R_D = D / U - 1 repetitions, D' = U (1 + R_D* (1 - exp(-R_D / R_D*))), and N' in the same
    way from U_N = min(N, best N for U). Then L = E + A / N'^alpha + B / D'^beta.

    Args:
        fresh: The law for tokens seen once.
        token_decay: R_D*: repetitions at which the gain of one has fallen to 1 / e.
        parameter_decay: R_N*: the same for parameters beyond the best number for the unique tokens.
        source: Where the constants come from.
        fitted_range: What the runs behind them spanned.

    Source:
        Muennighoff et al. (arXiv 2305.16264), equations 5 and 6, constants from its appendix A.
    """

    fresh: ChinchillaLaw
    token_decay: float
    parameter_decay: float
    source: str = "your own fit"
    fitted_range: FittedRange = UNKNOWN_RANGE

    def effective_epochs(self, epochs: float) -> float:
        """Epochs of fresh text that are worth as much as this many over the same text.

        Example:
            >>> fresh = ChinchillaLaw(E=1.87, A=521, B=1488, alpha=0.3527, beta=0.3527)
            >>> law = RepeatedDataLaw(fresh=fresh, token_decay=15.387756, parameter_decay=5.309743)
            >>> [round(law.effective_epochs(n), 2) for n in (1, 4, 16, 1000)]
            [1, 3.73, 10.58, 16.39]
        """
        check_positive("RepeatedDataLaw.effective_epochs", epochs=epochs)
        return epochs if epochs <= 1 else _saturated(epochs, self.token_decay)

    def effective_tokens(self, tokens: float, unique_tokens: float) -> float:
        """Fresh tokens that are worth as much as ``tokens`` drawn from ``unique_tokens``."""
        used = min(tokens, unique_tokens)
        return used * self.effective_epochs(tokens / used)

    def effective_parameters(self, num_parameters: float, tokens: float, unique_tokens: float) -> float:
        """N': parameters beyond the best number for the unique tokens seen count less."""
        best = self.fresh.optimum_for_tokens(min(tokens, unique_tokens)).num_parameters
        used = min(num_parameters, best)
        return used * _saturated(num_parameters / used, self.parameter_decay)

    def loss(self, num_parameters: float, tokens: float, unique_tokens: float | None = None) -> float:
        """Loss in nats per token.

        Args:
            num_parameters: N, embeddings included.
            tokens: D, all that are seen.
            unique_tokens: Different ones that there are; None is no limit.
        """
        unique = math.inf if unique_tokens is None else unique_tokens
        check_positive("RepeatedDataLaw.loss", num_parameters=num_parameters, tokens=tokens, unique_tokens=unique)
        return self.fresh.loss(
            self.effective_parameters(num_parameters, tokens, unique), self.effective_tokens(tokens, unique)
        )

    def optimum(
        self, flops: float, *, unique_tokens: float | None = None, max_parameters: float | None = None
    ) -> Allocation:
        """Parameters and tokens of least loss, where only so many tokens are different.

        With enough of them it is the closed form; otherwise a grid over ln N along 6ND = C, and bisection in the best
        cell.

        Args:
            flops: C.
            unique_tokens: Different tokens that there are; None is no limit.
            max_parameters: The largest model that fits, or None.

        Returns:
            The split, which spends C exactly; tokens above ``unique_tokens`` are repetitions.
        """
        closed = self.fresh.optimum(flops, max_parameters=max_parameters)
        check_positive("RepeatedDataLaw.optimum", unique_tokens=unique_tokens)
        if unique_tokens is None or closed.tokens <= unique_tokens:
            return closed
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        # More tokens than this are worth nothing, as exp(-40) is below what float64 adds to 1; fewer than all is waste.
        least = product / (unique_tokens * (1 + 40 * self.token_decay))
        most = min(product / unique_tokens, math.inf if max_parameters is None else max_parameters)
        if least >= most:
            return Allocation(most, product / most)
        low, high = math.log(least), math.log(most)
        grid = [low + (high - low) * cell / 400 for cell in range(401)]
        losses = [self.loss(math.exp(x), product / math.exp(x), unique_tokens) for x in grid]
        best = losses.index(min(losses))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 400)]
        for _ in range(60):
            middle = (low + high) / 2
            size = math.exp(middle)
            per_parameter, per_token = self._slopes(size, product / size, unique_tokens)
            low, high = (middle, high) if size * per_parameter < product / size * per_token else (low, middle)
        size = min(math.exp((low + high) / 2), most)
        return Allocation(size, product / size)

    def marginals(self, num_parameters: float, tokens: float, unique_tokens: float | None = None) -> Marginals:
        """Derivatives of the loss at one point, and along the best splits of these unique tokens."""
        unique = math.inf if unique_tokens is None else unique_tokens
        check_positive("RepeatedDataLaw.marginals", num_parameters=num_parameters, tokens=tokens, unique_tokens=unique)
        flops = Allocation(num_parameters, tokens).flops
        per_parameter, per_token = self._slopes(num_parameters, tokens, unique)
        best = self.optimum(flops, unique_tokens=unique_tokens)
        # At the best split a little more compute gains the same by either; the tokens' side has no kink there.
        along = self._token_slope(best.tokens, unique)
        return Marginals(
            per_parameter=per_parameter, per_token=per_token, per_log_flops=along * best.tokens, flops=flops
        )

    def _token_slope(self, tokens: float, unique: float) -> float:
        """dL/dD through D'."""
        repeats = max(tokens / unique - 1, 0)
        inner = math.exp(-repeats / self.token_decay)
        return -self.fresh.beta * self.fresh.B * self.effective_tokens(tokens, unique) ** (-self.fresh.beta - 1) * inner

    def _slopes(self, num_parameters: float, tokens: float, unique: float) -> tuple[float, float]:
        """dL/dN and dL/dD; at a kink, towards more."""
        seen = min(tokens, unique)
        best = self.fresh.optimum_for_tokens(seen).num_parameters
        used = min(num_parameters, best)
        effective = self.effective_parameters(num_parameters, tokens, unique)
        outer = -self.fresh.alpha * self.fresh.A * effective ** (-self.fresh.alpha - 1)
        inner = math.exp(-(num_parameters / used - 1) / self.parameter_decay)
        per_token = self._token_slope(tokens, unique)
        if tokens < unique and num_parameters > best:  # more text also raises the best number of parameters
            growth = effective / used - inner * num_parameters / used
            per_token += outer * growth * used * self.fresh.beta / self.fresh.alpha / tokens
        return outer * inner, per_token

    def caveats(
        self, *, num_parameters: float | None = None, tokens: float | None = None, flops: float | None = None
    ) -> tuple[str, ...]:
        """What to know before trusting the law at a point, as plain sentences; never none."""
        note = (
            "This law can never say that repetition hurts, and with many epochs it does (arXiv 2605.01640): watch the "
            "validation loss. Its runs used dropout 0.1 and weight decay 0.1."
        )
        return (
            note,
            *self.fitted_range.caveats(num_parameters, tokens, flops),
        )


def _saturated(times: float, decay: float) -> float:
    """1 + decay * (1 - exp(-(times - 1) / decay)): exact for small repetition."""
    return 1 - decay * math.expm1(-(times - 1) / decay)
