"""Bytes of optimizer states in closed form, from counts alone, and the published table of them.

Only the states so far. An optimizer's own promise counts whole columns or blocks and differs from the closed form by up
to 0.3 % of a cell; `SplitOptimizer.memory` gives that one, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adafrugal.core.errors import ConfigError
from adafrugal.plan.shapes import PRESETS

GIB_BYTES = 2**30
TABLE_MODELS = ("llama-60m", "llama-130m", "llama-350m", "llama-1b", "llama-7b")
TABLE_DENSITIES = (0.25, 0.15, 0.05, 0.0)


def adamw_state_bytes(num_parameters: int, *, bytes_per_moment: int = 4, num_moments: int = 2) -> int:
    """Bytes of the moments where every parameter has them: moments * bytes * N.

    Args:
        num_parameters: N, every trained parameter once.
        bytes_per_moment: 4 for float32, 2 for bfloat16.
        num_moments: 2 for AdamW, 1 for Lion or momentum.

    Returns:
        The exact bytes, without the step counts (4 bytes a tensor in torch's AdamW).

    Raises:
        ConfigError: If a count is negative.

    Example:
        >>> adamw_state_bytes(134_105_856)
        1072846848
    """
    _check_counts(num_parameters=num_parameters, bytes_per_moment=bytes_per_moment, num_moments=num_moments)
    return num_moments * bytes_per_moment * num_parameters


def split_state_bytes(
    num_stateful: int, num_split: int, density: float, *, bytes_per_moment: int = 4, num_moments: int = 2
) -> float:
    """Bytes of the moments of a split optimizer: moments * bytes * (N_full + rho * N_linear).

    Args:
        num_stateful: N_full, the parameters that always have moments: embeddings, head, norms, biases.
        num_split: N_linear, the parameters of which a share has moments.
        density: rho, that share, in [0, 1].
        bytes_per_moment: 4 for float32, 2 for bfloat16.
        num_moments: 2 for AdamW, 1 for Lion or momentum.

    Returns:
        Bytes; not a whole number, since the closed form knows no columns.

    Raises:
        ConfigError: If the density is outside [0, 1] or a count is negative.

    Source:
        FRUGAL (arXiv 2411.07837), the memory columns of its pre-training tables.

    Example:
        >>> split_state_bytes(49_170_432, 84_934_656, 0.0) == adamw_state_bytes(49_170_432)
        True
    """
    if not 0.0 <= density <= 1.0:
        raise ConfigError(
            f"split_state_bytes(density={density})", density, "a share in [0, 1]", "Write 0.25 for a quarter."
        )
    _check_counts(
        num_stateful=num_stateful, num_split=num_split, bytes_per_moment=bytes_per_moment, num_moments=num_moments
    )
    return num_moments * bytes_per_moment * (num_stateful + density * num_split)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"state bytes of {name}={value}", value, "a count from 0", f"Check {name}.")


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """One model of the table of optimizer states.

    Args:
        model: The preset's name.
        num_parameters: Every parameter once.
        adamw_bytes: Bytes of AdamW's moments.
        split_bytes: Bytes of a split optimizer's moments, by density.
    """

    model: str
    num_parameters: int
    adamw_bytes: int
    split_bytes: Mapping[float, float]


def state_bytes_table(
    models: Sequence[str] = TABLE_MODELS,
    densities: Sequence[float] = TABLE_DENSITIES,
    *,
    bytes_per_moment: int = 4,
    num_moments: int = 2,
) -> tuple[StateRow, ...]:
    """Optimizer states of some presets at some densities, beside AdamW's. Divide by ``GIB_BYTES`` for GiB.

    Args:
        models: Names in ``plan.shapes.PRESETS``; first the five sizes that FRUGAL trained.
        densities: Shares in [0, 1].
        bytes_per_moment: 4 for float32, 2 for bfloat16.
        num_moments: 2 for AdamW, 1 for Lion or momentum.

    Returns:
        One row a model, in the order given.

    Raises:
        ConfigError: If a preset is unknown or a density is outside [0, 1].

    Example:
        >>> row = state_bytes_table(["llama-130m"], [0.25])[0]
        >>> f"{row.adamw_bytes / GIB_BYTES:.2f} {row.split_bytes[0.25] / GIB_BYTES:.3f}"
        '1.00 0.525'
    """
    moments = {"bytes_per_moment": bytes_per_moment, "num_moments": num_moments}
    rows: list[StateRow] = []
    for model in models:
        shape = PRESETS.create(model)
        full, split = shape.num_stateful_parameters, shape.num_split_parameters
        rows.append(
            StateRow(
                model=model,
                num_parameters=shape.num_parameters,
                adamw_bytes=adamw_state_bytes(shape.num_parameters, **moments),
                split_bytes={density: split_state_bytes(full, split, density, **moments) for density in densities},
            )
        )
    return tuple(rows)
