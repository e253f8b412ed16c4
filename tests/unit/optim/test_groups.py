"""From real models to groups: every parameter once, by type and shape first, with a reason."""

import pytest
import torch
from torch import nn

from adafrugal import FRUGAL, param_groups
from adafrugal.core.errors import ConfigError
from adafrugal.optim.groups import canonical_name
from problems import tiny_model

transformers = pytest.importorskip("transformers")


def build(kind: str) -> nn.Module:
    """A small model of each family, from its configuration, on the meta device."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 120}
    t5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "d_kv": 32, "vocab_size": 120}
    bart = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 120}  # fmt: skip
    vit = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
           "image_size": 32, "patch_size": 8}  # fmt: skip
    t = transformers
    builders = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**small, intermediate_size=96)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=120, n_positions=64)),
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**small, intermediate_size=96)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5)),
        "bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**bart)),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**vit)),
        "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=120)),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**small, intermediate_size=96, num_local_experts=4, num_key_value_heads=2)
        ),
        "encoder": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 2, 96, batch_first=True), 2, enable_nested_tensor=False
        ),
    }  # fmt: skip
    with torch.device("meta"):
        return builders[kind]()


EXPECTED = {
    # what splits, and how many tensors of it; what is an embedding or a head
    "llama": ({"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 2, "gate_proj": 2, "up_proj": 2, "down_proj": 2},
              {"model.embed_tokens.weight", "lm_head.weight"}),
    "gpt2": ({"c_attn": 2, "c_proj": 4, "c_fc": 2}, {"transformer.wte.weight", "transformer.wpe.weight"}),
    "bert": ({"query": 2, "key": 2, "value": 2, "dense": 6},
             {"bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight",
              "bert.embeddings.token_type_embeddings.weight", "classifier.weight"}),
    "t5": ({"q": 6, "k": 6, "v": 6, "o": 6, "wi": 4, "wo": 4},
           {"shared.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"}),
    "bart": ({"q_proj": 6, "k_proj": 6, "v_proj": 6, "out_proj": 6, "fc1": 4, "fc2": 4},
             {"model.shared.weight", "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}),
    "mamba": ({"in_proj": 2, "x_proj": 2, "out_proj": 2}, {"backbone.embeddings.weight"}),
    "encoder": ({"self_attn": 2, "out_proj": 2, "linear1": 2, "linear2": 2}, set()),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPECTED)
def test_known_architectures_need_no_names(kind) -> None:
    groups = param_groups(build(kind))
    split = [n for g in groups if g["role"] == "split" for n in g["param_names"]]
    counts: dict[str, int] = {}
    for name in split:
        key = name.split(".")[-2]
        counts[key] = counts.get(key, 0) + 1
    wanted, embeddings = EXPECTED[kind]
    assert counts == wanted
    assert {n for g in groups if g["label"] == "embeddings" for n in g["param_names"]} == embeddings


@pytest.mark.parametrize("kind", [*EXPECTED, "vit", "mixtral"])
def test_every_trainable_parameter_is_claimed_exactly_once_with_a_reason(kind) -> None:
    model = build(kind)
    groups = param_groups(model)
    claimed = [p for g in groups for p in g["params"]]
    assert len(claimed) == len({id(p) for p in claimed}) == len(list(model.parameters()))
    assert sorted(i for g in groups for i in g["param_index"]) == list(range(len(claimed)))
    for group in groups:
        assert all(group["reasons"])
        lengths = {len(group[k]) for k in ("params", "param_names", "stacked", "reasons", "param_index")}
        assert len(lengths) == 1
    order = list(model.parameters())
    assert all(order[i] is p for g in groups for i, p in zip(g["param_index"], g["params"], strict=True))


def test_experts_split_as_stacks_and_routers_stay_stateful() -> None:
    groups = param_groups(build("mixtral"))
    by_name = {
        n: (g["role"], s, r)
        for g in groups
        for n, s, r in zip(g["param_names"], g["stacked"], g["reasons"], strict=True)
    }
    stacks = {n: v for n, v in by_name.items() if v[1]}
    assert len(stacks) == 4
    assert all("experts" in n and v == ("split", True, "stack of 4 expert matrices") for n, v in stacks.items())
    routers = {n: v for n, v in by_name.items() if n.endswith(("gate.weight", "router.weight"))}
    assert len(routers) == 2
    assert all(v[0] == "stateful" for v in routers.values())


def test_a_vision_model_keeps_what_lies_outside_its_blocks() -> None:
    groups = param_groups(build("vit"))
    roles = {n: g["role"] for g in groups for n in g["param_names"]}
    assert all(role == "stateful" for n, role in roles.items() if "embeddings" in n or n.startswith("classifier"))
    assert sum(role == "split" for role in roles.values()) == 2 * 6


def test_a_diffusion_transformer_block_with_adaptive_norm_and_convolutions() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64, elementwise_affine=False)
            self.qkv = nn.Linear(64, 192)
            self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(64, 384))
            self.gate = nn.Parameter(torch.zeros(64))

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(4, 64, 2, 2)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.mix = nn.Sequential(nn.Conv2d(64, 64, 3), nn.GroupNorm(8, 64))

    with torch.device("meta"):
        groups = param_groups(Denoiser())
    why = {n: (g["role"], r) for g in groups for n, r in zip(g["param_names"], g["reasons"], strict=True)}
    assert why["blocks.0.modulation.1.weight"] == ("split", "Linear in a block")
    assert why["mix.0.weight"] == ("split", "Conv2d flattened to (out, rest)")
    assert why["patch.weight"] == ("stateful", "Conv2d outside the blocks")
    assert why["blocks.0.gate"] == ("stateful", "1-D parameter of Block")


def test_a_model_without_blocks_splits_its_layers_and_keeps_its_head() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 20)

    with torch.device("meta"):
        groups = param_groups(Flat())
    assert [n for g in groups if g["role"] == "split" for n in g["param_names"]] == ["fc1.weight", "fc2.weight"]


def test_adapters_stay_stateful_and_a_model_of_adapters_is_no_error() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict({"lora_A": nn.Linear(64, 32), "lora_B": nn.Linear(32, 64)})])

    with torch.device("meta"):
        groups = param_groups(Adapted())
    assert {g["role"] for g in groups} == {"stateful"}
    assert any(r == "low-rank adapter" for g in groups for r in g["reasons"])


def test_user_rules_come_first_and_must_match() -> None:
    model = tiny_model()
    groups = param_groups(
        model, rules={"blocks.0.*.weight": "stateful", "head.weight": "split", "*.down.weight": "stateless"}
    )
    roles = {n: g["role"] for g in groups for n in g["param_names"]}
    assert roles["blocks.0.up.weight"] == roles["blocks.0.down.weight"] == "stateful", "the first rule wins"
    assert roles["blocks.1.down.weight"] == "stateless"
    assert roles["head.weight"] == "split"
    assert "rule 'head.weight'" in {r for g in groups for r in g["reasons"]}
    with pytest.raises(
        ConfigError, match=r"blocks\.\*\.upp\.weight.*a pattern that matches at least one.*Did you mean"
    ):
        param_groups(model, rules={"blocks.*.upp.weight": "split"})
    with pytest.raises(ConfigError, match=r"received sometimes; allowed is one of split, stateful, stateless"):
        param_groups(model, rules={"head.weight": "sometimes"})


def test_rates_and_decay_of_their_own() -> None:
    model = tiny_model()
    groups = param_groups(model, embedding_lr=4e-3, weight_decay=0.1, vector_weight_decay=0.0)
    opt = FRUGAL(groups, 1e-3)
    found = {g["label"]: (g["lr"], g["weight_decay"]) for g in opt.param_groups}
    assert found == {"matrices": (1e-3, 0.1), "embeddings": (4e-3, 0.1), "vectors": (1e-3, 0.0)}


def test_a_model_in_which_nothing_splits_is_an_error_that_lists_its_modules() -> None:
    with torch.device("meta"):
        norms = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.Embedding(10, 8))
    with pytest.raises(ConfigError, match=r"received 2 LayerNorm, 1 Embedding; .*rules="):
        param_groups(norms)
    model = tiny_model()
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no module with a trainable parameter"):
        param_groups(model)


@pytest.mark.parametrize("wrapped", [
    "module.layers.0.w", "_orig_mod.module.layers.0.w", "module._orig_mod.layers.0.w",
    "layers._checkpoint_wrapped_module.0.w", "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w",
    "_orig_mod._fsdp_wrapped_module.layers._checkpoint_wrapped_module.0.w",
])  # fmt: skip
def test_wrappers_do_not_change_a_name(wrapped) -> None:
    assert canonical_name(wrapped) == "layers.0.w"
    assert canonical_name("my.module.w") == "my.module.w", "a module of that name is no wrapper"


def test_compiled_models_have_canonical_names() -> None:
    compiled = torch.compile(tiny_model())
    assert "blocks.0.up.weight" in [n for g in param_groups(compiled) for n in g["param_names"]]


def test_describe_is_a_table_of_everything() -> None:
    opt = FRUGAL(tiny_model())
    text = str(opt.describe())
    lines = text.splitlines()
    assert lines[0].split() == ["parameter", "shape", "role", "subspace", "stateful", "why"]
    assert len(lines) == 1 + len(list(tiny_model().parameters()))
    row = next(line for line in lines if line.startswith("blocks.0.up.weight"))
    assert row.split(maxsplit=5) == ["blocks.0.up.weight", "64x32", "split", "columns", "0.0%", "Linear in a block"]


def test_names_that_are_almost_settings_are_errors() -> None:
    weight = nn.Parameter(torch.zeros(32, 32))
    with pytest.raises(ConfigError, match=r"a group that holds 'densty'.*Did you mean 'density'"):
        FRUGAL([{"params": [weight], "densty": 0.1}])
    FRUGAL([{"params": [weight], "initial_lr": 0.1, "my_note": "kept"}])
