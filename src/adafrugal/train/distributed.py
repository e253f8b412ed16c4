"""Several processes that train one model: who they are, what they agree on, and how the model is laid over them.

Every rank runs the same loop. What a decision hangs on is agreed first: losses and costs are added up over the ranks,
time is the first rank's, and a wish to stop is everybody's. So all come to the same step, refresh and end together.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from adafrugal.core.errors import ConfigError, FourFactsError, NotSupportedError

T = TypeVar("T")
Parallel = Literal["auto", "none", "ddp", "fsdp2"]

_PLACES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A rank may wait for another's tokenizer or checkpoint; a rank that dies is the launcher's to notice, at once.
_TIMEOUT = timedelta(hours=2)
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies over several processes.

    Args:
        kind: ``"none"``, ``"ddp"`` (a replica on each) or ``"fsdp2"`` (a part on each).
        rank: The number of this process.
        size: How many there are.
        local_rank: The number of this process on its machine, which is that of its GPU.
    """

    kind: Literal["none", "ddp", "fsdp2"] = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0


class Ranks:
    """The processes of a job, as one of them sees them. With one process nothing here waits for anybody.

    Args:
        layout: Who this is, and how the model lies.
        device: Where this rank's small messages live: the CPU under gloo, its own GPU under NCCL.
        closes: Whether the process group ends with the job.
    """

    def __init__(
        self, layout: Layout | None = None, device: torch.device | None = None, *, closes: bool = False
    ) -> None:
        self.layout = layout or Layout()
        self.closes = closes
        self._device = device or torch.device("cpu")
        self._now = 0.0
        self._stopping = False

    @property
    def size(self) -> int:
        """How many processes train together."""
        return self.layout.size

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, logs and writes."""
        return self.layout.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no process but this one, and the model is an ordinary one."""
        return self.layout.kind == "none"

    # --- agreeing ---------------------------------------------------------------------------------------------------

    def meet(self, stop: bool) -> None:
        """Tell all ranks the first one's clock and whether anybody wants to stop: one all-reduce of 16 bytes."""
        self._now = time.monotonic()
        if self.alone:
            return
        told = torch.tensor(
            [float(stop), self._now if self.is_first else 0.0], dtype=torch.float64, device=self._device
        )
        distributed.all_reduce(told)
        wishes, self._now = cast(list[float], told.tolist())
        self._stopping = wishes > 0

    def now(self) -> float:
        """Seconds of a clock that all ranks read alike: the present, or of several ranks the last meeting."""
        return time.monotonic() if self.alone else self._now

    def stopping(self, wanted: bool) -> bool:
        """Whether to stop: as wanted on one process, as agreed at the last meeting on several."""
        return wanted if self.alone else self._stopping

    def total(self, counts: Sequence[int], numbers: Sequence[float] = ()) -> tuple[list[int], list[float]]:
        """Add up over all ranks, in the order of the ranks, so that all get the same to the last bit.

        Args:
            counts: Whole numbers below 2^63; their sums are exact.
            numbers: Others, added in float64.
        """
        if self.alone:
            return list(counts), list(numbers)
        bits = torch.tensor(list(numbers), dtype=torch.float64).view(torch.int64)
        packed = torch.cat([torch.tensor(list(counts), dtype=torch.int64), bits]).to(self._device)
        told = [torch.empty_like(packed) for _ in range(self.size)]
        distributed.all_gather(told, packed)
        rows = [row.cpu() for row in told]
        cut = len(counts)
        whole = [sum(int(row[i]) for row in rows) for i in range(cut)]
        floats = [cast(list[float], row[cut:].view(torch.float64).tolist()) for row in rows]
        return whole, [sum(column) for column in zip(*floats, strict=True)]

    def from_first(self, make: Callable[[], T]) -> T:
        """Let the first rank make something, and give it to all; an error of four facts is raised on all of them."""
        if self.alone:
            return make()
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told[0] = make()
            except FourFactsError as error:
                told[1] = error
        distributed.broadcast_object_list(told, device=self._device)
        if told[1] is not None:
            raise told[1]
        return told[0]

    def first_goes_first(self, call: Callable[[], T]) -> T:
        """Call on the first rank, then on the others, so that they find what it has put into a cache."""
        if self.alone:
            return call()
        if not self.is_first:
            distributed.barrier()
            return call()
        try:
            return call()
        finally:
            distributed.barrier()

    # --- laying out -------------------------------------------------------------------------------------------------

    def share(self, batch: Tensor) -> Tensor:
        """This rank's windows of a global batch, a run of equal length on each rank."""
        if self.alone:
            return batch
        mine = len(batch) // self.size
        return batch[self.layout.rank * mine : (self.layout.rank + 1) * mine]

    def device_name(self, name: str) -> str:
        """The device of this rank, for a job that was given ``name``.

        Raises:
            ConfigError: For one numbered GPU for several processes.
        """
        if self.alone:
            return name
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name not in ("cpu", "cuda"):
            raise ConfigError(
                f"--device {name} on {self.size} processes",
                name,
                "auto, cpu or cuda: each process takes the GPU of its own number",
                "Write --device cuda, and choose GPUs with CUDA_VISIBLE_DEVICES.",
            )
        return f"cuda:{self.layout.local_rank}" if name == "cuda" else name

    def shard(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Cut the weights over the ranks under FSDP2, block by block; the optimizer is built over what this returns.

        Weights are float32 in products as well, unless they are bfloat16: then gradients are averaged in float32.
        """
        if self.layout.kind != "fsdp2":
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (self.size,))
        low = next(model.parameters()).dtype == torch.bfloat16
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def replicate(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Wrap a model whose gradients are averaged over the replicas of DDP; the weights stay the model's own.

        The wrapper knows the weights that are trained when it is made, and no others.

        Args:
            model: The replica.
            device: Where it lives.
        """
        if self.layout.kind != "ddp":
            return model
        # Buffers are not sent at each forward: a language model has none that training changes. Torch renamed it.
        known = inspect.signature(cast(Any, DistributedDataParallel)).parameters
        no_sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {
            "device_ids": [device] if device.type == "cuda" else None,
            "gradient_as_bucket_view": True,  # else every gradient is held twice
            no_sync: False,
        }
        return DistributedDataParallel(model, **options)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: those that transformers says not to split, else the items of its longest list.

    Args:
        model: Of transformers' form, or any with its blocks in an ``nn.ModuleList``.
    """
    kinds = set(cast(Sequence[str], getattr(model, "_no_split_modules", None) or ()))
    named = [module for module in model.modules() if type(module).__name__ in kinds]
    if named:
        return named
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


# --- opening and ending -----------------------------------------------------------------------------------------------


def launched() -> tuple[int, int]:
    """Rank and number of processes as the launcher's environment says; 0 and 1 where there is no launcher."""
    if not all(name in os.environ for name in _PLACES):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def open_ranks(parallel: Parallel, device: str) -> Ranks:
    """Join the other processes, if there are any; a process group that is there already is used, and left open.

    Args:
        parallel: ``"auto"`` is none on one process and DDP on several.
        device: Of the configuration; GPUs talk over NCCL, CPUs over gloo.

    Raises:
        ConfigError: If the way asked for and the number of processes do not fit.
    """
    rank, size = launched()
    kind = ("ddp" if size > 1 else "none") if parallel == "auto" else parallel
    if kind == "none":
        if size > 1:
            raise ConfigError(
                f"--parallel none on {size} processes",
                f"{size} processes",
                "ddp, fsdp2 or auto, or one process",
                "Leave --parallel out, or start without torchrun.",
            )
        return Ranks()
    if not all(name in os.environ for name in _PLACES):
        raise ConfigError(
            f"--parallel {kind}",
            "a process that no launcher started",
            "none or auto on one process",
            f"Start torchrun --nproc-per-node 2 -m adafrugal train --parallel {kind} ..., or say --parallel auto.",
        )
    layout = Layout(kind=kind, rank=rank, size=size, local_rank=int(os.environ.get("LOCAL_RANK", rank)))
    name = Ranks(layout).device_name(device)
    here = torch.device(name)
    if here.type == "cuda":
        if not torch.cuda.is_available() or layout.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"--device {device} on {size} processes",
                f"process {layout.local_rank} of a machine with {torch.cuda.device_count()} GPUs",
                "at most one process for each GPU",
                "Lower --nproc-per-node, or write --device cpu.",
            )
        torch.cuda.set_device(here)
    joined = distributed.is_initialized()
    if not joined:
        distributed.init_process_group("nccl" if here.type == "cuda" else "gloo", timeout=_TIMEOUT)
    if layout.rank != 0:
        _be_silent()
    return Ranks(layout, here, closes=not joined)


