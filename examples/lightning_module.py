"""AdaFRUGAL under Lightning: the optimizer comes from `configure_optimizers`, the callback tells it of the run.

python examples/lightning_module.py                        # a tiny random Llama on made-up tokens, offline
python examples/lightning_module.py --fused_backward       # in place of --accumulation 4 --clip 1.0
"""

import argparse

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from adafrugal import AdaFRUGAL, param_groups
from adafrugal.integrations.lightning import AdaFrugalCallback


class LanguageModel(pl.LightningModule):
    """A Llama; nothing in it knows of the callback."""

    def __init__(self, lr: float, hidden: int, layers: int, vocab_size: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, **sizes))

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        """Next-token loss."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch: list[torch.Tensor], batch_index: int) -> None:
        """The metric that the callback observes."""
        (tokens,) = batch
        self.log("val_loss", self.model(input_ids=tokens, labels=tokens).loss, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """No total_steps: the callback sets the progress."""
        optimizer = AdaFRUGAL(param_groups(self), lr=self.hparams["lr"], update_gap=10)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(count: int, seed: int) -> DataLoader:
    """Made-up text in which every second token follows from the one before."""
    tokens = torch.randint(0, 64, (count * 4, 32), generator=torch.Generator().manual_seed(seed))
    tokens[:, 1::2] = (tokens[:, ::2] * 3 + 1) % 64
    return DataLoader(TensorDataset(tokens), batch_size=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--fused_backward", action="store_true")
    parser.add_argument("--out", default="lightning_run")
    arguments = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=arguments.epochs,
        accumulate_grad_batches=arguments.accumulation,
        gradient_clip_val=arguments.clip,
        callbacks=[AdaFrugalCallback(monitor="val_loss", fused_backward=arguments.fused_backward)],
        default_root_dir=arguments.out,
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    module = LanguageModel(arguments.lr, arguments.hidden, arguments.layers)
    trainer.fit(module, batches(20, seed=0), batches(2, seed=1))
    for name in ("val_loss", "adafrugal/density", "adafrugal/update_gap", "adafrugal/state_bytes"):
        print(name, trainer.callback_metrics[name].item())


if __name__ == "__main__":
    main()
