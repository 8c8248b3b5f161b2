"""What the layout promises: imports point down, an import has no effect and stays light, no module holds state."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("distributed_utils", "checkpoint_file", "checkpoint_utils", "trainer")
FILES = sorted([*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py"))])

# A module may import modules of its own layer or of a lower one.
LAYERS = [
    {"distributed_utils"},
    {"checkpoint_file"},
    {"checkpoint_utils"},
    {"parts"},
    {"trainer.trainer"},
    {"trainer.tasks"},
    {"trainer.train"},
    {"trainer.launch"},
    {"trainer.cli"},
]
ABOVE_THE_PARTS = {"trainer.trainer", "trainer.train", "trainer.launch", "trainer.cli", "trainer.compose", "trainer.resume_folder", "trainer.sweep", "trainer.__main__"}


def layer(module: str) -> int:
    if module.startswith("trainer.tasks"):
        module = "trainer.tasks"
    elif module in ("trainer.compose", "trainer.resume_folder", "trainer.sweep", "trainer.__main__", "trainer.plot"):
        module = "trainer.cli"  # commands
    elif module.startswith("trainer.tools"):
        module = "trainer.cli"
    elif module.startswith("trainer") and module not in ABOVE_THE_PARTS:
        module = "parts"
    elif module not in ABOVE_THE_PARTS:
        module = module.partition(".")[0]
    return next(i for i, names in enumerate(LAYERS) if module in names)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def project_imports():
    """(module, imported module) for every import of the project's own modules, those inside functions included."""
    names = {name_of(path) for path in FILES} - {"setup", "trainer"}
    for path in FILES:
        module = name_of(path)
        if module in ("setup", "trainer"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]  # a module of a package, or a name in one
                targets = [name if name in names else node.module for name in inner]
                if node.module == "trainer" and any(alias.name == "Trainer" for alias in node.names):
                    targets.append("trainer.trainer")
            yield from ((module, target) for target in targets if target in names and target != module)


@pytest.mark.parametrize("module, imported", sorted(set(project_imports())))
def test_imports_point_down(module, imported):
    assert layer(imported) <= layer(module), f"{module} must not know {imported}"


def test_the_parts_do_not_import_each_other_in_a_circle():
    edges: dict[str, set[str]] = {}
    for module, imported in project_imports():
        edges.setdefault(module, set()).add(imported)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in sorted(edges.get(module, ())):
                visit(imported, (*path, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text())) or not path.read_text().strip()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_has_state_that_changes(path):
    """No `global`, and no empty container at module level that functions could fill."""
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        value = getattr(node, "value", None)
        empty = (isinstance(value, (ast.Dict,)) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        assert not empty, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_exception_is_swallowed_unseen(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path.name}:{node.lineno}: bare except"


def test_importing_the_trainer_is_light_and_has_no_effect():
    heavy = ["rich", "hydra", "tensorboard", "sklearn", "PIL", "matplotlib", "wandb", "torch._dynamo"]
    code = (
        "import logging, random, sys, signal, torch; before = (torch.get_rng_state().sum().item(), random.getstate(), "
        "len(logging.getLogger().handlers), signal.getsignal(signal.SIGTERM));"
        "import trainer.train, trainer.trainer;"
        "after = (torch.get_rng_state().sum().item(), random.getstate(), len(logging.getLogger().handlers), "
        "signal.getsignal(signal.SIGTERM)); assert before == after;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
