"""`adafrugal plan`: will it fit, what dominates, what would each change save, and how large a model for this budget."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from adafrugal.core.errors import ConfigError, nearest_name
from adafrugal.data.libraries import load_library
from adafrugal.laws.scaling import DEFAULT_LAW, LAWS, KaplanLaw, RepeatedDataLaw
from adafrugal.plan.parallel import Layout
from adafrugal.plan.planner import FRAMES, NEAR, Candidate, Plan, Request, longest_that_fits, plan
from adafrugal.plan.units import format_bytes, parse_bytes
from adafrugal.train.planning import PLANNED_METHODS, methods_of, shape_of, train_options

_TERMS = ("weight", "gradient", "state", "index", "activation", "temporary")
_SHOWN = 12


def run_plan(
    model: str = "tiny",
    memory: str = "",
    length: int | None = None,
    sequences: int = 8,
    optim: tuple[str, ...] = PLANNED_METHODS,
    clip: bool = True,
    processes: int = 1,
    parallel: Literal["none", "ddp", "fsdp2"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    flops: float | None = None,
    seconds: float | None = None,
    flops_per_second: float | None = None,
    unique_tokens: float | None = None,
    law: str = DEFAULT_LAW,
    as_json: bool = False,
    save: str | None = None,
) -> str:
    """Say what fits, what is fastest, and why.

    Args:
        model: A preset, a folder with a config.json, or a hub id.
        memory: The limit of one process, such as 24GiB or 24GB.
        length: Tokens of a window; None takes the model's positions.
        sequences: Windows of an optimizer step, on all processes together.
        optim: Optimizers to consider, in the order in which they are preferred where speed is alike.
        clip: Whether gradients are clipped by a global norm; without it an update may be fused into backward.
        processes: How many train together.
        parallel: ddp or fsdp2; None is ddp for several processes.
        device: Whose frame and temporaries are meant; auto is the best that is here.
        flops: A budget to find the best size for.
        seconds: A budget in time; needs flops_per_second.
        flops_per_second: What the machine reaches in training.
        unique_tokens: Different tokens that there are.
        law: Of docs/scaling_laws.md.
        as_json: Print JSON for programs.
        save: Write the recommendation as a YAML file for adafrugal train --config.

    Returns:
        What is printed.

    Raises:
        ConfigError: For what cannot be planned.
    """
    if not memory:
        raise ConfigError(
            "adafrugal plan", "no --memory", "a limit such as 24GiB", "Say how much one process may hold."
        )
    limit = parse_bytes(memory, "--memory")
    if processes < 1 or sequences < 1 or sequences % processes:
        raise ConfigError(
            f"--sequences {sequences} --processes {processes}",
            f"{sequences} windows on {processes} processes",
            "as many windows for each process, at least one",
            f"Set --sequences {max(1, processes) * max(1, -(-sequences // max(1, processes)))}.",
        )
    shape = shape_of(model, length)
    kind = parallel or ("none" if processes == 1 else "ddp")
    here: Any = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    request = Request(
        shape=shape,
        memory_bytes=limit,
        sequence_length=length or min(shape.max_sequence_length, 2048),
        sequences=sequences // processes,
        methods=methods_of(optim),
        layout=Layout(kind=kind, num_processes=processes),
        device=here,
        clips=clip,
    )
    found = plan(request)
    budget = _compute(flops, seconds, flops_per_second)
    advice = _optimum(law, budget, unique_tokens, shape.num_parameters)
    if save is not None:
        _save(save, model, found, sequences, clip, budget)
    if as_json:
        return json.dumps(_as_plain(model, found, advice), indent=2)
    return "\n".join([*_lines(model, found), *_advice_lines(advice), *([f"saved: {save}"] if save else [])])


def _compute(flops: float | None, seconds: float | None, flops_per_second: float | None) -> float | None:
    if seconds is None:
        return flops
    if flops_per_second is None:
        raise ConfigError(
            f"--seconds {seconds:g}",
            "seconds without a speed",
            "seconds with --flops_per_second",
            "Take flops / seconds from the summary.json of a short run on this machine.",
        )
    return min(seconds * flops_per_second, math.inf if flops is None else flops)


def _save(path: str, model: str, found: Plan, sequences: int, clip: bool, budget: float | None) -> None:
    if found.recommended is None:
        raise ConfigError(f"--save {path}", "nothing that fits", "a plan that fits", "Raise --memory.")
    yaml: Any = load_library("yaml", "saving a plan")
    limits = {} if budget is None else {"flops": budget}
    options = train_options(model, found.recommended, sequences=sequences, clips=clip, budget=limits)
    Path(path).write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")


# --- how large a model ------------------------------------------------------------------------------------------------


def _optimum(
    name: str, budget: float | None, unique_tokens: float | None, num_parameters: int
) -> dict[str, Any] | None:
    """The best size and tokens for a budget under a law, and what the other laws say."""
    if budget is None:
        if unique_tokens is not None:
            raise ConfigError(
                f"--unique_tokens {unique_tokens:g}", "tokens without compute", "a budget beside them", "Give --flops."
            )
        return None
    chosen = "muennighoff" if unique_tokens is not None and name == DEFAULT_LAW else name
    by_law: dict[str, tuple[float, float]] = {}
    for each in LAWS.names():
        law = LAWS.create(each)
        if isinstance(law, RepeatedDataLaw):
            split = law.optimum(budget, unique_tokens=unique_tokens)
        else:
            split = law.optimum(budget, max_tokens=unique_tokens)
        by_law[each] = (split.num_parameters, split.tokens)
    law = LAWS.create(chosen)
    best = by_law[chosen]
    others = [pair for each, pair in by_law.items() if not isinstance(LAWS.create(each), KaplanLaw)]
    own_tokens = budget / (6 * num_parameters)
    return {
        "law": chosen,
        "flops": budget,
        "unique_tokens": unique_tokens,
        "num_parameters": best[0],
        "tokens": best[1],
        "num_parameters_range": [min(n for n, _ in others), max(n for n, _ in others)],
        "tokens_range": [min(d for _, d in others), max(d for _, d in others)],
        "by_law": {each: {"num_parameters": n, "tokens": d} for each, (n, d) in by_law.items()},
        "assumptions": "C = 6 N D; loss of each paper's text; the range is over all laws here but Kaplan's",
        "caveats": list(law.caveats(num_parameters=best[0], tokens=best[1], flops=budget)),
        "this_model": {"num_parameters": num_parameters, "tokens": own_tokens},
    }


def _advice_lines(advice: dict[str, Any] | None) -> list[str]:
    if advice is None:
        return []
    low, high = advice["num_parameters_range"]
    least, most = advice["tokens_range"]
    mine = advice["this_model"]
    best = f"{advice['num_parameters']:.3g} parameters and {advice['tokens']:.3g} tokens"
    return [
        "",
        f"{advice['flops']:.3g} FLOPs are best spent, by {advice['law']}, on {best}",
        f"  other laws say {low:.3g} to {high:.3g} parameters, {least:.3g} to {most:.3g} tokens",
        f"  this model, {mine['num_parameters']:.3g} parameters, would see {mine['tokens']:.3g} tokens",
        *(f"  {note}" for note in advice["caveats"]),
    ]


# --- showing ----------------------------------------------------------------------------------------------------------


def _terms(candidate: Candidate) -> dict[str, int]:
    return {term: getattr(candidate.peak, f"{term}_bytes") for term in _TERMS}


def _dominant(candidate: Candidate) -> str:
    terms = _terms(candidate)
    name = max(terms, key=lambda term: terms[term])
    plural = {"activation": "activations", "temporary": "temporaries", "state": "optimizer state", "index": "frames"}
    return f"{plural.get(name, name + 's')} ({terms[name] / candidate.needed_bytes:.0%})"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _lines(model: str, found: Plan) -> list[str]:
    request = found.request
    frame = FRAMES[request.device]
    batch = f"windows of {request.sequence_length}, {request.sequences} a step on each process"
    libraries = f"{format_bytes(frame.fixed_bytes)} of libraries, {frame.fraction:.0%} for the allocator"
    lines = [
        f"{model}: {request.shape.num_parameters:,} parameters, {batch}",
        (
            f"{format_bytes(request.memory_bytes)} on {request.device}, without {libraries}: "
            f"{format_bytes(found.usable_bytes)} to plan with"
        ),
        "",
    ]
    best = found.recommended
    if best is None:
        least = found.smallest
        needs = f"which needs {format_bytes(least.needed_bytes)}; most of it is {_dominant(least)}"
        missing = f"nothing fits: {format_bytes(found.missing_bytes)} are missing for the smallest"
        return [*lines, f"{missing}, {least.words()}, {needs}", f"nearest: {_nearest(found)}"]
    rows = [["", "needs", "weights", "gradients", "optimizer", "activations", "cost"]]
    for one in found.fitting[:_SHOWN]:
        peak = one.peak
        cells = [
            one.needed_bytes,
            peak.weight_bytes,
            peak.gradient_bytes,
            peak.state_bytes + peak.index_bytes,
            peak.activation_bytes + peak.temporary_bytes,
        ]
        cost = one.relative_cost / found.fitting[0].relative_cost
        rows.append([one.words(), *map(format_bytes, cells), f"{cost:.2f}"])
    lines += [*_columns(rows)]
    if len(found.fitting) > _SHOWN:
        lines.append(f"  and {len(found.fitting) - _SHOWN} more")
    most = f"at its most in {best.peak.peak_phase}; most of it is {_dominant(best)}"
    lines += [
        "",
        f"recommended: {best.words()}",
        f"  it needs {format_bytes(best.needed_bytes)}, {most}",
        f"  of what fits within {NEAR:.0%} of the least FLOPs and bytes moved a token, its optimizer is preferred",
        "  each change by itself would save:",
        *_columns([[change.what, format_bytes(change.saved_bytes)] for change in found.changes]),
    ]
    return lines


def _nearest(found: Plan) -> str:
    """The change that comes nearest to making it fit."""
    request = found.request
    shorter = longest_that_fits(request)
    if shorter is not None:
        return f"windows of {shorter} tokens fit"
    if request.layout.kind == "none" and request.clips:
        fused = plan(replace(request, clips=False, sequences=1))
        if fused.recommended is not None:
            return f"--clip false --sequences 1 fits, with no gradient held: {fused.recommended.words()}"
    for processes in (2, 4, 8, 16, 32, 64):
        if plan(replace(request, layout=Layout(kind="fsdp2", num_processes=processes))).fitting:
            return f"it fits on {processes} processes of this size with --parallel fsdp2"
    return "a smaller model; not even 64 processes of this size hold it"


def _as_plain(model: str, found: Plan, advice: dict[str, Any] | None) -> dict[str, Any]:
    def plain(one: Candidate) -> dict[str, Any]:
        setting = one.setting
        return {
            "optimizer": one.method,
            "precision": setting.precision,
            "micro_batch": setting.micro_batch,
            "accumulation": setting.accumulation,
            "checkpointing": setting.checkpointing,
            "fused_backward": setting.fused_backward,
            "needed_bytes": one.needed_bytes,
            "bytes": _terms(one),
            "peak_phase": one.peak.peak_phase,
            "step_flops": one.step_flops,
            "relative_cost": one.relative_cost,
        }

    best = found.recommended
    return {
        "model": model,
        "num_parameters": found.request.shape.num_parameters,
        "memory_bytes": found.request.memory_bytes,
        "usable_bytes": found.usable_bytes,
        "device": found.request.device,
        "fits": bool(found.fitting),
        "recommended": None if best is None else plain(best),
        "dominant": _dominant(best or found.smallest),
        "missing_bytes": found.missing_bytes,
        "nearest": None if best is not None else _nearest(found),
        "savings": [{"change": c.what, "saved_bytes": c.saved_bytes} for c in found.changes],
        "fitting": [plain(one) for one in found.fitting],
        "optimum": advice,
        "speed_is": "ranked by counted FLOPs and bytes moved, not measured",
    }


def plan_command(words: Sequence[str]) -> str:
    """Read the words after ``adafrugal plan`` and answer.

    Args:
        words: Options of `run_plan`; dashes and underscores in names are alike, and --json is a switch.

    Returns:
        What is printed.

    Raises:
        ConfigError: For an unknown option, naming the nearest, and for values that cannot be.
    """
    jsonargparse: Any = load_library("jsonargparse", "the command line")

    class Parser(jsonargparse.ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise ConfigError(
                "adafrugal plan", " ".join(message.split()), "what adafrugal plan --help lists", "Correct the option."
            )

    parser = Parser(prog="adafrugal plan", description="What fits into memory, what dominates, and what to train.")
    parser.add_function_arguments(run_plan, skip={"as_json"})
    names = [name for name in inspect.signature(run_plan).parameters if name != "as_json"]
    kept: list[str] = []
    for word in words:
        if not word.startswith("--"):
            kept.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        plain = name.replace("-", "_")
        if plain not in (*names, "json", "help"):
            raise ConfigError(
                f"adafrugal plan --{name}",
                name,
                f"one of {', '.join(names)}, json",
                f"Correct the name.{nearest_name(plain, (*names, 'json'))}",
            )
        if plain != "json":
            kept.append(f"--{plain}{equals}{value}")
    parsed = parser.parse_args(kept)
    values = {name: getattr(parsed, name) for name in names}
    values["optim"] = tuple(values["optim"])
    return run_plan(**values, as_json="--json" in words)
