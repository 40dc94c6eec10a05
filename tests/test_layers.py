"""Layers: a module imports only from layers below its own, inside `jrc.remat` too."""

import ast
import pathlib

import jrc

ROOT = pathlib.Path(jrc.__file__).parent
LAYERS = (
    {"_typing", "_errors"},
    {"_tree", "_multihost", "_progress", "_validate", "_text"},
    {"_jaxpr", "_rng", "persist"},
    {"remat", "dgc"},
    {"train", "models"},
    {"compat"},
    {"_cli_target"},
    {"cli"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports():
    """Every import of our own: (file, its parts, imported module)."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                modules = (
                    [node.module]
                    if node.module != "jrc"
                    else [f"jrc.{alias.name}" for alias in node.names]
                )
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            yield from ((path, parts, module) for module in modules)


def test_modules_import_only_from_lower_layers():
    wrong, seen = [], 0
    for path, parts, module in imports():
        names = module.split(".")
        if names[0] != "jrc" or parts == ("__init__",):
            continue
        seen += 1
        here, there = parts[0], names[1]
        if here != there and not LEVEL[there] < LEVEL[here]:
            wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong and seen > 50


def test_every_module_has_a_layer():
    modules = {
        path.stem for path in ROOT.iterdir() if path.stem not in ("__init__", "__pycache__", "py")
    }
    assert modules <= set(LEVEL)


def test_private_jax_is_not_used():
    assert not [str(path) for path in ROOT.rglob("*.py") if "jax._src" in path.read_text()]


def test_only_jaxpr_reads_jaxprs():
    """`jax.extend.core` is imported in one package; `jax.interpreters` likewise."""
    for path, parts, module in imports():
        if module.startswith(("jax.extend", "jax.interpreters")):
            assert parts[0] == "_jaxpr", path


def test_the_front_door_is_short():
    assert len((ROOT / "__init__.py").read_text().splitlines()) <= 80
