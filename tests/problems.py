"""Small problems that the tests share: sequences of gradients, tiny models, and ways to run them."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from adafrugal.optim.split import SplitOptimizer

Shape = tuple[int, ...]


def draw(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Gaussian numbers from a seed of their own."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradient_sequence(shapes: Sequence[Shape], steps: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Gradients for each step and tensor: a drift that a moment can pick up, plus noise."""
    return [
        [draw(s, 7 + i, dtype) * 0.3 + draw(s, 1000 + 50 * k + i, dtype) for i, s in enumerate(shapes)]
        for k in range(steps)
    ]


def parameters(shapes: Sequence[Shape], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Weights of order 1."""
    return [nn.Parameter(draw(shape, 500 + i, dtype)) for i, shape in enumerate(shapes)]


def follow(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    grads: Iterable[Sequence[Tensor | None]],
    before_step: Callable[[int], None] | None = None,
) -> None:
    """Step through given gradients; the optimizer never sees a model."""
    for k, step_grads in enumerate(grads):
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = None if grad is None else grad.to(param.dtype).clone()
        if before_step is not None:
            before_step(k)
        optimizer.step()


def split_group(params: Sequence[nn.Parameter], names: Sequence[str] | None = None) -> list[dict]:
    """One group in which everything splits, whatever its shape."""
    group = {"params": list(params), "role": "split"}
    if names is not None:
        group["param_names"] = list(names)
    return [group]


class Block(nn.Module):
    """Attention-like and MLP-like matrices with a norm: what a transformer block has, without attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """Embedding, blocks, head; small enough for hundreds of steps a second."""

    def __init__(self, hidden: int = 32, num_blocks: int = 3, vocab_size: int = 23, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_blocks))
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny_model(seed: int = 0, **settings: object) -> TinyModel:
    """A model whose weights depend on the seed alone; the global stream is put back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyModel(**settings)


def tiny_loss(model: nn.Module, step: int, batch: int = 4) -> Tensor:
    """Next-token loss on a batch that depends on the step alone."""
    tokens = torch.randint(0, 23, (batch, 12), generator=torch.Generator().manual_seed(step))
    tokens[:, 1::2] = (tokens[:, ::2] * 3 + 1) % 23  # something to learn
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train_tiny(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    after_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train on the batches of some step numbers; returns the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = tiny_loss(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after_step is not None:
            after_step(step, losses[-1])
    return losses


def state_tensors(optimizer: SplitOptimizer) -> list[Tensor]:
    """Every tensor in the optimizer's state."""
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


def same_parameters(first: nn.Module, second: nn.Module) -> bool:
    """Whether all parameters are bit-equal."""
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def peak_bytes(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> int:
    """Highest number of bytes allocated while `run` runs, above what was held when it began.

    `before` runs under the profiler too: it knows the size of what is freed only where it saw it allocated.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        before()
        with record_function("measured"):
            run()
    events = sorted(prof.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == "measured")
    used = held = highest = 0
    for event in events:
        if event.name() == "[memory]":
            used += event.nbytes()
            if event.start_ns() < start:
                held = highest = used
            highest = max(highest, used)
    return highest - held
