"""Shapes, gradients and parameters that other optimizers trip over."""

import pytest
import torch
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD
from adafrugal.core.errors import ConfigError, NotSupportedError
from adafrugal.optim.subspaces import SUBSPACES
from problems import draw, follow, gradient_sequence, parameters, split_group, tiny_loss, tiny_model, train_tiny

SPLITTING = [n for n in SUBSPACES.names() if n not in ("whole", "empty") and "layer" not in n]


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (64, 64), (17, 33), (1, 40), (40, 1)])
@pytest.mark.parametrize(
    ("subspace", "density"),
    [
        (subspace, density)
        for subspace in SPLITTING
        for density in ((0.0, 1.0) if subspace.startswith("blocks") else (0.0, 0.01, 0.5, 1.0))
    ],
)
def test_wide_tall_square_and_thin_matrices_at_any_density(subspace, shape, density) -> None:
    params = parameters([shape], torch.float32)
    opt = FRUGAL(split_group(params, ["w"]), density=density, update_gap=2, subspace=subspace)
    follow(opt, params, gradient_sequence([shape], 5, torch.float32))
    memory = opt.memory()
    assert memory["state_bytes"] == memory["planned_state_bytes"]
    assert torch.isfinite(params[0]).all()
    if density == 0.0:
        assert memory["total_bytes"] == 0
        assert not opt.state
    if density == 0.01:
        assert memory["state_bytes"] > 0, "a density above zero keeps at least one line"


def test_scalars_vectors_and_empty_tensors_are_stateful_and_never_indexed() -> None:
    params = parameters([(), (5,), (0,), (0, 7), (3, 0), (2, 3, 4, 5)], torch.float32)
    opt = FRUGAL(params, update_gap=2)
    follow(opt, params, gradient_sequence([tuple(p.shape) for p in params], 5, torch.float32))
    assert [group["role"] for group in opt.param_groups] == ["stateful"]
    assert opt.memory()["state_bytes"] == 8 * sum(p.numel() for p in params)


def test_a_vector_marked_as_matrix_is_refused_with_the_way_out() -> None:
    flat = nn.Parameter(torch.zeros(4096))
    with pytest.raises(ConfigError, match=r"a 1-D tensor of 4096 elements.*FSDP1: use FSDP2\. Else give role"):
        FRUGAL([{"params": [flat], "role": "split"}])
    FRUGAL([{"params": [flat], "role": "split", "subspace": "blocks", "density": 1.0}])


def test_convolutions_are_flattened_and_experts_are_stacks() -> None:
    conv, experts = nn.Parameter(draw((32, 8, 3, 3), 0)), nn.Parameter(draw((4, 32, 24), 1))
    opt = FRUGAL([{"params": [("conv", conv), ("experts", experts)], "role": "split", "stacked": [False, True]}])
    follow(opt, [conv, experts], gradient_sequence([(32, 8, 3, 3), (4, 32, 24)], 3))
    assert opt.state[conv]["exp_avg"].shape == (1, 32, 18)
    assert opt.state[experts]["exp_avg"].shape == (4, 32, 6)


@pytest.mark.parametrize("subspace", SPLITTING)
def test_strided_weights_and_gradients_give_the_same_as_contiguous_ones(subspace) -> None:
    density = 1.0 if subspace.startswith("blocks") else 0.3
    results = []
    for strided in (False, True):
        weight = draw((24, 20), 0)
        param = nn.Parameter(weight.T.contiguous().T if strided else weight)
        assert param.is_contiguous() != strided
        opt = FRUGAL(split_group([param], ["w"]), density=density, update_gap=2, subspace=subspace)
        for k in range(5):
            grad = draw((24, 20), 10 + k)
            param.grad = grad.T.contiguous().T if strided else grad
            opt.step()
        results.append(param.detach().clone())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-14)  # float64, two paths


def test_weights_outside_a_window_are_never_written_by_the_fused_kernel() -> None:
    for subspace in ("rows", "columns", "rows_striped"):
        params = parameters([(32, 48)], torch.float32)
        before = params[0].detach().clone()
        opt = FRUGAL(split_group(params, ["w"]), density=0.25, subspace=subspace, stateless_rule="none")
        follow(opt, params, gradient_sequence([(32, 48)], 1, torch.float32))
        moved = (params[0] != before).float()
        frame = opt._places().frame(params[0], opt.param_groups[0], opt.state[params[0]])
        inside = torch.zeros(frame.geometry.shape)
        frame.merge(inside, torch.ones(frame.state_shape))
        assert torch.equal(moved.view(frame.geometry.shape), inside)


