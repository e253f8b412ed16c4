"""Trains a small model under DistributedDataParallel, by torchrun or by accelerate, on ranks that disagree by nature.

python replicas_worker.py torchrun|accelerate FOLDER, under the launcher of that name.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed, nn

from adafrugal import FRUGAL, AdaFRUGAL, param_groups
from adafrugal.core.errors import NotSupportedError

STEPS, HIDDEN = 50, 32
SUBSPACES = ("columns", "random", "svd", "blocks")


class Model(nn.Module):
    """Four residual layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, 37, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def build(subspace: str, dtype: torch.dtype) -> tuple[nn.Module, AdaFRUGAL]:
    """Weights from this rank's global stream: DDP broadcasts rank 0's."""
    model = Model().to(dtype)
    optimizer = AdaFRUGAL(
        param_groups(model), 1e-2, total_steps=STEPS, density=0.5, density_end=0.25, update_gap=8, update_gap_max=32,
        subspace=subspace,
    )  # fmt: skip
    return model, optimizer


def loss_seen_by(rank: int, step: int) -> float:
    """Alone, rank 0 would see a plateau at once, and rank 1 progress until step 30."""
    return 3.0 if rank == 0 else 3.0 - 0.1 * min(step, 30)


def train(model: nn.Module, optimizer: AdaFRUGAL, step_of, backward) -> list[int]:
    """Fifty steps on this rank's own batches; each rank reports a loss of its own. Returns the steps of refreshes."""
    rank = distributed.get_rank()
    refreshes: list[int] = []
    for step in range(STEPS):
        tokens = torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(2 * step + rank))
        logits = model(tokens[:, :-1]).float()
        backward(nn.functional.cross_entropy(logits.flatten(0, 1), (tokens[:, 1:] * 3 % 37).flatten()))
        step_of()
        refreshed = next(group["refreshed_at"] for group in optimizer.split_groups)
        if not refreshes or refreshes[-1] != refreshed:
            refreshes.append(refreshed)
        if step % 5 == 4:
            optimizer.observe(loss_seen_by(rank, step))
    return refreshes


def report(folder: Path, name: str, model: nn.Module, refreshes: list[int], optimizer: AdaFRUGAL) -> None:
    """What this rank came to."""
    clean = {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}
    gap = optimizer.split_groups[0]["update_gap"]
    torch.save(
        {"weights": clean, "refreshes": refreshes, "gap": gap}, folder / f"{name}-rank{distributed.get_rank()}.pt"
    )


def by_torchrun(folder: Path) -> None:
    """What is refused; every subspace in float32, and bfloat16 weights with stochastic rounding."""
    fused(folder)
    torch.manual_seed(1000 + distributed.get_rank())
    for subspace, dtype in [*((s, torch.float32) for s in SUBSPACES), ("columns", torch.bfloat16)]:
        model, optimizer = build(subspace, dtype)
        replica = nn.parallel.DistributedDataParallel(model)

        def step_of(optimizer: AdaFRUGAL = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        refreshes = train(replica, optimizer, step_of, lambda loss: loss.backward())
        report(folder, f"{subspace}-{str(dtype).removeprefix('torch.')}", replica, refreshes, optimizer)


def by_accelerate(folder: Path) -> None:
    """Prepared by accelerate, whose scheduler steps once a process (B76): clocks must follow the optimizer's steps."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1000 + accelerator.process_index)
    model, optimizer = build("columns", torch.float32)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2 * STEPS)
    replica, prepared, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step_of() -> None:
        prepared.step()
        scheduler.step()
        prepared.zero_grad()

    refreshes = train(replica, optimizer, step_of, accelerator.backward)
    assert prepared.optimizer is optimizer
    group = optimizer.split_groups[0]
    said = {"step": group["step"], "progress": group["progress"], "lr": group["lr"], "density": group["density"]}
    (folder / f"clocks-rank{accelerator.process_index}.json").write_text(json.dumps(said))
    report(folder, "accelerate", replica, refreshes, optimizer)


def fused(folder: Path) -> None:
    """B66: the update inside backward would come before the mean over ranks, whoever takes it."""
    from torch.distributed.fsdp import fully_shard

    def wrapped_later(model: nn.Module) -> None:
        optimizer = FRUGAL(param_groups(model))
        optimizer.attach(model)
        distributed.init_process_group("gloo")
        nn.parallel.DistributedDataParallel(model)(torch.zeros(1, 2, dtype=torch.long)).sum().backward()

    def attached(model: nn.Module) -> None:
        FRUGAL(param_groups(model)).attach(model)

    cases = {
        "wrapped later": wrapped_later,
        "DDP": lambda model: attached(nn.parallel.DistributedDataParallel(model)),
        "FSDP2": lambda model: attached(fully_shard(model)),
    }
    said = {}
    for name, case in cases.items():
        try:
            case(Model())
        except NotSupportedError as error:
            said[name] = str(error)
    (folder / f"fused-rank{distributed.get_rank()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    part, where = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    {"torchrun": by_torchrun, "accelerate": by_accelerate}[part](where)
    distributed.barrier()
    distributed.destroy_process_group()
