"""The state of a run whose weights lie in shards, gathered for the files of one process and dealt out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adafrugal.optim.sharding import is_dtensor
from adafrugal.optim.split import SplitOptimizer
from adafrugal.train.distributed import Ranks


def gathered(state: Any, keep: bool) -> Any:
    """A nested state with whole tensors on the CPU in the place of sharded ones.

    Args:
        state: Dicts, lists and tuples of tensors and plain data; of the same form on every rank, in the same order.
        keep: Whether this rank wants the result. One that does not gets the form without the tensors, and holds one
            whole tensor at a time.

    Returns:
        Without a DTensor in it. Plain tensors are left as they are.

    Cost:
        One all-gather for each sharded tensor, so every rank must call it.
    """
    if isinstance(state, Tensor):
        if not is_dtensor(state):
            return state
        whole = cast(Any, state).full_tensor().detach()
        return whole.cpu() if keep else None
    if isinstance(state, Mapping):
        items = cast(Mapping[Any, Any], state)
        return {key: gathered(value, keep) for key, value in items.items()}
    if isinstance(state, (list, tuple)):
        values = [gathered(value, keep) for value in cast(list[Any], state)]
        return tuple(values) if isinstance(state, tuple) else values
    return state


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Load whole weights into a model, whole or in shards.

    Raises:
        RuntimeError: As ``load_state_dict``, if names or shapes are another model's.
    """
    if ranks.layout.kind != "fsdp2":
        model.load_state_dict(weights)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))


def load_optimizer(optimizer: Optimizer, state: dict[str, Any], ranks: Ranks) -> None:
    """Load the whole state of an optimizer into one over whole or sharded weights.

    An optimizer of ours takes its own part of each tensor; torch's keep what they are given, so it is cut first.
    """
    if ranks.layout.kind == "fsdp2" and not isinstance(optimizer, SplitOptimizer):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = {**state, "state": {i: _dealt(held, params[i]) for i, held in state["state"].items()}}
    optimizer.load_state_dict(state)


def _dealt(held: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """One weight's state, with what has the weight's shape cut as the weight is."""
    from torch.distributed.tensor import distribute_tensor

    dealt = dict(held)
    for name, value in held.items():
        if is_dtensor(param) and isinstance(value, Tensor) and value.shape == param.shape:
            dealt[name] = distribute_tensor(value.to(param.device), param.device_mesh, param.placements)
    return dealt


def local_bytes(tensors: list[Tensor]) -> list[Tensor]:
    """The parts of some tensors that lie on this rank."""
    return [cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


@torch.no_grad()
def whole_weights(model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """All weights and buffers of a model by name; whole on the first rank, and on the others of no use."""
    state: dict[str, Tensor] = model.state_dict()
    return gathered(state, ranks.is_first) if ranks.layout.kind == "fsdp2" else state