def test_tied_weights_are_counted_and_updated_once() -> None:
    model = tiny_model(tied=True)
    opt = FRUGAL(model, 1e-2)
    assert sum(len(g["params"]) for g in opt.param_groups) == len(list(model.parameters()))
    assert [g["param_names"] for g in opt.param_groups if g["label"] == "embeddings"] == [["embed.weight"]]
    assert "tied" in str(opt.describe())
    before = model.embed.weight.detach().clone()
    tiny_loss(model, 0).backward()
    model.embed.weight.grad.fill_(1.0)
    opt.step()
    moved = before - model.embed.weight.detach()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-2), rtol=1e-4, atol=0)  # one AdamW step, eps aside


def test_frozen_parameters_are_left_out_and_counted() -> None:
    model = tiny_model()
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    opt = FRUGAL(model)
    assert sum(len(g["params"]) for g in opt.param_groups) == len([p for p in model.parameters() if p.requires_grad])
    assert "5 frozen parameters are not optimized" in str(opt.describe())


def test_sparse_gradients_are_refused_by_name_before_any_weight_moves() -> None:
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(32, 32), nn.Embedding(100, 16, sparse=True))
    opt = FRUGAL(model)
    before = model[0].weight.detach().clone()
    model[0].weight.grad = torch.ones(32, 32)
    model[1](torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"FRUGAL\.step\(\) at 1\.weight.*sparse=False, or give it to.*SparseAdam"):
        opt.step()
    assert torch.equal(model[0].weight, before)
    assert opt.param_groups[0]["step"] == 0


def test_complex_parameters_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match=r"at c.*torch\.complex64"):
        FRUGAL([("c", nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64)))])


def test_differentiable_is_refused_with_its_reason() -> None:
    for method in (FRUGAL, AdaFRUGAL):
        with pytest.raises(NotSupportedError, match=r"differentiable=True.*sign has no useful derivative"):
            method([nn.Parameter(torch.zeros(4, 4))], differentiable=True)


