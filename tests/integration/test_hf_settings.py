"""Settings on their way from TrainingArguments, keywords and strings into an optimizer, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from adafrugal import AdaFRUGAL  # noqa: E402
from adafrugal.core.errors import ConfigError, NotSupportedError  # noqa: E402
from adafrugal.integrations.hf import (  # noqa: E402
    AdaFrugalCallback,
    AdaFrugalFactory,
    adafrugal_cls_and_kwargs,
    create_adafrugal_optimizer,
    parse_optim_args,
)
from adafrugal.optim.methods import METHODS  # noqa: E402

needs_factories = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 calls optimizer classes alone"
)


def model(kind: str = "llama"):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "bert":
            config = transformers.BertConfig(**shape, num_attention_heads=2, max_position_embeddings=40)
            return transformers.BertForSequenceClassification(config)
        config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config)


@pytest.fixture
def arguments(tmp_path: Path):
    def make(**changed):
        given = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "max_steps": 3,
        }
        given |= {"save_strategy": "no", "per_device_train_batch_size": 2, "dataloader_pin_memory": False}
        return transformers.TrainingArguments(**given | changed)

    return make


def trainer_with(network, args, **how):
    rows = torch.randint(0, 50, (12, 8), generator=torch.Generator().manual_seed(1)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    with torch.random.fork_rng():  # a Trainer seeds
        return transformers.Trainer(model=network, args=args, train_dataset=data, **how)


def decays(optimizer) -> dict[int, float]:
    return {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("method", METHODS.names())
def test_rate_betas_eps_and_decay_arrive_and_what_adamw_would_decay_decays(arguments, kind: str, method: str) -> None:
    adam = {} if method == "signsgd" else {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    args = arguments(learning_rate=3e-4, weight_decay=0.07, **adam)
    network = model(kind)
    adamw = trainer_with(network, args).create_optimizer()
    assert type(adamw) is torch.optim.AdamW
    optimizer = create_adafrugal_optimizer(network, args, method=method)
    assert type(optimizer) is METHODS.factory(method)
    for group in optimizer.param_groups:
        assert group["lr"] == 3e-4
        if adam:
            assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)
    assert decays(optimizer) == decays(adamw)
    assert sorted(set(decays(optimizer).values())) == [0.0, 0.07]


def test_what_is_said_last_counts(arguments) -> None:
    args = arguments(learning_rate=1e-3, optim_args="density=0.3,update_gap=50,lr=2e-3")
    (first, *_) = create_adafrugal_optimizer(model(), args).split_groups
    assert (first["density"], first["update_gap"], first["lr"]) == (0.3, 50, 2e-3)
    said = create_adafrugal_optimizer(model(), args, optim_args="update_gap=60,beta2=0.9", density=0.5, beta1=0.5)
    first = said.split_groups[0]
    assert (first["density"], first["update_gap"], first["lr"], first["betas"]) == (0.5, 60, 2e-3, (0.5, 0.9))
    plain = create_adafrugal_optimizer(model(), arguments(weight_decay=0.0))
    assert isinstance(plain, AdaFRUGAL)
    assert set(decays(plain).values()) == {0.0}
    tables = create_adafrugal_optimizer(model(), args, embedding_lr=0.1, rules={"*.q_proj.weight": "stateful"})
    assert {g["lr"] for g in tables.param_groups if g["label"] == "embeddings"} == {0.1}
    assert sum(row.why == "rule '*.q_proj.weight'" for row in tables.describe().rows) == 2


def test_a_string_holds_tuples_words_and_numbers() -> None:
    text = "betas=(0.9,0.99),compile=True,eps=1e-5,density_end=None,update_gap=50,rule=lion,rules={'*.a':'split'}"
    assert parse_optim_args(text) == {
        "betas": (0.9, 0.99), "compile": True, "eps": 1e-5, "density_end": None, "update_gap": 50, "rule": "lion",
        "rules": {"*.a": "split"},
    }  # fmt: skip
    assert parse_optim_args("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("density=0.3,update_gap=50,typo=1", r"received typo; allowed is a setting of adafrugal: lr, .*update_gap_max"),
        ("densty=0.3", r"Did you mean 'density'\?"),
        ("density", r"received density; allowed is name=value"),
        ("density=0.3,density=0.4", r"received density twice"),
        ("betas=(0.9,0.99", r"a bracket without its partner"),
        ("betas=0.9", r"allowed is two numbers in \[0, 1\)"),
        ("betas=(0.9,0.99),beta1=0.8", r"received betas and beta1; allowed is one of the two ways"),
        ("density=high", r"density='high'\): received high; allowed is a number"),
        ("density=true", r"received True; allowed is a number"),
        ("compile=1", r"received 1; allowed is true or false"),
        ("rule=3", r"received 3; allowed is a word"),
        ("density=1.5", r"received 1.5; allowed is a share in \[0, 1\]"),
    ],
)
def test_a_wrong_setting_is_an_error_that_says_what_is_right(arguments, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_adafrugal_optimizer(model(), arguments(optim_args=text))


def test_what_a_method_cannot_use_is_refused(arguments) -> None:
    with pytest.raises(ConfigError, match=r"betas=\(0.8, 0.999\); allowed is a setting of signsgd: lr, weight_decay"):
        create_adafrugal_optimizer(model(), arguments(adam_beta1=0.8), method="signsgd")
    with pytest.raises(ConfigError, match=r"a tuple of names"):
        create_adafrugal_optimizer(model(), arguments(), method="badam", always_active="score")
    with pytest.raises(ConfigError, match=r"Did you mean 'badam'\?"):
        create_adafrugal_optimizer(model(), arguments(), method="badm")
    uneven = model().model.layers
    uneven[1] = uneven[1].mlp  # no norm in here
    with pytest.raises(NotSupportedError, match=r"Set weight_decay=0"):
        create_adafrugal_optimizer(uneven, arguments(weight_decay=0.1), method="badam")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, r"received max_grad_norm=1.0.* Set max_grad_norm=0, or train without fused_backward"),
        ({"max_grad_norm": 0, "gradient_accumulation_steps": 2}, r"received accumulation_steps=2"),
        ({"max_grad_norm": 0, "auto_find_batch_size": True}, r"received auto_find_batch_size=True"),
        ({"max_grad_norm": 0, "fp16": True}, r"received a GradScaler.* Train in bfloat16"),
    ],
)
def test_a_fused_backward_refuses_what_it_cannot_honour(arguments, changed: dict, message: str) -> None:
    fp16 = changed.pop("fp16", False)
    args = arguments(**changed)
    args.fp16 = fp16  # a Trainer on a CPU has no float16 itself
    with pytest.raises(NotSupportedError, match=message):
        adafrugal_cls_and_kwargs(args, fused_backward=True)


def test_the_callback_refuses_a_foreign_optimizer_and_an_attached_one_that_is_clipped(arguments) -> None:
    with pytest.raises(ConfigError, match=r"an optimizer of type AdamW; allowed is one of adafrugal, frugal"):
        _train(trainer_with(model(), arguments(), callbacks=[AdaFrugalCallback()]))
    network = model()
    optimizer = AdaFRUGAL(network)
    optimizer.attach(network)
    with pytest.raises(NotSupportedError, match=r"received max_grad_norm=1.0"):
        _train(trainer_with(network, arguments(), optimizers=(optimizer, None), callbacks=[AdaFrugalCallback()]))


def _train(trainer) -> None:
    with torch.random.fork_rng():
        trainer.train()


def _recipe(name: str, network, args) -> dict:
    return {
        "factory": lambda: {"optimizer_cls_and_kwargs": adafrugal_cls_and_kwargs(args, density=0.5)},
        "plain_data": lambda: {"optimizer_cls_and_kwargs": (AdaFrugalFactory, {"lr": 1e-3, "density": 0.5})},
        "class": lambda: {"optimizer_cls_and_kwargs": (AdaFRUGAL, {"lr": 1e-3, "density": 0.5})},
        "ready": lambda: {"optimizers": (create_adafrugal_optimizer(network, args, density=0.5), None)},
    }[name]()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("factory", marks=needs_factories),
        pytest.param("plain_data", marks=needs_factories),
        "class",
        "ready",
    ],
)
def test_every_recipe_trains(arguments, name: str) -> None:
    args, network = arguments(weight_decay=0.1, learning_rate=1e-3), model()
    trainer = trainer_with(network, args, **_recipe(name, network, args), callbacks=[AdaFrugalCallback()])
    _train(trainer)
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is AdaFRUGAL
    assert optimizer.split_groups[0]["step"] == 3
    assert optimizer.split_groups[0]["progress"] == 2 / 3
    named = all(group["named"] for group in optimizer.param_groups)
    assert named is (name != "class"), "a class gets groups without names"


@pytest.mark.parametrize("method", METHODS.names())
def test_every_method_trains(arguments, method: str) -> None:
    args, network = arguments(learning_rate=1e-2, weight_decay=0.1), model()
    ready = create_adafrugal_optimizer(network, args, method=method)
    before = [param.detach().clone() for param in network.parameters()]
    trainer = trainer_with(network, args, optimizers=(ready, None), callbacks=[AdaFrugalCallback()])
    _train(trainer)
    moved = [not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)]
    if method == "badam":
        names = [n for (n, _), there in zip(network.named_parameters(), moved, strict=True) if there]
        assert {".".join(n.split(".")[:3]) for n in names} in ({"model.layers.0"}, {"model.layers.1"}), "one layer"
        assert len(names) == 9, "all of it: what decays and what does not"
    else:
        assert all(moved)


@needs_factories
def test_settings_stay_plain_data(arguments) -> None:
    settings = {"density": 0.5, "betas": (0.8, 0.95), "state_dtype": "bfloat16", "update_gap_max": None}
    factory, resolved = adafrugal_cls_and_kwargs(arguments(), **settings)
    again = json.loads(json.dumps(resolved))
    first, second = factory()(model(), **resolved), factory()(model(), **again)
    assert [dict(g, params=0) for g in first.param_groups] == [dict(g, params=0) for g in second.param_groups]
    assert first.split_groups[0]["update_gap_max"] is None
    assert first.split_groups[0]["state_dtype"] == "bfloat16"


def test_as_a_class_the_factory_says_what_to_do(arguments) -> None:
    with pytest.raises(NotSupportedError, match=r"transformers 5\). Use Trainer\(optimizers="):
        AdaFrugalFactory([{"params": []}], lr=1e-3)
