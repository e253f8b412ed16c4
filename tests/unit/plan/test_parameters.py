"""A model without storage has the parameters of the real one: names, shapes, order, groups."""

import dataclasses

import pytest
import torch

from adafrugal import AdaFRUGAL, param_groups
from adafrugal.plan.parameters import meta_parameters
from adafrugal.plan.shapes import PRESETS, ModelShape
from adafrugal.train.config import OptimConfig
from adafrugal.train.optimizers import build_optimizer, method_names

transformers = pytest.importorskip("transformers")

TINY = PRESETS.create("tiny")
GROUPED = dataclasses.replace(TINY, num_kv_heads=2, tied_embeddings=True)


def real(shape: ModelShape) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_sequence_length,
        tie_word_embeddings=shape.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("shape", [TINY, GROUPED], ids=["plain", "grouped and tied"])
def test_names_shapes_and_groups_are_those_of_the_real_model(shape: ModelShape) -> None:
    model, ours = real(shape), meta_parameters(shape)
    theirs = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert {name: tuple(param.shape) for name, param in ours.named_parameters()} == theirs
    for one, other in zip(param_groups(ours), param_groups(model), strict=True):
        assert (one["label"], one["role"]) == (other["label"], other["role"])
        assert sorted(one["param_names"]) == sorted(other["param_names"])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gated_mlp": False, "norm_bias": True, "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
        {"tied_embeddings": True, "num_position_embeddings": 64, "num_other_parameters": 77, "num_outer_norms": 2},
        {"num_block_norms": 4},
    ],
)
def test_every_parameter_is_there_once(change: dict) -> None:
    shape = dataclasses.replace(TINY, **change)
    model = meta_parameters(shape, torch.bfloat16)
    assert sum(param.numel() for param in model.parameters()) == shape.num_parameters
    assert all(param.is_meta and param.dtype == torch.bfloat16 for param in model.parameters())
    groups = param_groups(model)
    split = sum(param.numel() for group in groups if group["role"] == "split" for param in group["params"])
    assert split == shape.num_split_parameters


@pytest.mark.parametrize("name", method_names())
def test_every_optimizer_of_a_run_can_be_built_over_it(name: str) -> None:
    optimizer = build_optimizer(OptimConfig(name=name), meta_parameters(TINY), seed=0)
    held = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    assert held == TINY.num_parameters


def test_the_promise_is_the_real_optimizer_s() -> None:
    one = AdaFRUGAL(param_groups(meta_parameters(GROUPED)), total_steps=10).memory()
    assert one == AdaFRUGAL(param_groups(real(GROUPED)), total_steps=10).memory()
