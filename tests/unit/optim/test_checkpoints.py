"""Saved states: plain, by name, of their own dtype, refused when they are another's."""

import copy
import io

import pytest
import torch
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, GaLore, SignSGD
from adafrugal.core.errors import CheckpointError
from adafrugal.optim.settings import FORMAT_VERSION
from problems import draw, follow, gradient_sequence, same_parameters, tiny_loss, tiny_model, train_tiny


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_projector_never_sits_in_the_state() -> None:
    """Three steps, a safe load, three more: bit-equal to six, on a real GPT-2 with its Conv1D and tied head."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=40, n_positions=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()  # eval: dropout would draw from the global stream
    other = copy.deepcopy(model)
    for method in (lambda m: GaLore(m, update_gap=2), lambda m: FRUGAL(m, update_gap=2)):
        straight, resumed = copy.deepcopy(model), copy.deepcopy(other)
        opt = method(straight)
        assert any(group["role"] == "split" for group in opt.param_groups), "GPT-2 splits"

        def run(m, o, steps):
            for step in steps:
                tokens = torch.randint(0, 40, (2, 16), generator=torch.Generator().manual_seed(step))
                o.zero_grad()
                m(input_ids=tokens, labels=tokens).loss.backward()
                o.step()

        run(straight, opt, range(3))
        saved, weights = through_a_file(opt.state_dict()), copy.deepcopy(straight.state_dict())
        run(straight, opt, range(3, 6))
        resumed.load_state_dict(weights)
        second = method(resumed)
        second.load_state_dict(saved)
        run(resumed, second, range(3, 6))
        assert same_parameters(straight, resumed)


def test_bf16_moments_of_float32_weights_stay_bf16_and_their_bytes_stay() -> None:
    model = tiny_model()
    opt = FRUGAL(model, state_dtype=torch.bfloat16)
    train_tiny(model, opt, range(3))
    again = FRUGAL(tiny_model(), state_dtype=torch.bfloat16)
    again.load_state_dict(through_a_file(opt.state_dict()))
    assert again.memory()["total_bytes"] == opt.memory()["total_bytes"]
    assert {t.dtype for s in again.state.values() for k, t in s.items() if "avg" in k} == {torch.bfloat16}


def test_every_state_is_keyed_by_its_parameter_and_everything_else_lives_in_groups() -> None:
    model = tiny_model()
    opt = AdaFRUGAL(model, total_steps=10, update_gap=2)
    train_tiny(model, opt, range(5), lambda s, loss: opt.observe(loss))
    assert set(opt.state) <= set(model.parameters())
    assert {"losses", "cursor", "refreshed_at", "density_level", "widths"} <= set(opt.param_groups[0])


def test_a_checkpoint_with_a_group_more_names_sizes_and_parameters() -> None:
    model = tiny_model()
    named = list(model.named_parameters())
    opt = FRUGAL([(n, p) for n, p in named if not n.startswith("blocks.2")])
    train_tiny(model, opt, range(5))
    opt.add_param_group({"params": [(n, p) for n, p in named if n.startswith("blocks.2")]})
    train_tiny(model, opt, range(5, 10))
    fresh = FRUGAL([(n, p) for n, p in named if not n.startswith("blocks.2")])
    with pytest.raises(CheckpointError) as caught:
        fresh.load_state_dict(opt.state_dict())
    text = str(caught.value)
    assert "groups of [4, 8, 2, 3] parameters" in text
    assert "groups of [4, 8] parameters" in text
    assert "blocks.2.down.weight" in text
    assert "add_param_group before loading" in text


def test_state_of_a_tensor_that_left_its_group_is_dropped_with_a_warning() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    train_tiny(model, opt, range(2))
    gone = opt.param_groups[2]["params"].pop()
    opt.param_groups[2]["param_names"].pop()
    with pytest.warns(UserWarning, match="1 tensors have state but are in no parameter group"):
        saved = opt.state_dict()
    assert len(saved["state"]) == len(list(model.parameters())) - 1
    assert gone in opt.state


def test_gradients_that_are_still_there_do_not_empty_the_state() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    train_tiny(model, opt, range(2))
    tiny_loss(model, 2).backward()
    assert len(opt.state_dict()["state"]) == len(list(model.parameters()))


def test_the_step_counter_is_a_number_and_sits_on_no_device() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    train_tiny(model, opt, range(2))
    assert {type(s["step"]) for s in opt.state.values()} == {int}


def test_decay_in_the_checkpoint_wins_and_may_be_overwritten_before_the_first_step() -> None:
    saver = tiny_model()
    opt = FRUGAL(saver, weight_decay=0.1)
    train_tiny(saver, opt, range(3))
    saved = opt.state_dict()
    expected, found = tiny_model(), tiny_model()
    for model in (expected, found):
        model.load_state_dict(saver.state_dict())
    for decay, overwrite in ((0.1, False), (0.0, True)):
        first, second = copy.deepcopy(expected), copy.deepcopy(found)
        reference = FRUGAL(first, weight_decay=decay)
        reference.load_state_dict(
            {**saved, "param_groups": [{**g, "weight_decay": decay} for g in saved["param_groups"]]}
        )
        opt = FRUGAL(second, weight_decay=0.0)
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["weight_decay"] == 0.1, "as in torch, the checkpoint's numbers win"
        if overwrite:
            for group in opt.param_groups:
                group["weight_decay"] = 0.0
        train_tiny(first, reference, [3])
        train_tiny(second, opt, [3])
        assert same_parameters(first, second), "the very first step uses the right decay"


def test_another_model_another_method_and_another_format_are_refused() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    train_tiny(model, opt, range(2))
    saved = opt.state_dict()
    with pytest.raises(CheckpointError, match=r"exp_avg of .* with shape .*allowed is shape"):
        FRUGAL(tiny_model(hidden=48)).load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"subspace='columns'.*Build the optimizer with subspace='columns'"):
        FRUGAL(tiny_model(), subspace="rows").load_state_dict(saved)
    with pytest.raises(CheckpointError, match="role='split'"):
        SignSGD(tiny_model()).load_state_dict(saved)
    newer = copy.deepcopy(saved)
    newer["param_groups"][0]["format_version"] = FORMAT_VERSION + 1
    with pytest.raises(CheckpointError, match=rf"format_version {FORMAT_VERSION + 1}.*Upgrade adafrugal"):
        FRUGAL(tiny_model()).load_state_dict(newer)
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="load_adamw_state_dict"):
        FRUGAL(model).load_state_dict(adamw.state_dict())
    names = copy.deepcopy(saved)
    names["param_groups"][0]["param_names"][0] = "blocks.0.other.weight"
    with pytest.raises(CheckpointError, match=r"blocks\.0\.other\.weight.*blocks\.0\.up\.weight"):
        FRUGAL(tiny_model()).load_state_dict(names)


def test_a_refused_load_changes_nothing() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    train_tiny(model, opt, range(2))
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(CheckpointError):
        opt.load_state_dict(FRUGAL(tiny_model(hidden=48)).state_dict() | {"param_groups": []})
    after = opt.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(torch.equal(before["state"][k]["exp_avg"], after["state"][k]["exp_avg"]) for k in before["state"])


def test_state_is_matched_by_name_when_parameters_are_listed_in_another_order() -> None:
    straight, other = tiny_model(), tiny_model()
    opt = FRUGAL(straight.named_parameters(), update_gap=3)
    train_tiny(straight, opt, range(4))
    other.load_state_dict(straight.state_dict())
    second = FRUGAL(reversed(list(other.named_parameters())), update_gap=3)
    second.load_state_dict(through_a_file(opt.state_dict()))
    train_tiny(straight, opt, range(4, 9))
    train_tiny(other, second, range(4, 9))
    assert same_parameters(straight, other)


def test_nothing_is_shared_with_the_donor() -> None:
    model, other = tiny_model(), tiny_model()
    opt, second = FRUGAL(model), FRUGAL(other)
    train_tiny(model, opt, range(2))
    saved = opt.state_dict()
    second.load_state_dict(state_dict=saved)
    theirs = {t.untyped_storage().data_ptr() for s in saved["state"].values() for t in s.values() if torch.is_tensor(t)}
    ours = {t.untyped_storage().data_ptr() for s in second.state.values() for t in s.values() if torch.is_tensor(t)}
    assert not ours & theirs
    second.param_groups[0]["widths"][0] = -1
    assert opt.param_groups[0]["widths"][0] != -1


def test_a_plain_side_loads_a_padded_state_and_a_padded_side_a_plain_one() -> None:
    for subspace in ("columns", "rows_scattered", "blocks", "svd"):
        settings = {"total_steps": 12, "density": 0.7, "density_end": 0.2, "update_gap": 3, "subspace": subspace}
        for layouts in (("padded", "compact"), ("compact", "padded")):
            straight, other = tiny_model(), tiny_model()
            opt = AdaFRUGAL(straight, state_layout=layouts[0], **settings)
            train_tiny(straight, opt, range(7))
            other.load_state_dict(straight.state_dict())
            second = AdaFRUGAL(other, state_layout=layouts[1], **settings)
            second.load_state_dict(through_a_file(opt.state_dict()))
            assert second.memory()["total_bytes"] == opt.memory()["total_bytes"], "padding is for files only"
            train_tiny(straight, opt, range(7, 12))
            train_tiny(other, second, range(7, 12))
            assert same_parameters(straight, other)


def test_a_missing_moment_is_named() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    train_tiny(model, opt, range(2))
    saved = opt.state_dict()
    del saved["state"][0]["exp_avg_sq"]
    with pytest.raises(CheckpointError, match=r"exp_avg_sq of blocks\.0\.up\.weight with shape missing"):
        FRUGAL(tiny_model()).load_state_dict(saved)


def test_subspace_seeds_are_functions_of_run_seed_name_and_refresh() -> None:
    """Same frames on every rank and after a resume, whatever the global seeds."""
    frames = []
    for global_seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(global_seed)
            param = nn.Parameter(draw((32, 48), 0))
            opt = FRUGAL([{"params": [("w", param)], "role": "split"}], update_gap=2)
            offsets = []
            for grads in gradient_sequence([(32, 48)], 8):
                follow(opt, [param], [grads])
                offsets.append(opt._places().frame(param, opt.param_groups[0], opt.state[param]).offset)
            frames.append(offsets)
    assert frames[0] == frames[1]
    assert len(set(frames[0])) == 4, "four refreshes, four windows"
