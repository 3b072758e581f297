"""A file imports only from files before it and holds one idea; a package holds no logic."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the foundations up: a module imports only from those before it.
ORDER = [
    "errors",
    "mesh",
    "self_check",
    "axis_rules",
    "collectives",
    "offload",
    "pipeline",
    "plan",
    "dropout",
    "model",
    "structure",
    "batch",
    "placement",
    "optimizer_state",
    "state",
    "parallel",
    "executor",
    "evaluation",
    "run",
    "estimate",
    "program",
    "annotate",
    "planner",
    "data",
    "checkpoint",
    "training",
    "testing",
    "config",
    "cli",
]
LONGEST = 400

FILES = sorted((ROOT / "jaxpar").rglob("*.py"))
ALL_FILES = [path for folder in ("jaxpar", "models", "experiments", "tests") for path in (ROOT / folder).rglob("*.py")]


def dotted(path: Path) -> str:
    """`jaxpar/data/__init__.py` -> `jaxpar.data`, `jaxpar/mesh.py` -> `jaxpar.mesh`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path) for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """The full dotted name of everything that a file imports, also inside functions."""
    package = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in NAMES else base


def violations(path: Path) -> Iterator[str]:
    """What is wrong with the imports of one file of jaxpar."""
    top = dotted(path).split(".")[1]
    if top not in ORDER:
        yield f"module {top!r} has no place in ORDER"
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ("models", "experiments", "tests"):
            yield f"imports {name}: jaxpar knows a model only by its protocol"
        elif name == "jaxpar":
            yield "imports the top of the package: name the module that defines it"
        elif parts[0] == "jaxpar" and parts[1] not in ORDER:
            yield f"imports {name}, which has no place in ORDER"
        elif parts[0] == "jaxpar" and ORDER.index(parts[1]) > ORDER.index(top):
            yield f"imports {name}, which comes after {top} in ORDER"


def test_imports_go_only_to_earlier_modules():
    """Otherwise a change at the top could break the foundations, and no part could be read alone."""
    found = [
        f"{path.relative_to(ROOT)} {what}"
        for path in FILES
        if dotted(path) != "jaxpar"
        for what in dict.fromkeys(violations(path))
    ]
    assert not found, "\n".join(found)


def test_no_two_files_import_each_other():
    """Otherwise which of two siblings is imported first would decide whether either can be."""
    graph = {dotted(path): set(imports(path)) & NAMES - {dotted(path)} for path in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_packages_hold_no_logic():
    """Otherwise importing a package would do something, and its code would hide where nobody looks."""
    for path in ALL_FILES:
        if path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_text()).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            exports = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            allowed = docstring or exports or isinstance(node, ast.Import | ast.ImportFrom)
            assert allowed, f"{path.relative_to(ROOT)}:{node.lineno} is more than imports and __all__"


def test_no_file_is_too_long_to_read():
    """Otherwise a file would hold more than one idea."""
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ALL_FILES}
    assert not {name: lines for name, lines in long.items() if lines > LONGEST}
