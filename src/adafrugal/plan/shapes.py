"""The sizes of a model as one value, its exact parameter counts, and the presets in FRUGAL's shapes.

Nothing is built to count: a model of seven billion parameters is a dozen numbers here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from adafrugal.core.catalog import Catalog
from adafrugal.core.errors import ConfigError
from adafrugal.laws.flops import MatrixShapes


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a transformer: a decoder like Llama unless the fields with defaults say otherwise.

    Args:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_layers: Blocks.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; divides ``num_heads``.
        head_dim: Width of a head; usually ``hidden_size / num_heads``.
        vocab_size: Rows of the token embedding.
        max_sequence_length: The longest sequence, in tokens.
        tied_embeddings: Whether the output head is the token embedding.
        gated_mlp: Whether the MLP has three matrices (gate, up, down) or two.
        num_block_norms: Norms of width ``hidden_size`` in each block.
        num_outer_norms: Norms of width ``hidden_size`` outside the blocks.
        norm_bias: Whether norms have a bias beside their weight (LayerNorm).
        qkv_bias: Whether query, key and value projections have a bias.
        attention_output_bias: Whether the attention's output projection has one.
        mlp_bias: Whether the matrices of the MLP have one.
        num_position_embeddings: Rows of a learned position table; 0 for rotary positions.
        num_other_parameters: All that no other field counts (poolers, token types, norms of heads); stateful.

    Raises:
        ConfigError: If a size is below its least value, or the heads do not divide.

    Example:
        >>> tiny = PRESETS.create("tiny")
        >>> tiny.num_parameters, tiny.num_split_parameters, tiny.num_stateful_parameters
        (869760, 802816, 66944)
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_sequence_length: int
    tied_embeddings: bool = False
    gated_mlp: bool = True
    num_block_norms: int = 2
    num_outer_norms: int = 1
    norm_bias: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    num_position_embeddings: int = 0
    num_other_parameters: int = 0

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "vocab_size", "max_sequence_length"):
            self._check_at_least(name, 1)
        for name in ("num_block_norms", "num_outer_norms", "num_position_embeddings", "num_other_parameters"):
            self._check_at_least(name, 0)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"ModelShape(num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads})",
                self.num_kv_heads,
                f"a divisor of {self.num_heads}",
                f"Take {self.num_heads} for as many key-value heads as query heads.",
            )

    def _check_at_least(self, name: str, least: int) -> None:
        value: int = getattr(self, name)
        if value < least:
            raise ConfigError(f"ModelShape({name}={value})", value, f"a whole number from {least}", f"Change {name}.")

    @property
    def query_size(self) -> int:
        """Query heads times the width of a head."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Key-value heads times the width of a head."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_mlp_matrices(self) -> int:
        """Matrices in the MLP of a block."""
        return 3 if self.gated_mlp else 2

    @property
    def num_embedding_parameters(self) -> int:
        """The input tables: token and position embeddings; with tied embeddings the output head as well."""
        return (self.vocab_size + self.num_position_embeddings) * self.hidden_size

    @property
    def num_head_parameters(self) -> int:
        """The output head's own weights: none where it is tied."""
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_size

    @property
    def num_split_parameters(self) -> int:
        """Linear weights inside the blocks: those that a split optimizer divides by density."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        return self.num_layers * (attention + self.num_mlp_matrices * self.hidden_size * self.intermediate_size)

    @property
    def num_bias_parameters(self) -> int:
        """Biases of the linear layers inside the blocks."""
        qkv = self.query_size + 2 * self.kv_size if self.qkv_bias else 0
        output = self.hidden_size if self.attention_output_bias else 0
        mlp = (self.num_mlp_matrices - 1) * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        return self.num_layers * (qkv + output + mlp)

    @property
    def num_norm_parameters(self) -> int:
        """Weights, and biases where there are any, of all norms of width ``hidden_size``."""
        num_norms = self.num_layers * self.num_block_norms + self.num_outer_norms
        return num_norms * self.hidden_size * (2 if self.norm_bias else 1)

    @property
    def num_stateful_parameters(self) -> int:
        """All that always keeps full optimizer state: embeddings, head, norms, biases."""
        vectors = self.num_norm_parameters + self.num_bias_parameters
        return self.num_embedding_parameters + self.num_head_parameters + vectors + self.num_other_parameters

    @property
    def num_parameters(self) -> int:
        """Every parameter once."""
        return self.num_split_parameters + self.num_stateful_parameters

    @property
    def matrices(self) -> MatrixShapes:
        """The sizes that the FLOP formulas take."""
        return MatrixShapes(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            query_size=self.query_size,
            kv_size=self.kv_size,
            vocab_size=self.vocab_size,
            gated_mlp=self.gated_mlp,
        )


def _llama(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 32000,
    max_sequence_length: int = 1024,
) -> ModelShape:
    """A Llama of the first kind: as many key-value as query heads, heads that fill the width, no biases, untied."""
    return ModelShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
    )


@dataclass(frozen=True, kw_only=True)
class PublishedTraining:
    """How FRUGAL's authors pre-trained a size on C4: a cosine that starts again after each cycle.

    Args:
        cycle_steps: Optimizer steps from one start of the cosine to the next.
        total_steps: Optimizer steps of the run.
        batch_size: Sequences per optimizer step.
        sequence_length: Tokens in each.
        lr: Highest learning rate.
        weight_decay: Decoupled weight decay.
        density: Share of the split weights that is stateful.
        update_gap: Optimizer steps between refreshes.
        warmup_fraction: Share of a cycle over which the rate climbs.
        floor_fraction: Where the cosine ends, as a share of ``lr``.

    Source:
        The folder ``scripts/benchmark_c4`` of github.com/fzmushko/FRUGAL at commit c7ebe4c, read for all five sizes;
        the paper is arXiv 2411.07837.

    Deviations:
        The 7B script has more that is not a field here: it clips gradients at norm 1, and multiplies the rate of the
        split weights, stateful or not, by 0.3.

    Example:
        >>> PUBLISHED_TRAININGS.create("llama-130m").tokens
        26214400000
    """

    cycle_steps: int
    total_steps: int
    batch_size: int = 512
    sequence_length: int = 256
    lr: float = 1e-3
    weight_decay: float = 0.0
    density: float = 0.25
    update_gap: int = 200
    warmup_fraction: float = 0.1
    floor_fraction: float = 0.1

    @property
    def tokens(self) -> int:
        """Tokens of the whole run, padding included."""
        return self.total_steps * self.batch_size * self.sequence_length


PRESETS: Catalog[ModelShape] = Catalog("preset")
PUBLISHED_TRAININGS: Catalog[PublishedTraining] = Catalog("published training")

PRESETS.add("tiny", partial(_llama, hidden_size=128, intermediate_size=352, num_layers=4, num_heads=4, vocab_size=257))
PRESETS.add("llama-60m", partial(_llama, hidden_size=512, intermediate_size=1376, num_layers=8, num_heads=8))
PRESETS.add("llama-130m", partial(_llama, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12))
PRESETS.add("llama-350m", partial(_llama, hidden_size=1024, intermediate_size=2736, num_layers=24, num_heads=16))
PRESETS.add("llama-1b", partial(_llama, hidden_size=2048, intermediate_size=5461, num_layers=24, num_heads=32))
PRESETS.add(
    "llama-7b",
    partial(_llama, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, max_sequence_length=2048),
)

PUBLISHED_TRAININGS.add("llama-60m", partial(PublishedTraining, cycle_steps=10_000, total_steps=200_000))
PUBLISHED_TRAININGS.add("llama-130m", partial(PublishedTraining, cycle_steps=20_000, total_steps=200_000))
PUBLISHED_TRAININGS.add("llama-350m", partial(PublishedTraining, cycle_steps=60_000, total_steps=300_000))
PUBLISHED_TRAININGS.add("llama-1b", partial(PublishedTraining, cycle_steps=100_000, total_steps=500_000))
PUBLISHED_TRAININGS.add(
    "llama-7b",
    partial(PublishedTraining, cycle_steps=150_000, total_steps=150_000, lr=5e-4, density=0.0, update_gap=500),
)
