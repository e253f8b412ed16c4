"""Trains a small model on one process or under FSDP2, saves it in the middle, and goes on from what was saved.

python sharded_worker.py plain|sharded|resume|plain_resume FOLDER, each under torchrun where it shards.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, param_groups
from adafrugal.core.errors import NotSupportedError

torch.set_num_threads(1)
STEPS, BATCH, VOCAB, HIDDEN = 50, 8, 37, 32
SAVED_AT = (1, 25, 40)  # at the first step, in mid-gap, after shrinks
SUBSPACES = ("columns", "columns_scattered", "rows_striped", "blocks")


class Block(nn.Module):
    """A residual layer whose first matrix has an uneven number of rows for two ranks."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, inner), nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, four layers, head."""

    def __init__(self, subspace: str) -> None:
        super().__init__()
        inner = 64 if subspace == "rows_striped" else 63
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(inner) for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(subspace: str, seed: int, sharded: bool, layout: str = "compact", ignored: bool = False):
    """The model, from a seed, and its optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Model(subspace).double()  # a sign flips where a gradient is rounding noise: in float64, nowhere
    left_out = [p for layer in model.layers for p in layer.norm.parameters()] if ignored else []
    if sharded:
        for layer in model.layers:
            fully_shard(layer, ignored_params=set(left_out))
        fully_shard(model, ignored_params=set(left_out))
    optimizer = AdaFRUGAL(
        param_groups(model), 1e-2, total_steps=STEPS, density=0.5, density_end=0.25, update_gap=20, subspace=subspace,
        weight_decay=0.01, state_layout=layout,
    )  # fmt: skip
    return model, optimizer, left_out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, after, left_out=()) -> None:
    """From a step to the end, on this rank's share of a batch that the step number draws."""
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (BATCH, 9), generator=generator)[rank * BATCH // world :][: BATCH // world]
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), (tokens[:, 1:] * 3 % VOCAB).flatten()).backward()
        for param in left_out:
            distributed.all_reduce(param.grad)
            param.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        after(step + 1)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, whole, on every rank."""
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, alone: bool) -> None:
    """Through torch.distributed.checkpoint."""
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder, no_dist=alone)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, alone: bool) -> None:
    """The other way; tensors are filled in place, so both sides need the same shapes."""
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder, no_dist=alone)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def plain(folder: Path) -> None:
    """One process, uninterrupted: what all others must come to."""
    for subspace in SUBSPACES:
        model, optimizer, _ = build(subspace, 0, sharded=False)
        bytes_at: dict[int, int] = {}
        train(model, optimizer, 0, lambda k, o=optimizer, b=bytes_at: b.update({k: o.memory()["state_bytes"]}))
        assert optimizer.param_groups[0]["refreshed_at"] == 40
        torch.save({"weights": weights(model), "bytes": bytes_at}, folder / f"{subspace}.pt")


def sharded(folder: Path) -> None:
    """What is refused; then two ranks with different global seeds, which save on the way."""
    refuse(folder)
    rank = distributed.get_rank()
    torch.manual_seed(1000 + rank)
    for subspace in SUBSPACES:
        model, optimizer, _ = build(subspace, 0, sharded=True)
        bytes_at: dict[int, int] = {}

        def after(k: int, model=model, optimizer=optimizer, bytes_at=bytes_at, subspace=subspace) -> None:
            memory = optimizer.memory()
            assert memory["state_bytes"] == memory["planned_state_bytes"]
            bytes_at[k] = memory["state_bytes"]
            if k in SAVED_AT:
                save(model, optimizer, folder / f"{subspace}-{k}", alone=False)
                with_accelerate(model, optimizer, folder / f"{subspace}-{k}-accelerate", "save")

        train(model, optimizer, 0, after)
        found = weights(model)
        torch.save({"weights": found, "bytes": bytes_at}, folder / f"{subspace}-rank{rank}.pt")
    model, optimizer, left_out = build("columns", 0, sharded=True, ignored=True)
    kinds = {type(p).__name__ for group in optimizer.param_groups for p in group["params"]}
    assert kinds == {"Parameter", "DTensor"}, kinds
    train(model, optimizer, 0, lambda k: None, left_out)
    torch.save({"weights": weights(model)}, folder / f"ignored-rank{rank}.pt")


def with_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, what: str) -> None:
    """accelerate's own saving and loading of an FSDP2 optimizer, in both of its forms."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, load_fsdp_optimizer, save_fsdp_optimizer

    state = PartialState(cpu=True)
    for form in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form, auto_wrap_policy="no_wrap")
        call = save_fsdp_optimizer if what == "save" else load_fsdp_optimizer
        call(plugin, state, optimizer, model, folder / form)


