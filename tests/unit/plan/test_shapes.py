"""Parameter counts against models that transformers builds on the meta device, and the presets' published figures."""

import dataclasses

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from adafrugal.core.errors import ConfigError
from adafrugal.laws.flops import MatrixShapes
from adafrugal.plan.shapes import PRESETS, PUBLISHED_TRAININGS, ModelShape

PUBLISHED_MILLIONS = {
    "llama-60m": "58.1",
    "llama-130m": "134.1",
    "llama-350m": "368.0",
    "llama-1b": "1339",
    "llama-7b": "6738",
}


def settings_of(shape: ModelShape) -> dict[str, object]:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_sequence_length,
        "tie_word_embeddings": shape.tied_embeddings,
    }


def counts(model: torch.nn.Module) -> tuple[int, int]:
    """All parameters, and the matrices inside the blocks, of a model whose blocks are numbered."""
    named = dict(model.named_parameters())
    inside = [p for name, p in named.items() if any(part.isdigit() for part in name.split("."))]
    return sum(p.numel() for p in named.values()), sum(p.numel() for p in inside if p.dim() == 2)


def llama(shape: ModelShape, **settings: object) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**settings_of(shape), head_dim=shape.head_dim, **settings))


@pytest.mark.parametrize("name", PRESETS.names())
def test_a_preset_counts_what_transformers_builds(name: str) -> None:
    shape = PRESETS.create(name)
    model = llama(shape)
    assert counts(model) == (shape.num_parameters, shape.num_split_parameters)
    assert shape.num_stateful_parameters == shape.num_parameters - shape.num_split_parameters
    assert model.model.embed_tokens.weight.numel() == shape.num_embedding_parameters
    assert model.lm_head.weight.numel() == shape.num_head_parameters


@pytest.mark.parametrize(("name", "millions"), PUBLISHED_MILLIONS.items())
def test_a_preset_has_the_published_number_of_parameters(name: str, millions: str) -> None:
    num_decimals = len(millions.partition(".")[2])
    assert f"{PRESETS.create(name).num_parameters / 1e6:.{num_decimals}f}" == millions


def test_tiny_is_tiny() -> None:
    shape = PRESETS.create("tiny")
    assert (shape.vocab_size, shape.max_sequence_length, shape.tied_embeddings) == (257, 1024, False)
    assert shape.num_parameters == 869_760


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_other_llamas(tied: bool, biased: bool) -> None:
    shape = dataclasses.replace(
        PRESETS.create("tiny"),
        num_kv_heads=2,
        head_dim=48,
        tied_embeddings=tied,
        qkv_bias=biased,
        attention_output_bias=biased,
        mlp_bias=biased,
    )
    model = llama(shape, attention_bias=biased, mlp_bias=biased)
    assert counts(model) == (shape.num_parameters, shape.num_split_parameters)


def test_qwen2_has_biases_on_query_key_value_alone() -> None:
    shape = dataclasses.replace(PRESETS.create("tiny"), qkv_bias=True, num_kv_heads=1)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**settings_of(shape)))
    assert counts(model) == (shape.num_parameters, shape.num_split_parameters)


def test_gpt2_fits_the_same_value() -> None:
    shape = ModelShape(
        hidden_size=64,
        intermediate_size=256,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=100,
        max_sequence_length=32,
        tied_embeddings=True,
        gated_mlp=False,
        norm_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        num_position_embeddings=32,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_inner=256, n_layer=3, n_head=4, vocab_size=100, n_positions=32))
    assert counts(model) == (shape.num_parameters, shape.num_split_parameters)


def test_what_no_field_counts_is_stateful() -> None:
    tiny = PRESETS.create("tiny")
    more = dataclasses.replace(tiny, num_other_parameters=10)
    assert more.num_stateful_parameters == tiny.num_stateful_parameters + 10
    assert more.num_split_parameters == tiny.num_split_parameters


def test_the_sizes_for_flops() -> None:
    shape = dataclasses.replace(PRESETS.create("tiny"), num_kv_heads=2, head_dim=48)
    assert shape.matrices == MatrixShapes(
        hidden_size=128, intermediate_size=352, num_layers=4, query_size=192, kv_size=96, vocab_size=257
    )


def test_published_trainings_stand_beside_the_five_sizes() -> None:
    assert set(PUBLISHED_TRAININGS.names()) == set(PUBLISHED_MILLIONS)
    steps = {name: PUBLISHED_TRAININGS.create(name) for name in PUBLISHED_TRAININGS.names()}
    assert [(run.cycle_steps // 1000, run.total_steps // 1000) for run in steps.values()] == [
        (10, 200),
        (20, 200),
        (60, 300),
        (100, 500),
        (150, 150),
    ]
    small = steps["llama-130m"]
    assert (small.batch_size, small.sequence_length, small.lr, small.weight_decay) == (512, 256, 1e-3, 0.0)
    assert (small.density, small.update_gap, small.warmup_fraction, small.floor_fraction) == (0.25, 200, 0.1, 0.1)
    assert (steps["llama-7b"].density, steps["llama-7b"].update_gap, steps["llama-7b"].lr) == (0.0, 500, 5e-4)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'llama-130m'"):
        PRESETS.create("llama130m")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 0}, r"ModelShape\(num_layers=0\): received 0; allowed is a whole number from 1"),
        ({"num_block_norms": -1}, r"ModelShape\(num_block_norms=-1\): received -1; allowed is a whole number from 0"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3\): received 3; allowed is a divisor of 4"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(PRESETS.create("tiny"), **change)
