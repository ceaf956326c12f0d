"""A run repeated from its folder: equal, or where it first differs; what cannot be repeated is refused."""

import json
import shutil

import pytest
import yaml
from conftest import read_jsonl, small

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runtime.repeat import repeat
from overlaprl_ray.runtime.serial import train_serially


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """A finished run's folder."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_serially(small(pipeline={"mode": "async", "lag": 2}, output={"dir": str(folder)}))
    return folder


def copy_of(finished, tmp_path, name, change):
    """The run's folder with one of its files changed."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    path = folder / name
    if name == "metrics.jsonl":
        rows = read_jsonl(path)
        for row in rows:
            change(row)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:  # JSON is YAML
        values = yaml.safe_load(path.read_text())
        change(values)
        path.write_text(json.dumps(values))
    return folder


def test_a_run_is_repeated_also_where_it_has_not_ended(finished, tmp_path, capsys):
    assert repeat(finished) == f"{finished}: 4 steps repeated, every row equal"
    folder = copy_of(finished, tmp_path, "environment.json", lambda values: values.update(cpu="another"))
    (folder / "metrics.jsonl").write_text("".join((folder / "metrics.jsonl").read_text().splitlines(True)[:2]) + '{"s')
    assert "2 steps repeated, every row equal" in repeat(folder)
    assert "made elsewhere (cpu)" in capsys.readouterr().err


def test_the_first_row_and_column_that_differ_are_named(finished, tmp_path):
    def change(row):
        row["loss"] += row["step"] >= 3

    with pytest.raises(RunError, match=r"step 3, column loss is .* in the run and .* in its replay"):
        repeat(copy_of(finished, tmp_path, "metrics.jsonl", change))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("metrics.jsonl", lambda row: row.pop("weights_step"), r"no record \(column weights_step\)"),
        ("metrics.jsonl", lambda row: row.update(weights_step=row["step"]), "made after step 1, which is not possible"),
        ("environment.json", lambda values: values.update(algorithm=1), "computed by algorithm 1"),
        ("environment.json", lambda values: values.update(gpus=["H200"]), r"computed on a GPU \(H200\)"),
        ("config.yaml", lambda values: values["model"].update(engine="vllm", tiny={"heads": 2}), "'vllm' cannot be"),
    ],
)
def test_what_cannot_be_repeated_is_refused(finished, tmp_path, name, change, message):
    with pytest.raises(ConfigError, match=message):
        repeat(copy_of(finished, tmp_path, name, change))