def test_containers_are_torchs() -> None:
    weight = nn.Parameter(torch.zeros(32, 32))
    for bad in ({weight}, [{"params": {weight}}]):
        with pytest.raises(TypeError, match="order"):
            FRUGAL(bad)
    with pytest.raises(TypeError, match="got a tensor"):
        FRUGAL(weight)
    with pytest.raises(TypeError, match="can only optimize tensors"):
        FRUGAL([1.0])
    with pytest.raises(ConfigError, match="empty list"):
        FRUGAL([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        FRUGAL([{"params": [weight]}, {"params": [weight]}])
    assert len(FRUGAL(iter([weight])).param_groups) == 1


def test_a_bare_list_is_split_by_shape_and_describe_says_so() -> None:
    matrix, vector = nn.Parameter(torch.zeros(32, 32)), nn.Parameter(torch.zeros(32))
    opt = FRUGAL([vector, matrix])
    assert [(g["role"], len(g["params"])) for g in opt.param_groups] == [("split", 1), ("stateful", 1)]
    text = str(opt.describe())
    assert "Names are not known: tensors were sorted by shape, and frames are keyed by group and index." in text
    assert "matrix, by shape" in text


def test_named_parameters_keep_embeddings_and_heads_stateful_by_name() -> None:
    opt = FRUGAL(tiny_model().named_parameters())
    roles = {n: g["role"] for g in opt.param_groups for n in g["param_names"]}
    assert roles["embed.weight"] == "stateful"
    assert roles["blocks.0.up.weight"] == "split"
    assert "Names are not known" not in str(opt.describe())


@pytest.mark.parametrize("subspace", SPLITTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_all_zero_gradient_at_a_refresh_moves_nothing(subspace, dtype) -> None:
    density = 1.0 if subspace.startswith("blocks") else 0.25
    param = nn.Parameter(draw((64, 256), 0, dtype))
    before = param.detach().clone()
    opt = FRUGAL(split_group([param], ["w"]), density=density, subspace=subspace, update_gap=2)
    for _ in range(5):
        param.grad = torch.zeros_like(param)
        opt.step()
    assert torch.equal(param, before)


def test_a_zero_expert_in_a_stack_gets_a_basis_of_its_own() -> None:
    grad = draw((3, 24, 32), 1)
    grad[1] = 0.0
    param = nn.Parameter(draw((3, 24, 32), 0))
    opt = GaLore([{"params": [("e", param)], "role": "split", "stacked": [True]}], density=0.25)
    param.grad = grad
    opt.step()
    basis = opt.state[param]["basis"]
    gram = torch.bmm(basis.mT, basis)
    torch.testing.assert_close(gram, torch.eye(6, dtype=torch.float64).expand(3, 6, 6), rtol=0, atol=1e-12)


def test_svd_takes_low_precision_gradients() -> None:
    for dtype, rounding in ((torch.bfloat16, "stochastic"), (torch.float16, "kahan")):
        param = nn.Parameter(draw((32, 48), 0, dtype))
        opt = GaLore(split_group([param], ["w"]), density=0.25, rounding=rounding)
        param.grad = draw((32, 48), 1, dtype)
        opt.step()
        assert opt.state[param]["basis"].dtype == torch.float32
        assert opt.state[param]["exp_avg"].dtype == torch.float32


def test_embeddings_row_by_row() -> None:
    """Stateless, a row without gradient rests; stateful, it moves on by its momentum, as AdamW's does."""
    for role, moves in (("stateless", False), ("stateful", True)):
        table = nn.Embedding(10, 4, _weight=draw((10, 4), 0, torch.float32))
        opt = FRUGAL([{"params": [("t", table.weight)], "role": role}], 1e-2)
        table(torch.tensor([3])).sum().backward()
        opt.step()
        opt.zero_grad()
        before = table.weight.detach().clone()
        table(torch.tensor([5])).sum().backward()
        opt.step()
        assert bool((table.weight[3] != before[3]).any()) == moves
        assert not torch.equal(table.weight[5], before[5])


def test_decay_is_applied_by_the_sign_and_never_enters_it() -> None:
    param = nn.Parameter(torch.tensor([1.0, 10.0]))
    opt = SignSGD([param], lr=0.1, weight_decay=0.1)
    param.grad = torch.tensor([0.0, -0.5])
    opt.step()
    torch.testing.assert_close(param.detach(), torch.tensor([0.99, 10.0 * 0.99 + 0.1]), rtol=0, atol=1e-6)


def test_the_first_steps_after_a_refresh_are_no_larger_than_the_rate() -> None:
    """Bias correction starts again for each line: no update exceeds a few lr, whatever the moments were."""
    params = parameters([(32, 48)])
    opt = FRUGAL(split_group(params, ["w"]), 1e-2, density=0.3, update_gap=5)
    for k in range(60):
        before = params[0].detach().clone()
        scale = 1e3 if k < 30 else 1e-3  # a sudden fall of the gradient is the worst case for stale moments
        follow(opt, params, [[draw((32, 48), k) * scale]])
        entered = opt.state[params[0]].get("entered")
        if k % 5 == 0 and k > 0 and entered is not None:
            step = (params[0].detach() - before).abs()
            fresh = opt.state[params[0]]["step"] - entered == 1
            lines = opt._places().frame(params[0], opt.param_groups[0], opt.state[params[0]]).lines()[fresh]
            assert step[:, lines].max() <= 1e-2 * (1 + 1e-6)


def test_groups_added_in_mid_run_join_the_clock() -> None:
    model = tiny_model()
    late = list(model.blocks[2].named_parameters(prefix="blocks.2"))
    early = [(n, p) for n, p in model.named_parameters() if not n.startswith("blocks.2")]
    opt = AdaFRUGAL(early, 1e-2, total_steps=10, update_gap=3, update_gap_max=None)
    train_tiny(model, opt, range(5))
    opt.add_param_group({"params": late})
    assert len({g["step"] for g in opt.param_groups}) == 1
    train_tiny(model, opt, range(5, 10))
    densities = {g["density"] for g in opt.param_groups if g["role"] == "split"}
    assert densities == {0.25 - 0.2 * 7 / 8}, "all move together: 9 of 10 steps are 7 levels"
    assert all(opt.state[p]["step"] == 5 for n, p in late if p.ndim == 1)


def test_badam_gives_every_layer_exactly_its_steps_and_frees_the_rest() -> None:
    model = tiny_model()
    opt = BAdam(model, 1e-2, update_gap=4, always_active=["head.*"])
    changes = dict.fromkeys(range(3), 0)
    for step in range(24):
        before = [block.up.weight.detach().clone() for block in model.blocks]
        embedding, head = model.embed.weight.detach().clone(), model.head.weight.detach().clone()
        opt.zero_grad()
        tiny_loss(model, step).backward()
        with_grad = {n.split(".")[1] for n, p in model.named_parameters() if p.grad is not None and "blocks" in n}
        assert len(with_grad) == 1, "backward computes gradients for one layer"
        opt.step()
        moved = [i for i in range(3) if not torch.equal(before[i], model.blocks[i].up.weight)]
        assert [str(i) for i in moved] == list(with_grad)
        changes[moved[0]] += 1
        assert torch.equal(embedding, model.embed.weight)
        assert not torch.equal(head, model.head.weight)
    assert changes == {0: 8, 1: 8, 2: 8}


def test_badam_needs_layers_and_patterns_that_match() -> None:
    with pytest.raises(ConfigError, match="without a layer number"):
        BAdam([nn.Parameter(torch.zeros(32, 32))])
    with pytest.raises(ConfigError, match=r"classifier.*patterns that match a parameter"):
        BAdam(tiny_model(), always_active=["classifier.*"])
    with pytest.raises(ConfigError, match=r"order='sideways'"):
        BAdam(tiny_model(), order="sideways")
