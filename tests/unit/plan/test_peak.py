"""Predicted peaks of whole steps against measured ones; optimizer bytes against the optimizer's own."""

import dataclasses
import gc
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD, param_groups
from adafrugal.core.errors import ConfigError, NotSupportedError
from adafrugal.core.rng import named_generator
from adafrugal.data.tasks import NextToken
from adafrugal.optim.memory import held_bytes
from adafrugal.plan.activations import StepSetting
from adafrugal.plan.parallel import PARALLEL_KINDS, Layout
from adafrugal.plan.parameters import meta_parameters
from adafrugal.plan.peak import StepPeak, state_path, step_peak
from adafrugal.plan.shapes import PRESETS, ModelShape
from adafrugal.plan.tracing import measured_peak
from adafrugal.plan.updates import optimizer_bytes

transformers = pytest.importorskip("transformers")

# As for activations (0.3 %), and a few thousand bytes of step counts, sums and generators beside some megabytes.
STEP = 0.01
# A window of rows may wrap, which cuts the rest in two pieces; the prediction counts it whole. A random basis is drawn
# by LAPACK, whose workspace is not followed.
BOUND = 0.08

SHAPE = ModelShape(
    hidden_size=128,
    intermediate_size=320,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=200,
    max_sequence_length=256,
)
LONG = StepSetting(micro_batch=2, sequence_length=128)
SHORT = StepSetting(micro_batch=1, sequence_length=8)  # the peak is the optimizer's
Factory = Callable[[nn.Module], torch.optim.Optimizer]
MAKERS: dict[str, Factory] = {
    "torch AdamW": lambda m: torch.optim.AdamW(m.parameters()),
    "torch SGD": lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, weight_decay=0.1),
    "AdaFRUGAL": lambda m: AdaFRUGAL(param_groups(m), total_steps=1000, update_gap=2),
    "FRUGAL 1": lambda m: FRUGAL(param_groups(m), density=1.0, update_gap=2),
    "SignSGD": lambda m: SignSGD(m),
    "GaLore": lambda m: GaLore(param_groups(m), update_gap=2),
    "rows": lambda m: FRUGAL(param_groups(m), subspace="rows", update_gap=2),
    "scattered": lambda m: FRUGAL(param_groups(m), subspace="columns_scattered", update_gap=2),
    "svd": lambda m: FRUGAL(param_groups(m), subspace="svd", update_gap=2),
    "low states": lambda m: FRUGAL(param_groups(m), state_dtype="bfloat16", update_gap=2),
    "kahan": lambda m: FRUGAL(param_groups(m), rounding="kahan", update_gap=2),
}
METHODS = ("torch AdamW", "AdaFRUGAL", "GaLore")
FUSABLE = ("AdaFRUGAL", "SignSGD", "GaLore", "FRUGAL 1")
BOUNDED = ("rows", "torch AdamW", "torch SGD")


def llama(dtype: torch.dtype) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        vocab_size=SHAPE.vocab_size,
        max_position_embeddings=SHAPE.max_sequence_length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).to(dtype).train()


def states_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    items = [item for state in optimizer.state.values() for item in state.items()]
    return [(name, value) for name, value in items if isinstance(value, torch.Tensor)]


def measured(make: Factory, setting: StepSetting) -> tuple[int, int]:
    """The peak of the second and third step, of which the third refreshes, and the bytes of moments."""
    model = llama(torch.bfloat16 if setting.precision == "bfloat16" else torch.float32)
    optimizer, generator = make(model), named_generator(0, "test", "tokens")
    if setting.fused_backward:
        optimizer.attach(model)

    def step() -> None:
        ids = torch.randint(SHAPE.vocab_size, (setting.micro_batch, setting.sequence_length), generator=generator)
        NextToken().loss_sum(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    measured_peak(step)  # the profiler must have seen the states made to see a refresh free them
    gc.collect()
    resident = held_bytes([*model.parameters(), *model.buffers(), *(tensor for _, tensor in states_of(optimizer))])
    moments = held_bytes(
        tensor for name, tensor in states_of(optimizer) if name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
    )
    return resident + max(measured_peak(step), measured_peak(step)), moments


def predicted(make: Factory, setting: StepSetting) -> StepPeak:
    dtype = torch.bfloat16 if setting.precision == "bfloat16" else torch.float32
    return step_peak(SHAPE, setting, make(meta_parameters(SHAPE, dtype)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "setting"), [*((name, SHORT) for name in MAKERS), *((name, LONG) for name in METHODS)]
)
def test_a_step_is_what_was_predicted(name: str, setting: StepSetting, precision: str) -> None:
    setting = dataclasses.replace(setting, precision=precision)
    peak, moments = measured(MAKERS[name], setting)
    found = predicted(MAKERS[name], setting)
    assert found.state_bytes == moments, "to the byte"
    assert setting.tokens == SHORT.tokens or found.peak_phase not in ("update", "refresh")
    assert found.peak_bytes == pytest.approx(peak, rel=BOUND if name in BOUNDED else STEP)
    assert found.peak_bytes >= peak * (1 - STEP)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "setting"), [*((name, SHORT) for name in FUSABLE), ("AdaFRUGAL", LONG)])
