"""The command line. Options of `train`, YAML files and their errors all come from the configuration classes."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args, get_origin, get_type_hints

from adafrugal.core.errors import ConfigError, FourFactsError, nearest_name
from adafrugal.data.libraries import load_library
from adafrugal.optim.methods import METHODS
from adafrugal.train.config import TrainConfig, as_plain
from adafrugal.train.console import open_console
from adafrugal.train.distributed import lost_another, open_ranks, say_error
from adafrugal.train.job import CONFIG_FILE, new_folder, resolved_out, run_training

COMMANDS = {
    "train": "train a language model on text, or on labelled examples, inside a budget",
    "plan": "say what fits into memory, what dominates, and how large a model a budget is for",
}
_SECTIONS = {
    "text": "TextConfig",
    "tokenizer": "TokenizerConfig",
    "optim": "|".join(METHODS.factory(name).__name__ for name in METHODS.names()),
}
# What may differ when a run goes on: where it lives, and how much it says.
_FREE_ON_RESUME = ("out", "log_every_steps", "track", "device", "parallel")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; an error that somebody can mend is one sentence, without a traceback.

    Args:
        argv: The words after ``adafrugal``; None takes the process's own.

    Returns:
        0, or 2 after such an error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help"):
            _print_help()
            return 0
        if words[0] == "--version":
            from adafrugal import __version__

            print(f"adafrugal {__version__}")
            return 0
        if words[0] not in COMMANDS:
            raise ConfigError(
                f"adafrugal {words[0]}",
                words[0],
                f"one of {', '.join(COMMANDS)}",
                f"See adafrugal --help.{nearest_name(words[0], COMMANDS)}",
            )
        if words[0] == "plan":
            from adafrugal.cli_plan import plan_command

            print(plan_command(words[1:]))
            return 0
        return _train(words[1:])
    except FourFactsError as error:
        say_error(_as_options(str(error)))
        return 2
    except RuntimeError as error:
        if not lost_another(error):
            raise
        say_error("another process of this job has ended; its own message says why")
        return 1


def _as_options(text: str) -> str:
    """An error's text with calls of the classes behind the options turned into the options themselves.

    Example:
        >>> _as_options('Use FRUGAL(subspace="blocks", density=0.5).')
        'Use --optim.subspace "blocks" --optim.density 0.5.'
    """
    for section, classes in _SECTIONS.items():

        def written(call: re.Match[str], section: str = section) -> str:
            pairs = [pair.partition("=") for pair in re.split(r", (?=\w+=)", call.group(1))]
            return " ".join(f"--{section}.{name} {value}" for name, _, value in pairs)

        text = re.sub(rf"\b(?:{classes})\((\w+=[^()]*)\)", written, text)
    return text


def _print_help() -> None:
    print("usage: adafrugal COMMAND [options]\n\ncommands:")
    for name, what in COMMANDS.items():
        print(f"  {name:10} {what}")
    print("\nadafrugal COMMAND --help lists the options of a command.")


# --- train ------------------------------------------------------------------------------------------------------------


def train_parser() -> Any:
    """The parser of `adafrugal train`, made from `TrainConfig`."""
    jsonargparse: Any = load_library("jsonargparse", "the command line")

    class Parser(jsonargparse.ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise _as_config_error(message, ex)

    parser = Parser(prog="adafrugal train", description="Train a language model on text, inside a budget.")
    parser.add_argument("--config", action="config", help="A YAML file with any of the options below.")
    parser.add_argument("--resume", type=str | None, default=None, help="Go on with the run in this folder.")
    parser.add_class_arguments(TrainConfig)
    return parser


def _as_config_error(message: str, error: Exception | None) -> ConfigError:
    """A parser's message as one of ours."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return cause
        cause = cause.__cause__ or cause.__context__
    flat = " ".join(message.split())
    key = re.search(r'key "([^"]+)"', flat)
    value = re.search(r"(?:Given value|Got value): (.*?)(?: Given value type.*)?$", flat)
    kinds = dict(_options(TrainConfig))
    if key and value and key.group(1) in kinds:
        name, given = key.group(1), value.group(1)
        return ConfigError(
            f"--{name} {given}", given, _words(kinds[name]), "adafrugal train --help says what it is for."
        )
    return ConfigError("adafrugal train", flat, "what adafrugal train --help lists", "Correct the option.")


