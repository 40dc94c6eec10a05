"""The package's own imports: no circle, and the formulas import nothing of the package."""

import ast
import graphlib
import pathlib

import jrc.dgc

ROOT = pathlib.Path(jrc.dgc.__file__).parent


def own_imports():
    """Return for each module of the package the modules of the package that it imports."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(("jrc", "dgc", *path.relative_to(ROOT).with_suffix("").parts))
        name = name.removesuffix(".__init__")
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        modules = set()
        for node in nodes:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[name] = modules - {name}
    return {name: modules & found.keys() for name, modules in found.items()}


def test_no_import_circle():
    imports = own_imports()
    assert len(imports) > 30
    # Importing a module imports its package's __init__ first, which imports all of the package.
    inner = {
        name: {other for other in others if other != "jrc.dgc"} for name, others in imports.items()
    }
    graphlib.TopologicalSorter(inner).prepare()


def test_the_formulas_stand_alone():
    for name in ("_schedule", "_clip", "_momentum", "_regularize"):
        assert not own_imports()[f"jrc.dgc.{name}"]