def test_a_fused_backward_is_what_was_predicted(name: str, setting: StepSetting, precision: str) -> None:
    setting = dataclasses.replace(setting, precision=precision, fused_backward=True)
    peak, _ = measured(MAKERS[name], setting)
    assert predicted(MAKERS[name], setting).peak_bytes == pytest.approx(peak, rel=STEP)


def test_the_terms_add_up_and_the_peak_is_the_most() -> None:
    for name, make in MAKERS.items():
        found = predicted(make, LONG)
        terms = (found.weight_bytes, found.gradient_bytes, found.state_bytes, found.index_bytes)
        assert sum(terms) + found.activation_bytes + found.temporary_bytes == found.peak_bytes, name
        assert found.phases[found.peak_phase] == found.peak_bytes == max(found.phases.values())


def test_bases_are_counted_to_the_byte() -> None:
    model = llama(torch.float32)
    optimizer = GaLore(param_groups(model))
    NextToken().loss_sum(model, torch.zeros(1, 8, dtype=torch.int64)).backward()
    optimizer.step()
    found = optimizer_bytes(GaLore(param_groups(meta_parameters(SHAPE))))
    assert found.index_bytes == optimizer.memory()["index_bytes"] > 0
    assert found.state_bytes == optimizer.memory()["state_bytes"]


@pytest.mark.parametrize("subspace", ["columns", "rows", "blocks"])
def test_the_path_of_states_is_the_optimizer_s_own(subspace: str) -> None:
    total_steps = 24

    def make() -> AdaFRUGAL:
        groups = param_groups(meta_parameters(SHAPE))
        return AdaFRUGAL(groups, total_steps=total_steps, update_gap=5, subspace=subspace, on_refresh="reset")

    optimizer = make()
    held = []
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for _ in range(total_steps):
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
        held.append(optimizer.memory()["total_bytes"])
    path = state_path(make(), total_steps)
    assert (path.peak_bytes, path.final_bytes) == (max(held), held[-1])
    assert path.mean_bytes == pytest.approx(sum(held) / total_steps, rel=1e-12)
    assert path.final_bytes < path.mean_bytes < path.peak_bytes


def test_states_that_do_not_move_have_a_flat_path() -> None:
    for make in (MAKERS["torch AdamW"], MAKERS["SignSGD"], lambda m: FRUGAL(param_groups(m))):
        path = state_path(make(meta_parameters(SHAPE)), 1000)
        assert path.peak_bytes == path.mean_bytes == path.final_bytes


DENSITIES = st.floats(0.0, 1.0)
SETTINGS = st.builds(
    StepSetting,
    micro_batch=st.integers(1, 8),
    sequence_length=st.integers(2, 128),
    precision=st.sampled_from(["float32", "bfloat16", "autocast"]),
    checkpointing=st.booleans(),
    fused_backward=st.booleans(),
)


@settings(max_examples=15, deadline=None)
@given(SETTINGS, DENSITIES, DENSITIES, st.sampled_from(["columns", "svd", "rows"]))
def test_lower_density_never_needs_more(setting: StepSetting, one: float, other: float, subspace: str) -> None:
    low, high = (
        step_peak(SHAPE, setting, FRUGAL(param_groups(meta_parameters(SHAPE)), density=density, subspace=subspace))
        for density in sorted((one, other))
    )
    assert low.state_bytes <= high.state_bytes
    if subspace == "columns" and setting.precision != "bfloat16" and one < 0.99 > other:
        # At density 1 a tensor is updated in place by a fused kernel, without the buffers of a part.
        assert low.peak_bytes <= high.peak_bytes


def test_a_measured_optimizer_is_not_touched() -> None:
    optimizer = MAKERS["AdaFRUGAL"](meta_parameters(SHAPE))
    before = [{**group} for group in optimizer.param_groups]
    step_peak(SHAPE, LONG, optimizer)
    state_path(optimizer, 100)
    assert [{**group} for group in optimizer.param_groups] == before
    assert not optimizer.state


# --- several processes ------------------------------------------------------------------------------------------------