def _words(kind: Any) -> str:
    """What a type allows, in words."""
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    if kind in names:
        return names[kind]
    parts = get_args(kind)
    if not parts:
        return str(getattr(kind, "__name__", kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(part) for part in parts)
    if get_origin(kind) is tuple:
        inner = [part for part in parts if part is not Ellipsis]
        return f"a list of {'any length' if Ellipsis in parts else len(parts)}, each {_words(inner[0])}"
    return " or ".join(_words(part) for part in parts)


def _train(words: list[str]) -> int:
    words = as_yaml(words)
    check_names(words)
    parser = train_parser()
    parsed = parser.parse_args(words)
    resume = parsed.resume
    if resume is not None:
        config, folder, text = _resumed(parser, words, Path(resume))
    else:
        config, folder, text = _instantiate(parser, parsed).with_default_budget(), None, ""
    ranks = open_ranks(config.parallel, config.device)
    if folder is None:
        new = config
        folder = ranks.from_first(lambda: new_folder(new))
        config = resolved_out(config, folder)
        text = annotated_yaml(config, sources_of(parser, words))
    run_training(config, folder, open_console(), text, resume=resume is not None, ranks=ranks)
    return 0


def _instantiate(parser: Any, parsed: Any) -> TrainConfig:
    made = parser.instantiate(parsed)
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    return TrainConfig(**{name: getattr(made, name) for name in names})


def _resumed(parser: Any, words: list[str], folder: Path) -> tuple[TrainConfig, Path, str]:
    """The configuration of the run that goes on; options beside --resume must say the same as it does."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            f"--resume {folder}", f"{folder}, which holds no {CONFIG_FILE}", "the folder of a run", "Check the path."
        )
    saved = _instantiate(parser, parser.parse_args(["--config", str(path)]))
    wanted = _instantiate(parser, parser.parse_args(["--config", str(path), *words]))
    for name, (before, now) in _differences(as_plain(saved), as_plain(wanted)).items():
        if name not in _FREE_ON_RESUME:
            raise ConfigError(
                f"--resume {folder} --{name} {now}",
                f"{name}={now}",
                f"{name}={before}, as the run began",
                "Leave the option out to go on, or start a new run from the saved model with "
                f"--model {folder / 'model'}.",
            )
    return wanted, folder, path.read_text(encoding="utf-8")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in before.items():
        if isinstance(value, Mapping):
            found |= _differences(cast(Mapping[str, Any], value), now[name], f"{prefix}{name}.")
        elif value != now[name]:
            found[f"{prefix}{name}"] = (value, now[name])
    return found


def as_yaml(words: Sequence[str]) -> list[str]:
    """Words with Python's way to write pairs and constants turned into YAML's: ``(0.9, 0.99)``, ``None``, ``True``.

    Example:
        >>> as_yaml(["--optim.betas", "(0.9, 0.99)", "--optim.lr=None"])
        ['--optim.betas', '[0.9, 0.99]', '--optim.lr=null']
    """
    constants = {"None": "null", "True": "true", "False": "false"}

    def translated(value: str) -> str:
        if re.fullmatch(r"\(.*,.*\)", value):
            return f"[{value[1:-1]}]"
        return constants.get(value, value)

    turned: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        turned.append(f"{name}={translated(value)}" if word.startswith("--") and equals else translated(word))
    return turned


# --- names, sources, and the file that records them -----------------------------------------------------------------


def _options(config_class: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All options of a configuration class with their types, dotted, sections included."""
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kind = hints[field.name]
        yield prefix + field.name, kind
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _options(kind, f"{prefix}{field.name}.")


def check_names(words: Sequence[str]) -> None:
    """Refuse unknown options and unknown keys of YAML files, naming the nearest.

    Raises:
        ConfigError: Also for a file that is missing or no YAML.
    """
    known = [name for name, _ in _options(TrainConfig)]
    for i, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, _, value = word[2:].partition("=")
        if name == "config":
            path = value or (words[i + 1] if i + 1 < len(words) else "")
            for key in _keys(_read_yaml(path)):
                _refuse_unknown(f"--config {path} with {key}", key, known)
        elif name not in ("help", "resume", "print_config"):
            _refuse_unknown(f"--{name}", name, known)


def _refuse_unknown(call: str, name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    section = name.rpartition(".")[0]
    siblings = [one for one in known if one.rpartition(".")[0] == section] or [one for one in known if "." not in one]
    raise ConfigError(call, name, f"one of {', '.join(siblings)}", f"Correct the name.{nearest_name(name, known)}")


def _read_yaml(path: str) -> dict[str, Any]:
    yaml: Any = load_library("yaml", "reading a configuration")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = " ".join(str(error).split())
        raise ConfigError(
            f"--config {path}", first, "a YAML file of options", "Check the path and the file."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path}", type(content).__name__, "a mapping of options", "Write name: value lines."
        )
    return content  # pyright: ignore[reportUnknownVariableType]


def _keys(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, value in content.items():
        keys.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            keys += _keys(value, f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
    return keys


def sources_of(parser: Any, words: Sequence[str]) -> dict[str, str]:
    """Where each value came from, for those that are not defaults: the command line, or a file."""
    sources: dict[str, str] = {}
    i = 0
    while i < len(words):
        name, _, value = words[i][2:].partition("=")
        if words[i].startswith("--"):
            if name == "config":
                path = value or words[i + 1]
                sources |= dict.fromkeys(_keys(_read_yaml(path)), f"file {path}")
            else:
                sources[name] = "command line"
        i += 1
    return sources


def annotated_yaml(config: TrainConfig, sources: Mapping[str, str]) -> str:
    """A configuration as YAML in which every value says where it came from.

    Args:
        config: Resolved.
        sources: By dotted name; what is not in it is a default.
    """
    yaml: Any = load_library("yaml", "writing the configuration")
    lines: list[str] = []

    def write(content: Mapping[str, Any], prefix: str, indent: str) -> None:
        for name, value in content.items():
            if isinstance(value, dict):
                lines.append(f"{indent}{name}:")
                write(value, f"{prefix}{name}.", indent + "  ")  # pyright: ignore[reportUnknownArgumentType]
                continue
            text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
            section = f"{prefix}{name}".rpartition(".")[0]
            source = sources.get(f"{prefix}{name}", sources.get(section, "default"))
            lines.append(f"{indent}{name}: {text}  # {source}")

    write(as_plain(config), "", "")
    return "\n".join(lines) + "\n"
