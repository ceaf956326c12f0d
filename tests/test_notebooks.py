"""Every notebook runs from top to bottom, on the committed results and on folders of all kinds."""

import os
import random
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from study import modes, write_run, write_sweep
from test_report import KINDS

from overlaprl_ray.reports.loading import load, save

ANALYSIS = Path(__file__).parent.parent / "analysis"
STUDIES = ("modes", "thresholds", "rules")


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ANALYSIS / f"{name}.ipynb", as_version=4)


def run(notebook: nbformat.NotebookNode, where: Path = ANALYSIS) -> nbformat.NotebookNode:
    """All cells, in a kernel of their own; an error in one is an error here."""
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(where)}}).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """What the cells showed of a kind: text/markdown, image/png or the text that was printed."""
    found = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    if kind == "printed":
        return [output.text for output in found if output.output_type == "stream" and output.name == "stdout"]
    return [output.data[kind] for output in found if kind in output.get("data", {})]


def set_folder(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Change the one cell that says where the results are."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    cell.source = f"folder = {str(folder)!r}"


@pytest.mark.parametrize("name", [*STUDIES, "overlaprl_demo"])
def test_notebooks_carry_their_output_and_no_path_of_a_machine(name):
    """So that they can be read where they lie."""
    notebook = read(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert outputs(notebook, "image/png")
    assert outputs(notebook, "text/markdown")
    assert len([cell for cell in code if "parameters" in cell.metadata.get("tags", [])]) == 1
    assert not re.search(r"/(root|home|work|tmp)/", nbformat.writes(notebook))


@pytest.mark.parametrize("name", STUDIES)
def test_studies_run_on_the_committed_results(name):
    notebook = run(read(name))
    assert outputs(notebook, "printed") == []
    assert len(outputs(notebook, "image/png")) >= 5
    tables = [text for text in outputs(notebook, "text/markdown") if text.startswith("| ")]
    assert len(tables) >= 2


@pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.ci), pytest.param(True, marks=pytest.mark.slow)]
)
def test_studies_run_on_folders_of_all_kinds(tmp_path, every):
    """One kernel runs the notebooks on every kind of folder, by turns or (slow) every one on each.

    What there is is shown, and nothing is made up.
    """
    kinds = {"empty": Path.mkdir, **KINDS}
    combined = nbformat.v4.new_notebook()
    for number, (kind, make) in enumerate(kinds.items()):
        make(tmp_path / kind)
        for name in STUDIES if every else [STUDIES[number % len(STUDIES)]]:
            notebook = read(name)
            set_folder(notebook, tmp_path / kind)
            for place, cell in enumerate(notebook.cells):
                cell.id = f"{name}-{number}-{place}"
                cell.metadata["kind"] = kind
            combined.cells += [cell for cell in notebook.cells if cell.cell_type == "code"]
    run(combined, tmp_path)
    for kind in kinds:
        part = nbformat.v4.new_notebook(cells=[cell for cell in combined.cells if cell.metadata["kind"] == kind])
        shown = "\n".join(outputs(part, "text/markdown"))
        assert shown
        assert "nan" not in shown
        if kind == "empty":
            said = f"folder '{tmp_path / kind}': holds no run, sweep or saved table that can be read\n"
            assert "".join(outputs(part, "printed")) == (3 if every else 1) * said
        if kind != "mixed":  # one run of each setting at most
            assert "±" not in shown.replace("± is the", "")


@pytest.mark.ci
def test_studies_run_on_any_sweep(tmp_path):
    """A sweep in its own folder, and the same as saved tables."""
    write_sweep(tmp_path / "sweep", random.Random(0), modes(1, 8), seeds=3)
    write_run(tmp_path / "sweep" / "trials" / "running", random.Random(1), steps=5, status=None, seed=8)
    save(load(tmp_path / "sweep"), tmp_path / "saved")
    shown = []
    for place in ("sweep", "saved"):
        notebook = read("modes")
        set_folder(notebook, tmp_path / place)
        shown.append(outputs(run(notebook), "text/markdown"))
    assert shown[0] == shown[1]
    assert "22 runs: 21 done, 1 running" in shown[0][1]


@pytest.mark.slow
def test_demo_runs_four_modes(tmp_path, monkeypatch):
    """The demo with short runs: real actors, real training, its figures."""
    monkeypatch.setenv("OVERLAPRL_DEMO_STEPS", "12")
    monkeypatch.setenv("OVERLAPRL_DEMO_RUNS", str(tmp_path / "runs"))
    notebook = run(read("overlaprl_demo"))
    assert sorted(os.listdir(tmp_path / "runs")) == ["async", "overlap", "staleness", "sync"]
    printed = "".join(outputs(notebook, "printed"))
    assert "no GPU" in printed or "NVIDIA" in printed
    assert [line.split()[0] for line in printed.splitlines()[-4:]] == ["sync", "async", "staleness", "overlap"]
    assert len(outputs(notebook, "image/png")) == 5
    results = load(tmp_path / "runs")
    assert set(results.trials["status"]) == {"done"}
    assert len(results.history) == 48