def test_ddp_holds_buckets_all_the_time() -> None:
    optimizer = MAKERS["AdaFRUGAL"](meta_parameters(SHAPE))
    alone, views, twice = (
        step_peak(SHAPE, LONG, optimizer, layout)
        for layout in (
            Layout(),
            Layout(kind="ddp", num_processes=2),
            Layout(kind="ddp", num_processes=2, gradients_in_buckets=False),
        )
    )
    weights = 4 * SHAPE.num_parameters
    assert views.phases["forward"] - alone.phases["forward"] == weights, "buckets are made before the first step"
    assert views.phases["update"] == alone.phases["update"]
    assert {name: twice.phases[name] - views.phases[name] for name in views.phases} == dict.fromkeys(
        views.phases, weights
    )
    again = dataclasses.replace(LONG, accumulation=3)
    assert step_peak(SHAPE, again, optimizer).phases == views.phases, "as gradients of earlier micro-batches are"


def test_fsdp2_shares_weights_gradients_and_states() -> None:
    shape = PRESETS.create("llama-130m")
    optimizer = FRUGAL(param_groups(meta_parameters(shape)))
    peaks = [step_peak(shape, LONG, optimizer, Layout(kind="fsdp2", num_processes=n)) for n in (1, 2, 4, 8)]
    for number, peak in zip((1, 2, 4, 8), peaks, strict=True):
        assert peak.weight_bytes == -(-4 * shape.num_parameters // number)
        # Rows of a matrix divide by 8, the norms' few numbers as well.
        assert peak.state_bytes == pytest.approx(peaks[0].state_bytes / number, rel=1e-6)
    assert all(more.peak_bytes < fewer.peak_bytes for fewer, more in pairwise(peaks))
    assert peaks[3].peak_bytes < step_peak(shape, LONG, optimizer).peak_bytes


@pytest.mark.parametrize("kind", PARALLEL_KINDS[1:])
def test_no_fused_backward_over_several_processes(kind: str) -> None:
    setting = dataclasses.replace(LONG, fused_backward=True)
    with pytest.raises(NotSupportedError, match=f"received {kind} on 2 processes"):
        step_peak(SHAPE, setting, MAKERS["AdaFRUGAL"](meta_parameters(SHAPE)), Layout(kind=kind, num_processes=2))


# --- bounds and errors ------------------------------------------------------------------------------------------------


def test_seven_billion_parameters_take_a_moment() -> None:
    shape = PRESETS.create("llama-7b")
    model = meta_parameters(shape, torch.bfloat16)
    optimizer = AdaFRUGAL(param_groups(model), total_steps=150_000)
    setting = StepSetting(micro_batch=1, sequence_length=2048, precision="bfloat16", checkpointing=True)
    seconds = []
    for length in (2048, 2047, 2046):
        start = time.perf_counter()
        found = step_peak(shape, dataclasses.replace(setting, sequence_length=length), optimizer)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3
    assert found.state_bytes == optimizer.memory()["planned_state_bytes"]
    assert found.weight_bytes == 2 * shape.num_parameters


def test_a_gpu_updates_in_lists() -> None:
    def update(make: Factory, device: str) -> int:
        return optimizer_bytes(make(meta_parameters(SHAPE)), device=device).update_bytes

    weights = 4 * SHAPE.num_parameters
    assert update(MAKERS["torch AdamW"], "cuda") == weights, "one copy of all parameters"
    assert update(lambda m: torch.optim.AdamW(m.parameters(), foreach=False), "cuda") < weights
    assert update(lambda m: torch.optim.AdamW(m.parameters(), fused=True), "cpu") == 0
    assert update(MAKERS["AdaFRUGAL"], "cuda") > update(MAKERS["AdaFRUGAL"], "cpu")


def test_a_method_that_freezes_layers_is_counted_by_its_turn() -> None:
    found = optimizer_bytes(BAdam(meta_parameters(SHAPE)))
    assert 0 < found.state_bytes < 8 * SHAPE.num_split_parameters / SHAPE.num_layers * 1.01


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: optimizer_bytes(torch.optim.Adagrad(meta_parameters(SHAPE).parameters())),
            r"optimizer_bytes\(Adagrad\): received Adagrad; allowed is an optimizer of this package, or torch's AdamW",
        ),
        (
            lambda: predicted(MAKERS["torch AdamW"], dataclasses.replace(LONG, fused_backward=True)),
            "received an optimizer of torch's; allowed is one of this package",
        ),
        (lambda: state_path(MAKERS["SignSGD"](meta_parameters(SHAPE)), 0), r"total_steps=0\): received 0"),
        (lambda: Layout(kind="zero"), "received zero; allowed is one of none, ddp, fsdp2"),
        (lambda: Layout(num_processes=2), "received 2; allowed is 1 for none"),
    ],
)
def test_what_cannot_be_predicted_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises((ConfigError, NotSupportedError), match=text):
        call()
