"""Labelled texts as they are published, read without loss, and answers scored as GLUE scores them."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn.metrics")  # its first import draws from Python's global stream
pytest.importorskip("scipy.stats")

from adafrugal.core.errors import ConfigError, DataError
from adafrugal.data.labelled import TASKS, Example, LabelledTask, read_labelled
from adafrugal.data.scores import main_score, score

PUBLISHED = {
    "sst2": (
        "sentence\tlabel\nit 's a \"charming journey . \t1\nbleak\t0\n",
        [(("it 's a \"charming journey . ",), 1.0), (("bleak",), 0.0)],
    ),
    "cola": (
        "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tRode the.\n",
        [(("The sailors rode.",), 1.0), (("Rode the.",), 0.0)],
    ),
    "mrpc": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t11\t12\tHe said \" no .\tHe said no .\n",
        [(('He said " no .', "He said no ."), 1.0)],
    ),
    "stsb": (
        ("index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
         "0\tmain\tMSRvid\t2012test\t0000\tnone\tnone\tA man.\tA boy.\t4.750\n"),
        [(("A man.", "A boy."), 4.75)],
    ),
    "rte": ("index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n", [(("A.", "B."), 1.0)]),
    "qnli": ("index\tquestion\tsentence\tlabel\n0\tWhat?\tThat.\tentailment\n", [(("What?", "That."), 0.0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("kind", ["plain", "gz", "bom and crlf"])
def test_each_task_of_glue_reads_as_it_is_published(name: str, kind: str, tmp_path: Path) -> None:
    text, expected = PUBLISHED[name]
    path = tmp_path / ("dev.tsv.gz" if kind == "gz" else "dev.tsv")
    data = ("\ufeff" + text.replace("\n", "\r\n") if kind.startswith("bom") else text).encode()
    path.write_bytes(gzip.compress(data) if kind == "gz" else data)
    found = read_labelled(TASKS.create(name), str(path))
    assert found == [Example(texts=texts, target=target) for texts, target in expected]


def test_records_of_ones_own_and_labels_by_name_or_index(tmp_path: Path) -> None:
    task = LabelledTask(text_fields=("review",), label_field="mood", classes=("sad", "glad", "mad"))
    path = tmp_path / "own.jsonl"
    rows = [{"review": "a\u2028b", "mood": "glad"}, {"review": "c", "mood": 2}, {"review": "d", "mood": "sad"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert [e.target for e in read_labelled(task, str(path))] == [1.0, 2.0, 0.0]
    assert read_labelled(task, str(path), limit=1)[0].texts == ("a\u2028b",), "a line separator ends no line"


def test_a_data_set_of_the_hub_is_read_under_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"sentence1": ["x"], "sentence2": ["y"], "label": [1], "idx": [0]})
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_labelled(TASKS.create("mrpc"), "hub", "validation") == [Example(texts=("x", "y"), target=1.0)]
    assert read_labelled(TASKS.create("rte"), "someone/rte") == [Example(texts=("x", "y"), target=1.0)]
    assert asked == [("nyu-mll/glue", "mrpc", "validation"), ("someone/rte", None, "train")]


BROKEN = {
    "a missing file": ("lost.tsv", None, r"lost\.tsv', which does not exist.*Did you mean 'lots\.tsv'"),
    "another kind": ("dev.csv", "a,b", r"received dev\.csv; allowed is a file that ends in \.tsv"),
    "a missing column": (
        "dev.tsv",
        "text\tlabel\na\t1\n",
        r"line 2: received no field 'sentence', only 'text', 'label'",
    ),
    "a lost tab": ("dev.tsv", "sentence\tlabel\na 1\n", r"line 2: received 1 columns; allowed is the 2 columns"),
    "an unknown label": ("dev.tsv", "sentence\tlabel\na\t2\n", r"line 2: received label '2'; allowed is one of 0, 1"),
    "no JSON": ("dev.jsonl", "{'a': 1}", r"line 1: received no JSON"),
    "no object": ("dev.jsonl", "[1]", r"line 1: received list; allowed is a JSON object"),
    "nothing": ("dev.tsv", "sentence\tlabel\n", r"received no example; allowed is at least one"),
    "bytes": ("dev.tsv", b"sentence\tlabel\n\xff\t1\n", r"UnicodeDecodeError.*UTF-8 text"),
}


@pytest.mark.parametrize(("name", "content", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_cannot_be_read_is_named_with_its_line(name, content, message, tmp_path: Path) -> None:
    (tmp_path / "lots.tsv").write_text("sentence\tlabel\n")
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read_labelled(TASKS.create("sst2"), str(tmp_path / name))


def test_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "dev.jsonl").write_text(json.dumps({"sentence1": "a", "sentence2": "b", "score": "high"}))
    with pytest.raises(DataError, match="label 'high'; allowed is a number"):
        read_labelled(TASKS.create("stsb"), str(tmp_path / "dev.jsonl"))


def test_tasks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="one or two fields"):
        LabelledTask(text_fields=("a", "b", "c"))
    with pytest.raises(ConfigError, match="two or more labels that differ"):
        LabelledTask(text_fields=("a",), classes=("x", "x"))


def test_scores_of_classes_are_those_of_their_formulas() -> None:
    """True and false positives and negatives 3, 1, 2, 4, counted by hand."""
    expected = torch.tensor([1.0] * 5 + [0.0] * 5)
    answers = torch.tensor([1, 1, 1, 0, 0, 1, 0, 0, 0, 0])
    logits = torch.nn.functional.one_hot(answers, 2).float()
    task = LabelledTask(text_fields=("a",), classes=("0", "1"), metrics=("matthews", "f1", "accuracy"))
    found = score(task, logits, expected)
    matthews = (3 * 4 - 1 * 2) / math.sqrt((3 + 1) * (3 + 2) * (4 + 1) * (4 + 2))
    assert found == pytest.approx({"matthews": matthews, "f1": 2 * 3 / (2 * 3 + 1 + 2), "accuracy": 0.7})
    assert main_score(found) == pytest.approx((matthews + 2 / 3 + 0.7) / 3)


def test_scores_of_numbers_are_those_of_their_formulas() -> None:
    """Spearman is Pearson of the ranks; two equal values share theirs."""
    expected, answers = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 5.0, 5.0, 30.0])

    def pearson(x: torch.Tensor, y: torch.Tensor) -> float:
        x, y = (v.double() - v.double().mean() for v in (x, y))
        return float(x @ y / (x.norm() * y.norm()))

    found = score(TASKS.create("stsb"), answers.unsqueeze(1), expected)
    ranks = torch.tensor([1.0, 2.5, 2.5, 4.0])
    assert found == pytest.approx({"pearson": pearson(expected, answers), "spearman": pearson(expected, ranks)})


def test_an_undefined_score_is_zero() -> None:
    same = torch.tensor([[1.0, 0.0]] * 3)
    task = LabelledTask(text_fields=("a",), classes=("0", "1"), metrics=("matthews", "f1"))
    assert score(task, same, torch.tensor([0.0, 1.0, 0.0])) == {"matthews": 0.0, "f1": 0.0}
    assert score(TASKS.create("stsb"), torch.ones(3, 1), torch.tensor([1.0, 2.0, 3.0])) == {
        "pearson": 0.0,
        "spearman": 0.0,
    }


def test_a_metric_that_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="a task of a number: received accuracy; allowed is of pearson, spearman"):
        score(LabelledTask(text_fields=("a",)), torch.ones(2, 1), torch.ones(2))
