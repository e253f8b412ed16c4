"""A small autograd that moves byte counts instead of numbers: what is saved, what is freed, and when.

A model is written down once, as the operations of its forward pass; backward follows from them, as it does in torch.
A buffer lives as long as something in Python refers to it: a local variable of the model's code, a node that saved it,
a gradient on its way. So lifetimes are those of the real step, since CPython counts references as torch does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import cast

_FIRST = sys.maxsize  # the number of a parameter's node


class Buffer:
    """Bytes that are held until the last reference goes.

    Args:
        tape: Whose bytes these are.
        num_bytes: How many.
        is_view: Whether what refers to it is a view, as of the two-dimensional product that a layer really is: torch
            adds nothing to such a gradient in place.
    """

    __slots__ = ("_tape", "is_view", "num_bytes")

    def __init__(self, tape: Tape, num_bytes: int, is_view: bool = False) -> None:
        self._tape, self.num_bytes, self.is_view = tape, num_bytes, is_view
        tape.now += num_bytes
        if tape.now > tape.peaks.get(tape.moment, (0, 0))[0]:
            tape.peaks[tape.moment] = (tape.now, tape.gradient_bytes)

    def __del__(self) -> None:
        self._tape.now -= self.num_bytes


Backward = Callable[[Buffer], Sequence["Buffer | None"]]


class Node:
    """One operation to be undone in backward: takes the gradient of its result, gives those of its inputs.

    Args:
        number: Its place in the order of forward; backward takes the highest that is ready.
        section: The part of the model that it belongs to.
        inputs: The nodes of its inputs; None where no gradient is wanted.
        backward: Gives a gradient for each input; what it saved lives in it, until it has run.

    A node may have ``unfold`` instead: it runs forward again, and gives the last node of what takes its place.
    """

    __slots__ = ("backward", "counted", "inputs", "number", "pending", "section", "unfold", "waiting")

    def __init__(self, number: int, section: str, inputs: Sequence[Node | None], backward: Backward | None) -> None:
        self.number, self.section, self.inputs = number, section, inputs
        self.backward = backward
        self.unfold: Callable[[], Node] | None = None
        self.pending: Buffer | None = None
        self.waiting = 0
        self.counted = False


class Value:
    """A tensor of the forward pass.

    Args:
        buffer: Its bytes; views share one.
        numel: Elements.
        size: Bytes of an element.
        node: What made it; None where no gradient is wanted.
    """

    __slots__ = ("buffer", "node", "numel", "size")

    def __init__(self, buffer: Buffer, numel: int, size: int, node: Node | None) -> None:
        self.buffer, self.numel, self.size, self.node = buffer, numel, size, node


class Tape:
    """What is held now, the most that was held at each moment, and which gradients are complete.

    Args:
        keeps_gradients: Whether a complete gradient stays. A fused backward uses it up at once; where gradients of
            earlier micro-batches are there already, it is added to them.
    """

    def __init__(self, keeps_gradients: bool = True) -> None:
        self.now = 0
        self.gradient_bytes = 0
        self.section = self.moment = "forward"
        self.peaks: dict[str, tuple[int, int]] = {}
        self.arrivals: dict[int, int] = {}
        self.keeps_gradients = keeps_gradients
        self._gradients: list[Buffer] = []
        self._count = self._pushed = 0

    # --- forward --------------------------------------------------------------------------------------------------

    def hold(self, num_bytes: int) -> Buffer:
        """Allocate."""
        return Buffer(self, num_bytes)

    def make(
        self, numel: int, size: int, inputs: Sequence[Value], backward: Backward, buffer: Buffer | None = None
    ) -> Value:
        """The result of an operation.

        Args:
            numel: Its elements.
            size: Bytes of each.
            inputs: The values whose gradients ``backward`` gives, in its order.
            backward: Refers to what it saves, and to nothing else.
            buffer: Of a view; None allocates.
        """
        return Value(buffer or Buffer(self, numel * size), numel, size, self.node([v.node for v in inputs], backward))

    def node(self, inputs: Sequence[Node | None], backward: Backward | None) -> Node:
        """The next node; without ``backward`` it will be given something to unfold."""
        self._count += 1
        return Node(self._count, self.section, inputs, backward)

    # --- gradients ------------------------------------------------------------------------------------------------

    def parameter(self, numel: int) -> Node:
        """The node of a parameter; it comes before all others as soon as its gradient is complete, as in torch.

        Args:
            numel: Its elements: parameters of one size are not told apart.
        """

        def complete(gradient: Buffer) -> Sequence[Buffer | None]:
            self.arrivals[numel] = max(self.arrivals.get(numel, 0), self.now)
            if self.keeps_gradients:
                self._gradients.append(gradient)
                self.gradient_bytes += gradient.num_bytes
            return ()

        return Node(_FIRST, self.section, (), complete)

    def hold_gradients(self, num_bytes: int) -> None:
        """Have gradients there: of earlier micro-batches, or of blocks that are not walked one by one."""
        self._gradients.append(self.hold(num_bytes))
        self.gradient_bytes += num_bytes

    # --- backward -------------------------------------------------------------------------------------------------

    def backward(self, root: Node) -> None:
        """Undo all nodes that lead to a root, the latest first; each lets go of what it saved when it has run.

        A gradient that arrives second is added in place if nobody else holds the first, as in torch.

        Args:
            root: The last node, with a gradient pending.
        """
        _count_users(root)
        ready: list[tuple[int, int, Node]] = []
        self._push(ready, root)
        del root
        while ready:
            node = heappop(ready)[2]
            self.moment = node.section
            if node.unfold is not None:
                unfold, node.unfold = node.unfold, None
                inner = unfold()
                del unfold
                for target in node.inputs:
                    cast(Node, target).waiting -= 1
                _count_users(inner)
                inner.pending, node.pending = node.pending, None
                self._push(ready, inner)
                del inner
                continue
            for target, part in zip(node.inputs, _run(node), strict=True):
                if target is None:
                    continue
                self._add(target, cast(Buffer, part))
                target.waiting -= 1
                if target.waiting == 0:
                    self._push(ready, target)
            part = None

    def _push(self, ready: list[tuple[int, int, Node]], node: Node) -> None:
        self._pushed += 1
        heappush(ready, (-node.number, self._pushed, node))

    def _add(self, target: Node, part: Buffer) -> None:
        if target.pending is None:
            target.pending = part
        elif target.pending.is_view or _references(target) > _ALONE:
            target.pending = self.hold(part.num_bytes)


def _references(node: Node) -> int:
    """References to a node's pending gradient, as this function sees them."""
    return sys.getrefcount(node.pending)


def _references_of_one() -> int:
    """What `_references` sees of a gradient that nothing but its node holds: it depends on the interpreter."""
    node = Node(0, "", (), None)
    node.pending = Tape().hold(0)
    return _references(node)


_ALONE = _references_of_one()


def _run(node: Node) -> Sequence[Buffer | None]:
    """Call a node once, and drop its saved buffers and the gradient that it had."""
    backward, node.backward = cast(Backward, node.backward), None
    gradient, node.pending = cast(Buffer, node.pending), None
    return backward(gradient)


def _count_users(root: Node) -> None:
    """How many gradients each node waits for, of those that lead to a root and have not been counted."""
    root.counted = True
    stack = [root]
    while stack:
        for node in stack.pop().inputs:
            if node is None:
                continue
            node.waiting += 1
            if not node.counted:
                node.counted = True
                stack.append(node)
