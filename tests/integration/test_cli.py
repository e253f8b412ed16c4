"""The command line: what it says to a mistake, and what it makes of every way to write a value."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from adafrugal.cli import annotated_yaml, as_yaml, main, train_parser
from adafrugal.train.config import TrainConfig
from adafrugal.train.console import LiveConsole, PlainConsole, Status, open_console

ROOT = Path(__file__).parents[2]


def refused(capsys, *words: str) -> str:
    """The one line that a mistake is answered with."""
    assert main(["train", *words]) == 2
    out = capsys.readouterr()
    lines = out.err.strip().splitlines()
    assert len(lines) == 1, out.err
    assert lines[0].startswith("adafrugal: ")
    for part in ("received", "allowed is"):
        assert part in lines[0]
    return lines[0]


@pytest.mark.parametrize(("words", "message"), [
    (["--optim.name", "adafrugl"], "Did you mean 'adafrugal'?"),
    (["--optim.densty", "0.1"], "Did you mean 'optim.density'?"),
    (["--optm.lr", "3"], "Did you mean 'optim.lr'?"),
    (["--optim.name", "adamw", "--optim.density", "0.1"], "a setting of adamw: lr, embedding_lr, weight_decay, betas"),
    (["--optim.name", "badam", "--optim.embedding_lr", "1"], "Leave --optim.embedding_lr out"),
    (["--optim.moving_gap", "false", "--optim.update_gap_max", "9"], "Leave --optim.update_gap_max out"),
    (["--optim.density", "1.5"], "--optim.density 1.5: received 1.5; allowed is a share in [0, 1]"),
    (["--optim.density", "-0.1"], "a share in [0, 1]"),
    (["--optim.subspace", "colums"], "Did you mean 'columns'?"),
    (["--optim.lr", "fast"], "--optim.lr fast: received fast; allowed is a number or null"),
    (["--budget.steps", "ten"], "a whole number or null"),
    (["--budget.steps", "0"], "a positive number"),
    (["--budget.seconds", "-3"], "a positive number"),
    (["--schedule.shape", "linear"], "one of cosine, hold"),
    (["--schedule.warmup", "2"], "a share in [0, 1]"),
    (["--weights", "int8"], "one of float32, bfloat16"),
    (["--model", "llama-13m"], "Did you mean 'llama-130m'?"),
    (["--model", "./no/such/folder"], "a preset, a folder that exists, or a hub id"),
    (["--model", "tiny", "--batch.sequence_length", "1"], "a number of at least 2"),
    (["--batch.micro_sequences", "9"], "at most the 4 windows of a step"),
    (["--vocab_size", "100"], "257 ids for a model with a vocabulary of 100"),
    (["--fused_backward", "true"], "no clipping by a global norm"),
    (["--fused_backward", "true", "--max_grad_norm", "0", "--batch.micro_sequences", "2"], "one backward for each"),
    (["--fused_backward", "true", "--optim.name", "sgd", "--optim.update_gap=null", "--optim.update_gap_max=null"],
     "one of the package's own"),
    (["--device", "gpu"], "auto, cpu, or a device of this machine"),
    (["--text.source", "/no/such/file.txt"], "--text.source '/no/such/file.txt'"),
    (["--text.source", "stdlb"], "Did you mean 'stdlib'?"),
    (["--batch.sequence_length", "100000"], "shorter than one sequence"),
    (["--tokenizer.name", "./nowhere"], "a folder that holds a tokenizer"),
    (["--tokenizer.train", "10"], "--tokenizer.train 10"),
    (["--config", "/no/such.yaml"], "Check the path and the file"),
])  # fmt: skip
def test_mistakes_are_one_clear_sentence_before_anything_is_trained(words, message, options, capsys, tmp_path) -> None:
    folder = tmp_path / "never"
    assert message in refused(capsys, "--out", str(folder), *options, *words)
    assert not folder.exists()


@pytest.mark.parametrize(("name", "content", "message"), [
    ("empty.txt", b"", "no text"),
    ("latin.txt", "na\xefve caf\xe9\n".encode("latin-1") * 50, "iconv -f LATIN1 -t UTF-8"),
    ("broken.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2"),
    ("fields.jsonl", b'{"body": "fine"}\n', "body"),
    ("short.txt", b"three words only\n", "shorter than one sequence"),
    ("picture.png", b"\x89PNG", "picture.png"),
])  # fmt: skip
def test_text_that_cannot_be_used_is_named(name, content, message, options, capsys, tmp_path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert message in refused(capsys, "--out", str(tmp_path / "never"), *options, "--text.source", str(path))
    assert not (tmp_path / "never").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(options, capsys, tmp_path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x" * 1000)
    path.chmod(0)
    assert "secret.txt" in refused(capsys, "--out", str(tmp_path / "never"), *options, "--text.source", str(path))


def test_a_folder_that_holds_a_run_is_not_overwritten(train, options, capsys) -> None:
    run = train("run", "--budget.steps", "2")
    capsys.readouterr()
    line = refused(capsys, "--out", str(run.folder), *options)
    assert f"Choose another --out, or go on with --resume {run.folder}" in line


@pytest.mark.parametrize(("written", "value"), [
    ("1e-5", 1e-5), (".1", 0.1), ("1e5", 1e5), ("3", 3.0), ("null", None), ("~", None),
])  # fmt: skip
def test_numbers_in_yaml_are_numbers(written, value, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"optim:\n  lr: {written}\n")
    parsed = train_parser().parse_args(["--config", str(path)])
    assert parsed.optim.lr == value
    assert type(parsed.optim.lr) is type(value)


@pytest.mark.parametrize("written", ["true", "false"])
def test_switches_in_yaml_are_switches(written, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"autocast: {written}\n")
    assert train_parser().parse_args(["--config", str(path)]).autocast is (written == "true")


@pytest.mark.parametrize("written", ["[0.8, 0.95]", "(0.8, 0.95)", "[8e-1,.95]"])
def test_pairs_may_be_written_as_lists_or_tuples(written) -> None:
    for words in (["--optim.betas", written], [f"--optim.betas={written}"]):
        assert tuple(train_parser().parse_args(as_yaml(words)).optim.betas) == (0.8, 0.95)


def test_pythons_own_words_are_understood() -> None:
    words = ["--optim.lr", "None", "--autocast", "True", "--text.paths", "('a', 'b')", "--out", "(x)", "--seed=3"]
    parsed = train_parser().parse_args(as_yaml(words))
    assert (parsed.optim.lr, parsed.autocast, tuple(parsed.text.paths)) == (None, True, ("a", "b"))


def test_an_unknown_key_in_a_file_is_named_with_its_file(options, capsys, tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("optim:\n  learning_rate: 1e-3\n")
    line = refused(capsys, *options, "--config", str(path))
    assert f"--config {path} with optim.learning_rate" in line
    path.write_text("- a\n- b\n")
    assert "a mapping of options" in refused(capsys, *options, "--config", str(path))
    path.write_text("a: [1\n")
    assert "a YAML file of options" in refused(capsys, *options, "--config", str(path))


def test_the_written_configuration_reads_back_to_itself(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(annotated_yaml(TrainConfig(seed=4, max_grad_norm=0.5), {"seed": "command line"}))
    content = yaml.safe_load(path.read_text())
    assert content["seed"] == 4
    parser = train_parser()
    made = parser.instantiate(parser.parse_args(["--config", str(path)]))
    assert (made.seed, made.max_grad_norm, made.optim, made.text) == (4, 0.5, TrainConfig().optim, TrainConfig().text)


def test_every_recipe_parses() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.yaml"))
    assert recipes
    for path in recipes:
        parser = train_parser()
        parser.instantiate(parser.parse_args(["--config", str(path)]))


def test_commands_and_their_help(capsys) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("adafrugal 0.")
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "Starting share of each matrix" in text, "help comes from the docstrings"
    with pytest.raises(SystemExit):
        main(["train", "--optim.lr", "2e-3", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["optim"]["lr"] == 2e-3


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "adafrugal", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("adafrugal 0.")


STATUS = Status(
    step=120, progress=0.25, binding="seconds", loss=2.345678, bits_per_byte=3.21, tokens_per_second=15000.4,
    density=0.225, update_gap=300, state_bytes=2_140_000, elapsed_seconds=30.0,
)  # fmt: skip


def test_plain_lines_hold_everything_and_are_rare() -> None:
    stream = io.StringIO()
    console = open_console(stream)
    assert isinstance(console, PlainConsole)
    for _ in range(50):
        console.show(STATUS)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    for words in ("step 120", "loss 2.346", "3.210 bits/byte", "15,000 tokens/s", "density 0.225", "gap 300",
                  "optimizer 2.14 MB", "75% of seconds left", "1:30 to go"):  # fmt: skip
        assert words in lines[0]


def test_a_terminal_gets_a_live_bar_and_is_left_as_it_was() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        console = open_console(stream)
        assert isinstance(console, LiveConsole)
        console.show(STATUS)
        console.say("a line that stays [not markup]")
        console.table("title", [("name", "value")])
        console.close()
        stream.flush()
        shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert "step 120" in shown
    assert "a line that stays [not markup]" in shown
    assert "value" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h"), "the cursor is back"


def test_a_run_can_be_sent_to_a_tracker(train) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("accelerate")
    run = train("run", "--budget.steps", "4", "--track", "tensorboard")
    assert list(run.folder.rglob("events.out.tfevents*"))


def test_a_tracker_that_is_not_installed_is_named(options, capsys, tmp_path) -> None:
    pytest.importorskip("accelerate")
    line = refused(capsys, "--out", str(tmp_path / "never"), *options, "--track", "wandb")
    assert "wandb, whose package is not installed" in line
