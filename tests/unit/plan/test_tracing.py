"""A traced, a measured and a calculated peak are peaks of the same step."""

import pytest
import torch
from torch import Tensor, nn

from adafrugal.core.errors import ConfigError
from adafrugal.data.tasks import NextToken
from adafrugal.plan.activations import StepSetting, step_bytes
from adafrugal.plan.shapes import ModelShape
from adafrugal.plan.tracing import StorageTracker, TracedStep, measured_peak, traced_bytes

# A trace cannot add gradients in place, which makes it high by two tensors of the stream at most; of these models,
# whose peaks hold some hundred such tensors, under 2 %.
OUT_OF_PLACE = 0.02
# Besides, transformers writes the causal mask out when it meets fake tensors: for each block length * length numbers a
# sequence, which no real step makes.
WRITTEN_OUT_MASK = 0.12

SHAPE = ModelShape(
    hidden_size=96,
    intermediate_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=4,
    head_dim=24,
    vocab_size=500,
    max_sequence_length=256,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def stack(num_layers: int) -> nn.Module:
    with torch.random.fork_rng():
        return nn.Sequential(nn.Embedding(200, 64), *(Block(64) for _ in range(num_layers)), nn.Linear(64, 200))


def stacked_step(fused: bool, num_tokens: int) -> object:
    def build(num_layers: int) -> TracedStep:
        model = stack(num_layers)

        def loss() -> Tensor:
            ids = torch.zeros(num_tokens, dtype=torch.int64)
            return nn.functional.cross_entropy(model(ids), ids)

        return TracedStep(model=model, loss=loss, fused_backward=fused)

    return build


def run(step: TracedStep) -> int:
    """The real step, measured."""
    if step.fused_backward:
        for param in step.model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return measured_peak(lambda: step.loss().backward())


@pytest.mark.parametrize("num_layers", [1, 3, 12])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_tokens", [512, 8])  # the peak is in forward, or at the end of backward
def test_two_depths_give_all_others(num_layers: int, fused: bool, num_tokens: int) -> None:
    build = stacked_step(fused, num_tokens)
    expected = run(build(num_layers))
    assert traced_bytes(build, num_layers) == pytest.approx(expected, rel=OUT_OF_PLACE)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_three_tiers_agree_on_a_llama(precision: str) -> None:
    transformers = pytest.importorskip("transformers")
    setting = StepSetting(micro_batch=2, sequence_length=192, precision=precision)

    def build(num_layers: int) -> TracedStep:
        config = transformers.LlamaConfig(
            hidden_size=SHAPE.hidden_size,
            intermediate_size=SHAPE.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=SHAPE.num_heads,
            num_key_value_heads=SHAPE.num_kv_heads,
            vocab_size=SHAPE.vocab_size,
            max_position_embeddings=SHAPE.max_sequence_length,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            dtype=precision,
        )
        with torch.random.fork_rng():
            model = transformers.AutoModelForCausalLM.from_config(config).train()
        ids = torch.zeros(2, 192, dtype=torch.int64)
        return TracedStep(model=model, loss=lambda: NextToken().loss_sum(model, ids.clone()))

    measured = run(build(SHAPE.num_layers))
    calculated = step_bytes(SHAPE, setting).peak
    traced = traced_bytes(build, SHAPE.num_layers)
    assert calculated == pytest.approx(measured, rel=0.003)  # as in test_activations
    assert measured <= traced <= measured * (1 + WRITTEN_OUT_MASK)


def test_a_trace_touches_no_memory_of_its_size() -> None:
    build = stacked_step(False, 10**7)  # 10 GB for the logits alone
    shallow, deep = (traced_bytes(build, n) for n in (2, 4))
    assert deep - shallow > 2 * 10**7 * 64 * 4 * 4


def test_a_tracker_counts_storages_once() -> None:
    with StorageTracker() as tracker:
        whole = torch.zeros(256)
        part = whole[:10].view(2, 5)
        assert tracker.now_bytes == 1024
        del whole
        assert tracker.now_bytes == 1024, "a view keeps it"
        del part
    assert tracker.now_bytes == 0
    assert tracker.peaks == {"forward": 1024}


def test_a_measured_peak_is_the_most_not_the_sum() -> None:
    def call() -> None:
        for _ in range(3):
            torch.zeros(1000).add_(1)

    assert 4000 <= measured_peak(call) < 4100  # torch makes a number or two on its way


@pytest.mark.parametrize("depths", [(2, 2), (0, 2)])
def test_two_depths_are_two(depths: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="two different depths from 1"):
        traced_bytes(stacked_step(False, 8), 4, depths)


def test_depths_may_come_in_any_order() -> None:
    build = stacked_step(False, 64)
    assert traced_bytes(build, 9, (4, 2)) == traced_bytes(build, 9, (2, 4))
