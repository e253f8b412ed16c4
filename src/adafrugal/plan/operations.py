"""The operations of a transformer as transformers and torch run them, on a tape: what each saves, and what each needs.

Each was read off torch's own dispatch of LlamaForCausalLM and of LayerNorm models, and is judged by measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from adafrugal.plan.tape import Buffer, Node, Tape, Value

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A weight whose own bytes are counted elsewhere.

    Args:
        node: Takes its gradient.
        numel: Its elements.
    """

    node: Node
    numel: int


@dataclass(kw_only=True)
class Operations:
    """The operations in one precision on one tape.

    Args:
        tape: Where bytes are counted.
        weight_size: Bytes of an element of a weight and of its gradient.
        product_size: Bytes of an element that a matrix product takes and gives.
        casts: The weights in low precision that autocast keeps until forward ends.
        saves: Whether operations save anything: not in the forward of what will be run again.
        again: Whether this is such a second run, which ends as soon as all that is saved is there: the last results
            of a block are not made.
    """

    tape: Tape
    weight_size: int
    product_size: int
    casts: list[Buffer] = field(default_factory=list[Buffer])
    saves: bool = True
    again: bool = False

    def keep(self, *buffers: Buffer | None) -> tuple[Buffer | None, ...]:
        """What an operation saves for backward."""
        return buffers if self.saves else ()

    # --- products ---------------------------------------------------------------------------------------------------

    def linear(
        self, x: Value, weight: Parameter, numel: int, bias: Parameter | None = None, last: bool = False
    ) -> Value:
        """X W^T + b: saves its input and its weight; backward makes the weight's gradient, then the input's.

        Args:
            x: The input.
            weight: W.
            numel: Elements of the result.
            bias: b.
            last: Whether it is the last operation of a block that saves anything.
        """
        tape, size = self.tape, self.product_size
        x = self.cast(x, size)
        weight_node, cast_weight = self._cast_weight(weight)
        saved = self.keep(x.buffer, cast_weight)
        inputs: list[Node | None] = [weight_node]
        num_bytes = [weight.numel * size]
        back = x.numel * size
        if bias is not None:
            bias_node, _ = self._cast_weight(bias)
            inputs.append(bias_node)
            num_bytes.append(bias.numel * size)

        def backward(gradient: Buffer, saved: object = saved) -> Sequence[Buffer | None]:
            return [*(tape.hold(count) for count in num_bytes), Buffer(tape, back, is_view=True)]

        inputs.append(x.node)
        result = tape.hold(0 if last and self.again else numel * size)
        return Value(result, numel, size, tape.node(inputs, backward))

    def cast(self, x: Value, size: int) -> Value:
        """A copy in another precision; the same tensor where nothing changes."""
        if x.size == size:
            return x
        tape, back = self.tape, x.numel * x.size
        return tape.make(x.numel, size, (x,), lambda gradient: (tape.hold(back),))

    def _cast_weight(self, weight: Parameter) -> tuple[Node, Buffer | None]:
        """Autocast casts a weight once and keeps it until forward ends."""
        if self.product_size == self.weight_size:
            return weight.node, None
        tape, back = self.tape, weight.numel * self.weight_size
        buffer = tape.hold(weight.numel * self.product_size)
        self.casts.append(buffer)
        return tape.node((weight.node,), lambda gradient: (tape.hold(back),)), buffer

    def embedding(self, table: Parameter, numel: int) -> Value:
        """Rows of a table; backward makes the table's gradient, whole."""
        tape, size = self.tape, self.weight_size
        return Value(
            tape.hold(numel * size),
            numel,
            size,
            tape.node((table.node,), lambda gradient: (tape.hold(table.numel * size),)),
        )

    # --- element by element -----------------------------------------------------------------------------------------

    def add(self, x: Value, y: Value, last: bool = False) -> Value:
        """X + y, in the wider precision; both get the same gradient, a copy only where the precision differs.

        Args:
            x: One summand, the one with the longer past.
            y: The other.
            last: Whether it is the end of a block.
        """
        tape, size = self.tape, max(x.size, y.size)
        sizes = [(value.numel, value.size) for value in (x, y)]

        def backward(gradient: Buffer) -> Sequence[Buffer | None]:
            return [gradient if own == size else tape.hold(numel * own) for numel, own in sizes]

        result = tape.hold(0 if last and self.again else x.numel * size)
        return Value(result, x.numel, size, tape.node((x.node, y.node), backward))

    def multiply(self, x: Value, y: Value) -> Value:
        """X * y of the same size: saves both."""
        tape, num_bytes = self.tape, x.numel * x.size

        def backward(gradient: Buffer, saved: object = self.keep(x.buffer, y.buffer)) -> Sequence[Buffer | None]:
            return (tape.hold(num_bytes), tape.hold(num_bytes))

        return tape.make(x.numel, x.size, (x, y), backward)

    def activation(self, x: Value) -> Value:
        """SiLU or GELU, one operation: saves its input."""
        tape, num_bytes = self.tape, x.numel * x.size

        def backward(gradient: Buffer, saved: object = self.keep(x.buffer)) -> Sequence[Buffer | None]:
            return (tape.hold(num_bytes),)

        return tape.make(x.numel, x.size, (x,), backward)

    def rotate(self, x: Value, table: Buffer, table_size: int) -> Value:
        """Rotary positions: x cos + (-x_2, x_1) sin, with the halves cut out, negated and put together again.

        Args:
            x: Queries or keys.
            table: Cosines and sines, saved.
            table_size: Bytes of an element of them.
        """
        tape, numel, size = self.tape, x.numel, x.size
        wide = max(size, table_size)

        def scaled(value: Value) -> Value:
            def backward(gradient: Buffer, saved: object = self.keep(table)) -> Sequence[Buffer | None]:
                product = tape.hold(numel * wide)
                return (product if wide == size else tape.hold(numel * size),)

            return tape.make(numel, wide, (value,), backward)

        def half(value: Value) -> Value:
            return tape.make(numel // 2, size, (value,), lambda gradient: (tape.hold(numel * size),), value.buffer)

        by_cosine = scaled(x)
        first, second = half(x), half(x)
        negative = tape.make(numel // 2, size, (second,), lambda gradient: (tape.hold(numel // 2 * size),))
        turned = tape.make(numel, size, (negative, first), lambda gradient: (gradient, gradient))
        del negative, first, second
        by_sine = scaled(turned)
        del turned
        return self.add(by_cosine, by_sine)

    # --- norms --------------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Value, weight: Parameter, num_rows: int) -> Value:
        """X / sqrt(mean(x^2) + eps) * w, written out in operations, in float32 but for the last.

        Args:
            x: The input.
            weight: w.
            num_rows: Tokens, or heads times tokens.
        """
        tape, rows, back = self.tape, num_rows * FLOAT32_BYTES, x.size
        wide = self.cast(x, FLOAT32_BYTES)
        whole = wide.numel * FLOAT32_BYTES

        def unsquare(gradient: Buffer, saved: object = self.keep(wide.buffer)) -> Sequence[Buffer | None]:
            power, double = tape.hold(whole), tape.hold(whole)
            result = tape.hold(whole)
            del power, double
            return (result,)

        square = tape.make(wide.numel, FLOAT32_BYTES, (wide,), unsquare)
        mean = tape.make(num_rows, FLOAT32_BYTES, (square,), lambda gradient: (tape.hold(whole),))
        del square
        scale = tape.make(num_rows, FLOAT32_BYTES, (mean,), lambda gradient: (tape.hold(rows),))

        def unscale(gradient: Buffer, saved: object = self.keep(wide.buffer, scale.buffer)) -> Sequence[Buffer | None]:
            to_wide, product = tape.hold(whole), tape.hold(whole)
            to_scale = tape.hold(rows)
            del product
            return (to_wide, to_scale)

        scaled = tape.make(wide.numel, FLOAT32_BYTES, (wide, scale), unscale)
        del wide
        narrow = self.cast(scaled, back)
        size = max(narrow.size, self.weight_size)
        whole_out, weight_bytes = narrow.numel * size, weight.numel * self.weight_size

        def unweight(gradient: Buffer, saved: object = self.keep(narrow.buffer)) -> Sequence[Buffer | None]:
            product, to_narrow = tape.hold(whole_out), tape.hold(whole_out)
            to_weight = tape.hold(weight_bytes)
            del product
            return (to_weight, to_narrow)

        return Value(tape.hold(whole_out), narrow.numel, size, tape.node((weight.node, narrow.node), unweight))

    def layer_norm(self, x: Value, weight: Parameter, bias: Parameter, num_rows: int) -> Value:
        """LayerNorm, one operation: saves its input, and two numbers a row.

        Args:
            x: The input.
            weight: Of its output.
            bias: Of its output.
            num_rows: Tokens.
        """
        tape, num_bytes = self.tape, x.numel * x.size
        rows = tape.hold(2 * FLOAT32_BYTES * num_rows)
        weight_bytes = weight.numel * self.weight_size

        def backward(gradient: Buffer, saved: object = self.keep(x.buffer, rows)) -> Sequence[Buffer | None]:
            return (tape.hold(num_bytes), tape.hold(weight_bytes), tape.hold(weight_bytes))

        node = tape.node((x.node, weight.node, bias.node), backward)
        return Value(tape.hold(num_bytes), x.numel, x.size, node)

    # --- attention ----------------------------------------------------------------------------------------------------

    def fused_attention(self, query: Value, key: Value, value: Value, num_row_heads: int) -> Value:
        """Attention that keeps no matrix of scores: saves its inputs, its result, and a float32 number a row and head.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            num_row_heads: Tokens times heads.
        """
        tape, size = self.tape, self.product_size
        query, key, value = (self.cast(x, size) for x in (query, key, value))
        numels = [x.numel for x in (query, key, value)]
        result = tape.hold(numels[0] * size)
        sums = tape.hold(num_row_heads * FLOAT32_BYTES)
        saved = self.keep(query.buffer, key.buffer, value.buffer, result, sums)

        def backward(gradient: Buffer, saved: object = saved) -> Sequence[Buffer | None]:
            return [tape.hold(numel * size) for numel in numels]

        return Value(result, numels[0], size, tape.node((query.node, key.node, value.node), backward))

    def eager_attention(self, query: Value, key: Value, value: Value, num_scores: int) -> Value:
        """Attention written out: scores, scaled, masked, softmax in float32, and the product with the values.

        Heads are copied together for the products, and grouped keys and values once for each query head.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            num_scores: Tokens times length times heads.
        """
        query, key, value = (self._repeated(x, query.numel) for x in (query, key, value))
        scores = self._product(query, key, num_scores)
        scores = self._elementwise(scores)
        scores = self._elementwise(scores)  # with the mask, which needs no gradient
        wide = self.cast(scores, FLOAT32_BYTES)
        tape, num_bytes = self.tape, num_scores * FLOAT32_BYTES
        result = tape.hold(num_bytes)

        def backward(gradient: Buffer, saved: object = self.keep(result)) -> Sequence[Buffer | None]:
            return (tape.hold(num_bytes),)

        shares = Value(result, num_scores, FLOAT32_BYTES, tape.node((wide.node,), backward))
        del wide, result
        shares = self.cast(shares, self.product_size)
        return self._elementwise(self._product(shares, value, query.numel))

    def _repeated(self, x: Value, numel: int) -> Value:
        """Heads side by side in memory, each as often as there are query heads for it."""
        tape, size = self.tape, self.product_size
        x = self.cast(x, size)
        shrinks, back = x.numel < numel, x.numel * size

        def backward(gradient: Buffer) -> Sequence[Buffer | None]:
            return (tape.hold(back) if shrinks else gradient,)

        return tape.make(numel, size, (x,), backward)

    def _product(self, x: Value, y: Value, numel: int) -> Value:
        """A batched product of two values: saves both."""
        tape, size = self.tape, self.product_size
        num_bytes = [x.numel * size, y.numel * size]

        def backward(gradient: Buffer, saved: object = self.keep(x.buffer, y.buffer)) -> Sequence[Buffer | None]:
            return [tape.hold(count) for count in num_bytes]

        return tape.make(numel, size, (x, y), backward)

    def _elementwise(self, x: Value) -> Value:
        """A new tensor that saves nothing: scaled, shifted, or laid out in another order."""
        tape, num_bytes = self.tape, x.numel * x.size
        return tape.make(x.numel, x.size, (x,), lambda gradient: (tape.hold(num_bytes),))

    def laid_out(self, x: Value) -> Value:
        """Heads side by side, as a product gave them; their gradient comes head by head, and is copied back."""
        tape, num_bytes = self.tape, x.numel * x.size
        return tape.make(x.numel, x.size, (x,), lambda gradient: (tape.hold(num_bytes),), x.buffer)
