"""How answers to labelled examples are scored: GLUE's metrics, by scikit-learn and scipy.

A metric that is undefined (all answers the same, say) is 0 and not NaN, as GLUE's own scorer reports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from adafrugal.core.errors import ConfigError, nearest_name
from adafrugal.data.labelled import LabelledTask
from adafrugal.data.libraries import load_library


def score(task: LabelledTask, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Score a model's outputs.

    Args:
        task: Says which metrics.
        outputs: Of the model's head, (examples, outputs): logits of classes, or one number.
        targets: Indices of classes or numbers, (examples,).

    Returns:
        By metric, in the task's order: accuracy, f1 (of class 1) and matthews of the likeliest class; pearson and
        spearman of the numbers. Shares, not per cent.

    Raises:
        ConfigError: If a metric does not fit the task.

    Source:
        GLUE (arXiv 1804.07461), section 3: accuracy; F1 for MRPC; Matthews correlation for CoLA; Pearson and Spearman
        correlation for STS-B.
    """
    if task.is_regression:
        expected, answers, known = targets.double(), outputs.double().flatten(), _NUMBERS
    else:
        expected, answers, known = targets.long(), outputs.argmax(dim=-1), _CLASSES
    lists = [cast(list[Any], values.detach().cpu().tolist()) for values in (expected, answers)]
    found: dict[str, float] = {}
    for name in task.metrics:
        if name not in known:
            what = "a number" if task.is_regression else "classes"
            raise ConfigError(
                f"metrics={task.metrics} of a task of {what}",
                name,
                f"of {', '.join(known)}",
                f"Choose among them.{nearest_name(name, known)}",
            )
        found[name] = _defined(known[name](*lists))
    return found


def main_score(scores: Mapping[str, float]) -> float:
    """What a task reports as one number: the mean of its metrics, as GLUE averages them.

    Example:
        >>> main_score({"f1": 0.5, "accuracy": 1.0})
        0.75
    """
    return sum(scores.values()) / len(scores)


def _defined(value: float) -> float:
    return 0.0 if math.isnan(value) else float(value)


def _accuracy(expected: Sequence[int], answers: Sequence[int]) -> float:
    return load_library("sklearn.metrics", "scoring answers", "tasks").accuracy_score(expected, answers)


def _f1(expected: Sequence[int], answers: Sequence[int]) -> float:
    metrics: Any = load_library("sklearn.metrics", "scoring answers", "tasks")
    return metrics.f1_score(expected, answers, zero_division=0.0)


def _matthews(expected: Sequence[int], answers: Sequence[int]) -> float:
    return load_library("sklearn.metrics", "scoring answers", "tasks").matthews_corrcoef(expected, answers)


def _correlation(name: str) -> Callable[[Sequence[float], Sequence[float]], float]:
    def correlate(expected: Sequence[float], answers: Sequence[float]) -> float:
        if len(set(expected)) < 2 or len(set(answers)) < 2:
            return math.nan  # scipy says so with a warning
        statistics: Any = load_library("scipy.stats", "scoring answers", "tasks")
        return getattr(statistics, name)(expected, answers).statistic

    return correlate


_CLASSES: dict[str, Callable[[Any, Any], float]] = {"accuracy": _accuracy, "f1": _f1, "matthews": _matthews}
_NUMBERS: dict[str, Callable[[Any, Any], float]] = {
    "pearson": _correlation("pearsonr"),
    "spearman": _correlation("spearmanr"),
}
