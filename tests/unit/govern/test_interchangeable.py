"""All policies take each other's place: pure, and with a memory of plain data that survives JSON and a checkpoint."""

import copy
import io
import json
from typing import Any

import pytest
import torch

from adafrugal.core.errors import ConfigError
from adafrugal.core.protocols import Policy
from adafrugal.core.values import Budget, Clock, Cost, Snapshot
from adafrugal.govern.config import GovernorConfig
from adafrugal.govern.governor import Governor
from adafrugal.govern.together import Together
from adafrugal.optim.schedules import ConstantPolicy, DensityDecay, LearningRate, PlateauGap

BUDGET = Budget(flops=4e15)
PAPER = Together(
    policies={
        "density": DensityDecay(start=0.25, end=0.05),
        "gap": PlateauGap(start=200, maximum=1000, growth=1.5, tolerance=5e-3),
        "lr": LearningRate(),
    }
)
POLICIES: dict[str, Policy] = {
    "constant": ConstantPolicy(),
    "paper": PAPER,
    "governed": Governor(config=GovernorConfig(num_draws=50)),
    "governed by price": Governor(config=GovernorConfig(threshold="price", price=1.5e-16, num_draws=50)),
}


def snapshots() -> list[Snapshot]:
    seen = []
    for index in range(1, 41):
        spent = Cost(flops=10**15 * index // 40)
        seen.append(
            Snapshot(
                clock=Clock(step=10 * index, progress=BUDGET.share(steps=0, cost=spent)),
                val_loss=2 + 0.5 * (index / 40) ** -0.3 + 0.002 * (-1) ** index,
                settings={"density": 0.25, "update_gap": 200},
                spent=spent,
            )
        )
    return seen


def through_json(memory: Any) -> Any:
    return json.loads(json.dumps(memory))


def through_a_checkpoint(memory: Any) -> Any:
    file = io.BytesIO()
    torch.save(memory, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("carried", [through_json, through_a_checkpoint])
def test_memory_that_was_saved_at_any_moment_goes_on_as_if_it_had_not_been(name: str, carried: Any) -> None:
    policy, memory, other = POLICIES[name], {}, {}
    for seen in snapshots():
        before = copy.deepcopy(memory)
        decision, after = policy.decide(seen, BUDGET, memory)
        assert memory == before, "the memory that was passed in is left alone"
        resumed, other = policy.decide(seen, BUDGET, carried(other))
        assert resumed == decision
        memory = after
    assert carried(dict(memory)) == memory


def test_the_papers_policy_writes_what_its_parts_write() -> None:
    first, middle = snapshots()[0], Snapshot(clock=Clock(step=5, progress=0.5), settings={"density": 0.25})
    decision, memory = PAPER.decide(middle, None, {})
    assert decision.settings == {"density": 0.15, "lr_factor": LearningRate().factor(0.5)}
    assert memory["density"] == {"level": 4}
    assert decision.numbers["density/level"] == 4
    assert PAPER.decide(first, None, {})[0].settings == {"lr_factor": LearningRate().factor(first.clock.progress)}


def test_two_writers_of_one_setting_are_refused() -> None:
    twice = Together(policies={"one": LearningRate(), "two": LearningRate()})
    with pytest.raises(ConfigError, match="a second writer of lr_factor; allowed is one writer of each setting"):
        twice.decide(snapshots()[0], None, {})


def test_one_that_stops_stops_all() -> None:
    both = Together(policies={"governor": Governor(), "constant": ConstantPolicy()})
    broken = Snapshot(clock=Clock(step=1, progress=0.1), finite=False, checkpoint="step-0")
    decision, _ = both.decide(broken, BUDGET, {})
    assert decision.action == "stop"
    assert "step-0" in decision.reason
