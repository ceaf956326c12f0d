"""Imports only go down, and each room knows only the libraries it may: read from the source, nothing is imported."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "overlaprl_ray"

# from the ground up
ROOMS = ["errors", "rollout", "config", "engines", "algorithm", "tasks", "models", "workers", "runs", "runtime", "tune",
         "reports"]  # fmt: skip
HEAVY = {"ray", "transformers", "datasets", "pandas", "matplotlib", "scipy", "torch", "peft", "vllm"}
# What a room may import of these; imports inside a function count too.
ALLOWED = {
    "errors": set(),
    "rollout": {"torch"},
    "config": set(),
    "engines": {"torch", "transformers", "vllm"},
    "algorithm": {"torch"},
    "tasks": {"datasets"},
    "models": {"torch", "transformers", "peft"},
    "workers": {"torch", "transformers", "peft"},
    "runs": {"torch", "transformers", "ray", "matplotlib"},
    "runtime": {"torch", "transformers", "ray"},
    "tune": {"ray", "pandas"},
    "reports": {"pandas", "matplotlib", "scipy"},
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


def test_root_holds_three_modules():
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == ["__init__.py", "errors.py", "rollout.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    own = ROOMS.index(room_of(path))
    for name in imports(path):
        if name == "overlaprl_ray":
            pytest.fail("imports the package's front door, which imports everything")
        if name.startswith("overlaprl_ray."):
            assert ROOMS.index(name.split(".")[1]) <= own, f"{name} lies above {room_of(path)}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_know_only_their_libraries(path):
    heavy = {name.split(".")[0] for name in imports(path)} & HEAVY
    assert heavy <= ALLOWED[room_of(path)]


def test_files_are_read_in_one_sitting():
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in modules()
        if (lines := len(path.read_text().splitlines())) > 250
    }
    assert not long


def test_no_import_circles():
    graph = {}
    for path in modules():
        name = "overlaprl_ray." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {other for other in imports(path) if other.startswith("overlaprl_ray.") and other != name}
    done, open_ = set(), []

    def visit(name):
        assert name not in open_, " -> ".join([*open_[open_.index(name) :], name])
        if name in done:
            return
        open_.append(name)
        for other in sorted(graph.get(name, ())):
            visit(other)
        open_.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)
