"""Numbers and files of earlier versions: a refactor reproduces the ones and reads the others."""

import json

import pytest
import torch

from golden import trajectories
from problems import follow, gradient_sequence, parameters

CURVES = json.loads(trajectories.CURVES.read_text())


@pytest.mark.parametrize("name", trajectories.METHODS)
def test_fifty_steps_are_what_they_were(name: str) -> None:
    curve, _ = trajectories.run(name)
    # Elementwise float64 on another processor may differ in last bits, which fifty steps keep far below this.
    tolerance = 1e-9 if name.split()[-1] in ("svd", "random", "galore") else 1e-11
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(CURVES[name]), rtol=tolerance, atol=0)


def test_a_state_of_format_1_is_read() -> None:
    """Written by version 0.1; it loads without unsafe pickling, and the run goes on as it did then."""
    saved = torch.load(trajectories.STATE, weights_only=True)
    _, straight = trajectories.run("adafrugal columns")
    params = parameters(trajectories.SHAPES)
    for param, old in zip(params, (p for g in straight.param_groups for p in g["params"]), strict=True):
        param.data.copy_(old)
    resumed = trajectories.METHODS["adafrugal columns"](params)
    resumed.load_state_dict(saved)
    last = gradient_sequence(trajectories.SHAPES, trajectories.STEPS + 3)[-3:]
    follow(resumed, params, last)
    follow(straight, [p for g in straight.param_groups for p in g["params"]], last)
    for param, old in zip(params, (p for g in straight.param_groups for p in g["params"]), strict=True):
        torch.testing.assert_close(param, old, rtol=1e-11, atol=0)