def close_ranks(ranks: Ranks) -> None:
    """Leave the other processes, at the end of a job that went well."""
    if ranks.closes:
        distributed.barrier()
        distributed.destroy_process_group()


def _be_silent() -> None:
    """Warnings and progress bars are the first rank's; errors are everybody's."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def say_error(text: str) -> None:
    """Print an error once, whoever met it.

    The first rank speaks at once; the launcher then ends the others. A rank that is still there after some seconds
    has met the error alone, and says so.
    """
    rank, size = launched()
    if rank == 0:
        print(f"adafrugal: {text}", file=sys.stderr, flush=True)
        return
    time.sleep(_PATIENCE_SECONDS)
    print(f"adafrugal (process {rank} of {size}): {text}", file=sys.stderr, flush=True)


def lost_another(error: BaseException) -> bool:
    """Whether an error only says that another rank has ended, in which case that one has said why."""
    signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
    return launched()[1] > 1 and any(sign in str(error).lower() for sign in signs)


def refuse_unparallel(ranks: Ranks, method: str, fused_backward: bool) -> None:
    """Refuse what does not work over several processes, before anything is read or built.

    Args:
        ranks: The processes.
        method: Of ``--optim.name``.
        fused_backward: Of the configuration.

    Raises:
        NotSupportedError: For an update inside backward, where gradients are not averaged yet, and for a method that
            freezes weights in turn over shards.
    """
    if ranks.alone:
        return
    if fused_backward:
        raise NotSupportedError(
            f"--fused_backward true with {ranks.layout.kind} on {ranks.size} processes",
            "an update inside backward",
            "an update after backward, since gradients are averaged over the processes only then",
            "Leave fused_backward off, or train on one process.",
        )
    if ranks.layout.kind == "fsdp2" and method == "badam":
        raise NotSupportedError(
            f"--optim.name badam --parallel fsdp2 on {ranks.size} processes",
            "a method that freezes what is idle",
            "one that moves all weights at each step, since FSDP2 settles once which weights need a gradient",
            "Use --parallel ddp, or --optim.name frugal --optim.subspace blocks.",
        )
