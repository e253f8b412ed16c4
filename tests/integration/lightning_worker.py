"""What the tests of Lightning train, here and in processes of their own.

python lightning_worker.py resume|ddp FOLDER
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from adafrugal import AdaFRUGAL, param_groups
from adafrugal.core.errors import NotSupportedError
from adafrugal.integrations.lightning import AdaFrugalCallback
from problems import tiny_model

SETTINGS = {"update_gap": 4, "update_gap_max": 9, "plateau_tolerance": 0.5}


class Batches(torch.utils.data.Dataset):
    """Whole batches that depend on their number alone."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        tokens = torch.randint(0, 23, (4, 12), generator=torch.Generator().manual_seed(self.first + index))
        tokens[:, 1::2] = (tokens[:, ::2] * 3 + 1) % 23  # something to learn
        return tokens


def loader(count: int, first: int = 0, kind: type = torch.utils.data.DataLoader, ranks: int = 1):
    data = Batches(count, first)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    sampler = torch.utils.data.DistributedSampler(data, ranks, rank, shuffle=False)
    return kind(data, batch_size=1, sampler=sampler, collate_fn=lambda items: items[0])


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Module(pl.LightningModule):
    """An ordinary module; `make` builds the optimizer over its model, `spoil` the loss of one batch."""

    def __init__(self, make: Callable | None = None, cosine: bool = False, spoil: int | None = None) -> None:
        super().__init__()
        self.model = tiny_model(num_blocks=2)
        self.make = make or (lambda model: AdaFRUGAL(param_groups(model), lr=1e-2, **SETTINGS))
        self.cosine, self.spoil, self.seen = cosine, spoil, []

    def training_step(self, batch, batch_idx):
        loss = next_token_loss(self.model, batch)
        self.log("train_loss", loss)
        return loss * torch.inf if batch_idx == self.spoil else loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", next_token_loss(self.model, batch))

    def configure_optimizers(self):
        optimizer = self.make(self.model)
        if not self.cosine:
            return optimizer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(callbacks=(), **settings) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **settings})


def fit(module: pl.LightningModule, callbacks=None, batches: int = 15, ckpt: Path | None = None, kind=None, **settings):
    """Train; data loaders draw a seed from the global stream, which is put back."""
    callbacks = [AdaFrugalCallback()] if callbacks is None else callbacks
    running = trainer(callbacks, use_distributed_sampler=False, **settings)
    ranks = settings.get("devices", 1)
    train = loader(batches, kind=kind or torch.utils.data.DataLoader, ranks=ranks)
    with torch.random.fork_rng():
        running.fit(module, train, loader(4, first=1000, ranks=ranks), ckpt_path=ckpt, weights_only=True)
    return running


VARIANTS = {
    "plain": {},
    "everything": {"batches": 30, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed"},
    "fused": {"fused": True},
    "within an epoch": {"batches": 40, "val_check_interval": 20, "kind": StatefulDataLoader},
}


def run_variant(name: str, folder: Path, ckpt: Path | None = None) -> nn.Module:
    """Sixty steps with a checkpoint at thirty, or the last thirty from it.

    At the end of an epoch it is saved after the validation, as Lightning does by itself. One saved before it, by
    `every_n_train_steps`, would lose that validation: Lightning does not catch up on it.
    """
    settings = dict(VARIANTS[name])
    callback = AdaFrugalCallback(fused_backward=settings.pop("fused", False))
    often = {"every_n_train_steps": 30} if "kind" in settings else {"every_n_epochs": 2}
    saving = ModelCheckpoint(folder / name, "{step}", save_top_k=-1, **often)
    module = Module(cosine=True)
    callbacks = [callback] if ckpt else [callback, saving]
    fit(module, callbacks, ckpt=ckpt, max_steps=60, enable_checkpointing=ckpt is None, **settings)
    return module.model


def resume(folder: Path) -> None:
    for name in VARIANTS:
        model = run_variant(name, folder, ckpt=next((folder / name).glob("step=30*.ckpt")))
        torch.save(model.state_dict(), folder / f"{name}.pt")


def two_processes(folder: Path) -> None:
    """Lightning starts this file anew for the second process."""
    module = Module()
    running = fit(module, batches=20, max_epochs=4, strategy="ddp", devices=2)
    torch.save(module.model.state_dict(), folder / f"rank{running.global_rank}.pt")
    gap = running.optimizers[0].split_groups[0]["update_gap"]
    assert gap > 4, "each rank has observed"
    with pytest.raises(NotSupportedError, match="DistributedDataParallel"):
        fit(module, [AdaFrugalCallback(fused_backward=True)], max_steps=1, strategy="ddp", devices=2)


if __name__ == "__main__":
    {"resume": resume, "ddp": two_processes}[sys.argv[1]](Path(sys.argv[2]))
