"""Records: a line of JSON keeps all that a decision was made from, and a replay that differs says where."""

import json
import math

from adafrugal.core.values import Budget, Clock, Cost, Decision, Snapshot
from adafrugal.govern.config import GovernorConfig
from adafrugal.govern.governor import Governor
from adafrugal.govern.records import differences, read_snapshot, replay, to_record

BUDGET = Budget(flops=4e15)
GOVERNOR = Governor(config=GovernorConfig(threshold="price", price=1.5e-16, num_draws=50))


def logged(losses: list[float]) -> list[dict]:
    """The lines of a run, read back from text."""
    memory, lines = {}, []
    for index, loss in enumerate(losses):
        spent = Cost(flops=10**15 * (index + 1) // 40, tokens=1000 * index, seconds=0.1 * index)
        clock = Clock(step=10 * (index + 1), progress=BUDGET.share(steps=0, cost=spent))
        seen = Snapshot(
            clock=clock,
            val_loss=loss,
            settings={"density": 0.25, "compile": True, "name": "adafrugal", "nothing": None},
            spent=spent,
            costs={"evaluation": Cost(flops=7)},
            measured={"peak_bytes": 5.0},
            checkpoint="step-10",
        )
        decision, memory = GOVERNOR.decide(seen, BUDGET, memory)
        lines.append(json.dumps(to_record(seen, decision)))
    return [json.loads(line) for line in lines]


def losses() -> list[float]:
    return [2 + 0.5 * ((index + 1) / 40) ** -0.3 + 0.001 * (-1) ** index for index in range(50)]


def test_a_snapshot_comes_back_as_it_was() -> None:
    seen = Snapshot(
        clock=Clock(step=3, progress=0.1 + 0.2),
        val_loss=2.0 / 3.0,
        settings={"density": 0.1, "name": None},
        spent=Cost(flops=2**60 + 1, seconds=0.1),
        costs={"step": Cost(tokens=3)},
        measured={"noise_tokens": 1e300},
        phase="hold/2",
        finite=False,
        checkpoint="step-2",
    )
    assert read_snapshot(json.loads(json.dumps(to_record(seen, Decision())))) == seen


def test_a_loss_that_is_not_finite_survives_json_that_knows_no_such_number() -> None:
    seen = Snapshot(clock=Clock(step=3, progress=0.5), val_loss=math.nan)
    line = json.dumps(to_record(seen, Decision()), allow_nan=False)
    loss = read_snapshot(json.loads(line)).val_loss
    assert loss is not None
    assert math.isnan(loss)


def test_the_log_alone_gives_the_same_decisions() -> None:
    records = logged([*losses(), math.nan])
    decided = replay(records, GOVERNOR, BUDGET)
    assert [decision.action for decision in decided] == [record["decision"]["action"] for record in records]
    assert decided[-1].action == "stop"
    assert any("anneal_from" in decision.settings for decision in decided[1:])
    assert differences(records, GOVERNOR, BUDGET) == []


def test_a_log_that_was_changed_is_found_out() -> None:
    records = logged(losses())
    records[20]["snapshot"]["val_loss"] += 0.001
    assert any("step 210: numbers" in text for text in differences(records, GOVERNOR, BUDGET))
    records = logged(losses())
    records[0]["decision"]["settings"]["anneal_from"] = 0.81
    (text,) = differences(records, GOVERNOR, BUDGET)
    assert text.startswith("step 10: settings was {'anneal_from': 0.81")
    records = logged(losses())
    records[30]["decision"]["numbers"]["rate"] *= 1 + 1e-9  # another machine's last digits
    assert differences(records, GOVERNOR, BUDGET) == []