def resume(folder: Path) -> None:
    """New processes, another start, go on from each save; then accelerate's file over the same weights."""
    rank = distributed.get_rank()
    distance: dict[str, float] = {}
    for subspace in SUBSPACES:
        expected = torch.load(folder / f"{subspace}-rank{rank}.pt", weights_only=True)["weights"]
        for k in SAVED_AT:
            for how in ("dcp", "accelerate"):
                model, optimizer, _ = build(subspace, 1, sharded=True)
                load(model, optimizer, folder / f"{subspace}-{k}", alone=False)
                if how == "accelerate":
                    optimizer.state.clear()
                    with_accelerate(model, optimizer, folder / f"{subspace}-{k}-accelerate", "load")
                train(model, optimizer, k, lambda _: None)
                found = weights(model)
                distance[f"{subspace} {k} {how}"] = max(float((found[n] - w).abs().max()) for n, w in expected.items())
    (folder / f"resume-rank{rank}.json").write_text(json.dumps(distance))


def plain_resume(folder: Path) -> None:
    """From two ranks to one process, by names."""
    distance: dict[str, float] = {}
    for subspace in SUBSPACES:
        expected = torch.load(folder / f"{subspace}.pt", weights_only=True)["weights"]
        for k in SAVED_AT:
            model, optimizer, _ = build(subspace, 1, sharded=False, layout="padded")
            load(model, optimizer, folder / f"{subspace}-{k}", alone=True)
            train(model, optimizer, k, lambda _: None)
            found = weights(model)
            distance[f"{subspace} {k}"] = max(float((found[n] - w).abs().max()) for n, w in expected.items())
    (folder / "plain_resume.json").write_text(json.dumps(distance))


def refuse(folder: Path) -> None:
    """What does not stay within a shard says so, when it is built."""
    said: dict[str, str] = {}
    makers = {
        "rows": lambda g: FRUGAL(g, subspace="rows"),
        "random": lambda g: FRUGAL(g, subspace="random"),
        "svd": lambda g: GaLore(g),
        "badam": lambda g: BAdam(g),
        "uneven stripes": lambda g: FRUGAL(g, subspace="rows_striped"),
        "to AdamW": lambda g: FRUGAL(g).adamw_state_dict(),
        "from AdamW": lambda g: FRUGAL(g).load_adamw_state_dict({"state": {}, "param_groups": []}),
    }
    for name, make in makers.items():
        model = Model("columns")
        fully_shard(model)
        try:
            make(model if name == "badam" else param_groups(model))
        except NotSupportedError as error:
            said[name] = str(error)
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, given in (("FSDP1", {}), ("FSDP1 use_orig_params", {"use_orig_params": True})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = FullyShardedDataParallel(Model("columns"), device_id=torch.device("cpu"), **given)
        try:
            AdaFRUGAL(wrapped.parameters(), total_steps=10)
        except NotSupportedError as error:
            said[name] = str(error)
    (folder / f"refused-rank{distributed.get_rank()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    part, where = sys.argv[1], Path(sys.argv[2])
    if part not in ("plain", "plain_resume"):
        distributed.init_process_group("gloo")
    {"plain": plain, "sharded": sharded, "resume": resume, "plain_resume": plain_resume}[part](where)
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
