"""Weights, gradients and moments in shards over several processes: FSDP2, with a checkpoint that any number resumes.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --steps 60 --resume fsdp2_checkpoint
"""

import argparse

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from adafrugal import AdaFRUGAL, param_groups


def build(steps: int) -> tuple[LlamaForCausalLM, AdaFRUGAL]:
    """Shard block by block, then the rest; the optimizer comes after, over the sharded weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdaFRUGAL(param_groups(model), lr=1e-3, total_steps=steps, subspace="columns")
    return model, optimizer


def checkpoint(model: LlamaForCausalLM, optimizer: AdaFRUGAL) -> dict:
    """Both states by parameter name; the optimizer's is padded, so that its shapes do not depend on the density."""
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Four sequences of this rank's own; a real job reads its share of a data set here."""
    start = torch.randint(256, (4, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (start + torch.arange(32)) % 256


def main() -> None:
    """Train, say what each rank holds, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--resume", help="folder of a checkpoint")
    parser.add_argument("--save", default="fsdp2_checkpoint")
    arguments = parser.parse_args()
    distributed.init_process_group()
    rank = distributed.get_rank()
    model, optimizer = build(arguments.steps)
    first = 0
    if arguments.resume:
        loaded = checkpoint(model, optimizer)
        dcp.load(loaded, checkpoint_id=arguments.resume)
        states.set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        first = optimizer.param_groups[0]["step"]
    for step in range(first, arguments.steps):
        batch = batch_of(step, rank)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            optimizer.observe(float(loss.detach()))  # averaged over the ranks; every rank must call it
            if rank == 0:
                print(f"step {step + 1}: loss {float(loss.detach()):.4f}")
    print(f"rank {rank} holds {optimizer.memory()['state_bytes']:,} bytes of moments")
    dcp.save(checkpoint(model, optimizer), checkpoint_id=arguments.save)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
