"""Models of other families split as `describe` says, train, and hold the bytes that the split promises."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adafrugal import AdaFRUGAL, param_groups
from problems import same_parameters

transformers = pytest.importorskip("transformers")
STEPS = 40


def tokens_of(step: int, batch: int = 4, length: int = 16) -> Tensor:
    tokens = torch.randint(0, 60, (batch, length), generator=torch.Generator().manual_seed(step))
    tokens[:, 1::2] = (tokens[:, ::2] * 3 + 1) % 60  # something to learn
    return tokens


def causal(model: nn.Module, step: int) -> Tensor:
    tokens = tokens_of(step)
    return model(input_ids=tokens, labels=tokens).loss


def translating(model: nn.Module, step: int) -> Tensor:
    source = tokens_of(step)
    return model(input_ids=source, labels=(source + 1) % 60).loss


def classifying(model: nn.Module, step: int) -> Tensor:
    """Which quarter of an image is bright."""
    generator = torch.Generator().manual_seed(step)
    images, labels = torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8) % 4
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 8 * (label // 2) :, 8 * (label % 2) :][:, :8, :8] += 1.0
    return nn.functional.cross_entropy(model(images), labels)


class SmallConvolutional(nn.Module):
    """A stem, blocks of convolutions, one of them grouped by depth, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.GroupNorm(4, 32),
                "depth": nn.Conv2d(32, 32, 3, padding=1, groups=32),
                "full": nn.Conv2d(32, 32, 3, padding=1),
            })
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(32, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + torch.relu(block["full"](block["depth"](block["norm"](x))))
        return self.head(x.amax((2, 3)))


def _llama(tied: bool = False):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=tied, **sizes)
    return transformers.LlamaForCausalLM(config)


def _mixtral():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=64, **sizes, **experts))


def _gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def _t5():
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2, "d_kv": 16}
    special = {"vocab_size": 64, "decoder_start_token_id": 0, "pad_token_id": 62}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **special))


def _bart():
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32}
    special = {"vocab_size": 64, "pad_token_id": 62, "bos_token_id": 61, "eos_token_id": 60,
               "decoder_start_token_id": 60, "forced_eos_token_id": None}  # fmt: skip
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**layers, **sizes, **special))


# What builds it, what it learns, and how many tensors split, with the reasons that `describe` gives.
FAMILIES: dict[str, tuple[Callable, Callable, dict[str, int]]] = {
    "llama": (_llama, causal, {"Linear in a block": 14}),
    "tied": (lambda: _llama(tied=True), causal, {"Linear in a block": 14}),
    "mixtral": (_mixtral, causal, {"Linear in a block": 8, "stack of 4 expert matrices": 4}),
    "gpt2": (_gpt2, causal, {"Conv1D in a block": 8}),
    "t5": (_t5, translating, {"Linear in a block": 32}),
    "bart": (_bart, translating, {"Linear in a block": 32}),
    "convolutional": (SmallConvolutional, classifying, {"Conv2d flattened to (out, rest)": 2}),
}


def build(family: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FAMILIES[family][0]().eval()  # eval: dropout would draw from the global stream


def make(model: nn.Module, **settings) -> AdaFRUGAL:
    return AdaFRUGAL(param_groups(model), lr=1e-2, total_steps=STEPS, update_gap=6, **settings)


def train(family: str, model: nn.Module, optimizer: AdaFRUGAL, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = FAMILIES[family][1](model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_it_splits_as_described_trains_and_resumes(family: str) -> None:
    model = build(family)
    optimizer = make(model)
    losses = train(family, model, optimizer, range(STEPS // 2))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    losses += train(family, model, optimizer, range(STEPS // 2, STEPS))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])

    rows = optimizer.describe().rows
    reasons: dict[str, int] = {}
    for row in rows:
        if row.role == "split":
            reasons[row.why] = reasons.get(row.why, 0) + 1
            numel = math.prod(row.shape)
            lines = row.shape[-1] if len(row.shape) < 4 else math.prod(row.shape[1:])
            # density 0.05 at the end, rounded to whole columns, at least one
            assert row.stateful_elements == numel // lines * max(1, round(0.05 * lines)), row.name
        else:
            assert row.stateful_elements == math.prod(row.shape), row.name
    assert reasons == FAMILIES[family][2]
    assert len(rows) == len(list(model.parameters())), "a tied weight is listed once"
    memory = optimizer.memory()
    assert memory["state_bytes"] == memory["planned_state_bytes"] < memory["adamw_state_bytes"]

    resumed = build(family)
    resumed.load_state_dict(weights)
    second = make(resumed)
    second.load_state_dict(saved)
    train(family, resumed, second, range(STEPS // 2, STEPS))
    assert same_parameters(model, resumed)


@pytest.mark.parametrize("family", ["tied", "mixtral", "gpt2", "t5"])
def test_fused_backward_equals_the_plain_one(family: str) -> None:
    """A tied weight is used twice and gets one gradient; an expert without tokens gets zeros in its stack."""
    models = [build(family) for _ in range(2)]
    optimizers = [make(model) for model in models]
    optimizers[1].attach(models[1])
    losses = [train(family, m, o, range(15)) for m, o in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1]
    assert same_parameters(*models)


def test_a_tied_weight_is_updated_once_and_stays_tied() -> None:
    model = build("tied")
    optimizer = make(model)
    train("tied", model, optimizer, range(3))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    (row,) = [row for row in optimizer.describe().rows if row.shape == (64, 32)]
    assert (row.role, row.why) == ("stateful", "embedding (tied)")
    assert optimizer.state[model.lm_head.weight]["step"] == 3
