"""From a model to parameter groups: which parameters split, which stay stateful, and why. Every one is claimed once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from torch import Tensor, nn

from adafrugal.core.errors import ConfigError, nearest_name

Role = Literal["split", "stateful", "stateless"]
ROLES: tuple[Role, ...] = ("split", "stateful", "stateless")
Group = dict[str, Any]

_WRAPPERS = re.compile(r"(^module\.|_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.)")
_HEAD_NAMES = {"lm_head", "head", "heads", "classifier", "score", "embed_out", "qa_outputs", "output_projection"}
_EMBEDDING_NAMES = ("embed", "wte", "wpe", "shared.weight")
_THINNEST = 16


def canonical_name(name: str) -> str:
    """A parameter's name without what wrappers put into it (DDP, compile, checkpointing, FSDP).

    Example:
        >>> canonical_name("module._orig_mod.layers.0._checkpoint_wrapped_module.q.weight")
        'layers.0.q.weight'
    """
    previous = ""
    while previous != name:
        previous, name = name, _WRAPPERS.sub("", name)
    return name


@dataclass(frozen=True)
class _Claim:
    """What one parameter is, decided by the first rule that matched."""

    role: Role
    label: Literal["matrices", "embeddings", "vectors"]
    stacked: bool
    why: str


@dataclass(frozen=True)
class _Owner:
    """A module that holds a parameter, and the name it has there."""

    module: nn.Module
    name: str


def param_groups(
    model: nn.Module,
    *,
    embedding_lr: float | None = None,
    weight_decay: float | None = None,
    vector_weight_decay: float | None = None,
    rules: Mapping[str, Role] | None = None,
) -> list[Group]:
    """Sort a model's trainable parameters into matrices that split, embeddings and head, and vectors.

    The first match decides: your rule, then the module's type, then the shape. Linear weights inside the blocks (and
    transformers' Conv1D, convolutions flattened, attention's packed projections) split; 3-D expert tensors split as
    stacks of matrices. Embeddings, the output head, norms, biases, adapters, anything thinner than 16, and what lies
    outside the blocks stay stateful. Tied weights count once.

    Args:
        model: Any module, wrapped or not.
        embedding_lr: A learning rate of their own for embeddings and head, whose best rate differs from the
            matrices' by a factor of 4 to 10; None gives them the optimizer's.
        weight_decay: For matrices and embeddings; None gives them the optimizer's.
        vector_weight_decay: For norms and biases, often 0; None gives them ``weight_decay``.
        rules: From a pattern over canonical names (``"*.router.*"``) to ``"split"``, ``"stateful"`` or
            ``"stateless"``. A pattern that matches nothing is an error.

    Returns:
        Up to three groups (more where ``rules`` ask for it), each with names, the reason for each parameter, and its
        place in ``model.parameters()``.

    Raises:
        ConfigError: If nothing is trainable, nothing splits (lists the module types found), a rule matches nothing, or
            a parameter is complex.

    Example:
        >>> for group in param_groups(nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.LayerNorm(32))):
        ...     print(group["label"], group["role"], group["param_names"])
        matrices split ['1.weight']
        embeddings stateful ['0.weight']
        vectors stateful ['1.bias', '2.weight', '2.bias']
    """
    owners: dict[int, list[_Owner]] = {}
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
    for module_name, module in modules:
        for name, param in module.named_parameters(recurse=False):
            full = canonical_name(f"{module_name}.{name}" if module_name else name)
            owners.setdefault(id(param), []).append(_Owner(module, full))
    sight = _Sight.of(model)
    patterns: dict[str, Role] = dict(rules or {})
    unused = set(patterns)
    groups: dict[tuple[str, str], Group] = {}
    num_frozen = num_parameters = 0
    for index, param in enumerate(model.parameters()):
        num_parameters += 1
        if not param.requires_grad:
            num_frozen += 1
            continue
        held = owners[id(param)]
        claim = _claim(param, held, sight, patterns, unused)
        group = groups.setdefault(
            (claim.label, claim.role),
            {"params": [], "param_names": [], "label": claim.label, "role": claim.role, "stacked": [], "reasons": []},
        )
        group.setdefault("param_index", []).append(index)
        group["params"].append(param)
        group["param_names"].append(held[0].name)
        group["stacked"].append(claim.stacked)
        group["reasons"].append(claim.why)
    if unused:
        names = [owner.name for held in owners.values() for owner in held]
        raise ConfigError(
            f"param_groups(rules={{{sorted(unused)[0]!r}: ...}})",
            sorted(unused)[0],
            "a pattern that matches at least one trainable parameter",
            f"The model has {', '.join(names[:4])}, ...{nearest_name(sorted(unused)[0], names)}",
        )
    order = ("matrices", "embeddings", "vectors")
    found = sorted(groups.values(), key=lambda group: (order.index(group["label"]), ROLES.index(group["role"])))
    _refuse_unsplit(model, found)
    for group in found:
        group["named"] = True
        group["num_in_model"] = num_parameters
        group["num_frozen"] = num_frozen
        decay = vector_weight_decay if group["label"] == "vectors" and vector_weight_decay is not None else weight_decay
        if decay is not None:
            group["weight_decay"] = decay
        if embedding_lr is not None and group["label"] == "embeddings":
            group["lr"] = embedding_lr
    return found


@dataclass(frozen=True)
class _Sight:
    """What has to be known of the whole model to judge one parameter."""

    embedding_ids: frozenset[int]
    vocabularies: frozenset[int]
    last_linear: nn.Module | None
    has_blocks: bool

    @classmethod
    def of(cls, model: nn.Module) -> _Sight:
        tables = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        names = [canonical_name(name) for name, _ in model.named_parameters()]
        return cls(
            frozenset(id(table.weight) for table in tables),
            frozenset(table.num_embeddings for table in tables),
            next((m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), None),
            any(_in_block(name) for name in names),
        )


def _in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _claim(
    param: Tensor, held: Sequence[_Owner], sight: _Sight, patterns: Mapping[str, Role], unused: set[str]
) -> _Claim:
    """Decide what a parameter is: user rule, module type, shape."""
    owner = held[0]
    if param.is_complex():
        raise ConfigError(
            f"param_groups(model) at {owner.name}", str(param.dtype), "a real floating dtype", "Train real weights."
        )
    typed = _by_type(param, held, sight)
    for pattern, role in patterns.items():
        if any(fnmatchcase(one.name, pattern) for one in held):
            unused.discard(pattern)
            if role not in ROLES:
                raise ConfigError(
                    f"param_groups(rules={{{pattern!r}: ...}})", role, f"one of {', '.join(ROLES)}", "Name a role."
                )
            label = "matrices" if role == "split" and typed.label == "vectors" else typed.label
            return _Claim(role, label, typed.stacked, f"rule {pattern!r}")
    return typed


def _by_type(param: Tensor, held: Sequence[_Owner], sight: _Sight) -> _Claim:
    name, module = held[0].name, held[0].module
    kind = type(module).__name__
    parts = name.split(".")
    if id(param) in sight.embedding_ids:
        tied = " (tied)" if len(held) > 1 else ""
        return _Claim("stateful", "embeddings", False, f"embedding{tied}")
    if param.ndim < 2 or param.numel() == 0:
        return _Claim("stateful", "vectors", False, f"{param.ndim}-D parameter of {kind}")
    if "lora_" in name:
        return _Claim("stateful", "matrices", False, "low-rank adapter")
    linear = isinstance(module, nn.Linear) or kind == "Conv1D"
    out_features = param.shape[1] if kind == "Conv1D" else param.shape[0]
    inside = _in_block(name) or not sight.has_blocks
    outside = not _in_block(name)
    over_vocabulary = out_features in sight.vocabularies and (outside or module is sight.last_linear)
    if linear and (over_vocabulary or (outside and _HEAD_NAMES & set(parts[:-1]))):
        return _Claim("stateful", "embeddings", False, "output head")
    if not inside:
        return _Claim("stateful", "vectors", False, f"{kind} outside the blocks")
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    stacked = param.ndim == 3 and not convolution and "expert" in f"{kind}.{name}".lower()
    rows, cols = (param.shape[1], param.shape[2]) if stacked else (param.shape[0], param.numel() // param.shape[0])
    if min(rows, cols) < _THINNEST:
        return _Claim("stateful", "vectors", False, f"thinner than {_THINNEST}")
    if linear:
        return _Claim("split", "matrices", False, f"{kind} in a block")
    if convolution:
        return _Claim("split", "matrices", False, f"{kind} flattened to (out, rest)")
    if stacked:
        return _Claim("split", "matrices", True, f"stack of {param.shape[0]} expert matrices")
    if param.ndim == 2 and "weight" in parts[-1]:
        return _Claim("split", "matrices", False, f"2-D weight of {kind}")
    return _Claim("stateful", "vectors", False, f"{param.ndim}-D parameter of {kind}, no known matrix")


def _refuse_unsplit(model: nn.Module, groups: Sequence[Group]) -> None:
    """A model in which nothing splits is an error, unless it trains low-rank adapters only."""
    reasons = {reason for group in groups for reason in group["reasons"]}
    if any(group["role"] == "split" for group in groups) or "low-rank adapter" in reasons:
        return
    if any(reason.startswith("rule ") for reason in reasons):
        return
    kinds = Counter(
        type(m).__name__ for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))
    )
    listed = (
        ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8)) or "no module with a trainable parameter"
    )
    raise ConfigError(
        "param_groups(model)",
        listed,
        "at least one trainable weight matrix that splits",
        'Unfreeze matrices, or name them: param_groups(model, rules={"*.my_layer.weight": "split"}).',
    )


def as_groups(params: object) -> list[Group]:
    """Turn what a user hands to an optimizer into groups with roles, names and reasons.

    Args:
        params: A model, parameters, (name, parameter) pairs, or groups as dictionaries. A dictionary without
            ``subspace`` and ``role`` is split by shape: matrices apart from the rest.

    Raises:
        TypeError: For a set or a lone tensor, as torch does.
        ConfigError: If there is no parameter.
    """
    if isinstance(params, nn.Module):
        return param_groups(params)
    if isinstance(params, Tensor):
        raise TypeError(
            "optimizer parameters must be an iterable of tensors, names and tensors, or groups; got a tensor"
        )
    if isinstance(params, (set, frozenset)):
        raise TypeError("optimizer parameters need an order, and a set has none; hand over a list")
    items = list(cast(Iterable[Any], params))
    if not items:
        raise ConfigError("optimizer(params)", "an empty list", "a model, parameters or groups", "Unfreeze something.")
    if not isinstance(items[0], dict):
        items = [{"params": items}]
    groups: list[Group] = []
    offset = 0
    for item in cast(list[Group], items):
        groups += split_by_shape(item, offset)
        offset = sum(len(group["params"]) for group in groups)
    return groups


def split_by_shape(group: Group, offset: int = 0) -> list[Group]:
    """Complete a user's group; where it says neither role nor subspace, sort its parameters by shape.

    Args:
        group: With ``params``: a tensor, tensors, or (name, tensor) pairs.
        offset: How many parameters were handed over before these.
    """
    params: Any = group["params"]
    if isinstance(params, (set, frozenset)):
        raise TypeError("optimizer parameters need an order, and a set has none; hand over a list")
    given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    names = [canonical_name(str(item[0])) for item in given if isinstance(item, tuple)]  # pyright: ignore
    tensors: list[Tensor] = [item[1] if isinstance(item, tuple) else item for item in given]  # pyright: ignore
    group = {**group, "params": tensors}
    if "param_names" in group:
        names = [canonical_name(name) for name in group["param_names"]]
    if names and len(names) != len(tensors):
        raise ConfigError(
            "optimizer(params)",
            f"{len(names)} names for {len(tensors)} tensors",
            "a name for each",
            "Name all or none.",
        )
    group["param_names"] = names
    group.setdefault("named", bool(names))
    group.setdefault("param_index", list(range(offset, offset + len(tensors))))
    group.setdefault("num_frozen", 0)
    group.setdefault("num_in_model", 0)
    if "role" in group or "subspace" in group:
        group.setdefault("role", "split")
        group.setdefault("label", "matrices")
        group.setdefault("stacked", [t.ndim == 3 for t in tensors])
        group.setdefault("reasons", ["group says so"] * len(tensors))
        return [group]
    claims = [_by_shape(t, names[i] if names else "") for i, t in enumerate(tensors)]
    parts: list[Group] = []
    for role in ("split", "stateful"):
        chosen = [i for i, claim in enumerate(claims) if claim.role == role]
        if chosen:
            part = {**group, "role": role, "label": "matrices" if role == "split" else "vectors"}
            for key, values in (("params", tensors), ("param_names", names), ("param_index", group["param_index"])):
                part[key] = [values[i] for i in chosen] if values else []
            part["stacked"] = [claims[i].stacked for i in chosen]
            part["reasons"] = [claims[i].why for i in chosen]
            parts.append(part)
    return parts


def _by_shape(param: Tensor, name: str) -> _Claim:
    """What a parameter is, judged without its module."""
    if not isinstance(param, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"optimizer can only optimize tensors, but got {type(param).__name__}")
    if param.ndim < 2 or param.numel() == 0:
        return _Claim("stateful", "vectors", False, f"{param.ndim}-D, by shape")
    head = not _in_block(name) and bool(_HEAD_NAMES & set(name.split(".")))
    if head or any(word in name for word in _EMBEDDING_NAMES):
        return _Claim("stateful", "vectors", False, "embedding or head, by name")
    stacked = param.ndim == 3
    rows, cols = param.shape[-2:] if stacked else (param.shape[0], param.numel() // param.shape[0])
    if min(rows, cols) < _THINNEST:
        return _Claim("stateful", "vectors", False, f"thinner than {_THINNEST}, by shape")
    return _Claim("split", "matrices", stacked, "matrix, by shape")
