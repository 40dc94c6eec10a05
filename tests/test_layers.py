"""Layers: a module imports only from layers below its own, inside `jrc.remat` too; no circles."""

import ast
import graphlib
import pathlib

import pytest

import jrc

ROOT = pathlib.Path(jrc.__file__).parent
LAYERS = (
    {"_typing", "_errors", "_optional", "_version"},
    {
        "_tree",
        "_specs",
        "_mesh_axes",
        "_multihost",
        "_progress",
        "_validate",
        "_text",
        "_ring",
        "_extra_arguments",
        "_bits",
        "_dataclass_json",
    },
    {"_jaxpr", "_rng", "_nonfinite", "persist"},
    {"_targets"},
    {"_layout"},
    {"remat", "dgc", "outer_optimizers"},
    {"train", "advice", "models"},
    {"compat"},
    {"cli"},
    {"__main__"},
)
REMAT_LAYERS = (
    {"_policy"},
    {"_region"},
    {"_segments", "_scan", "_gradient"},
    {"_compiled", "_chunks"},
    {"_time"},
    {"_flax", "_planner"},
    {"_report"},
)


def levels(layers):
    return {name: level for level, names in enumerate(layers) for name in names}


LEVEL, REMAT_LEVEL = levels(LAYERS), levels(REMAT_LAYERS)


def imports():
    """Every import in the package, those inside functions too: (file, its parts, module)."""
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
    assert names_in(ROOT) <= set(LEVEL)
    assert names_in(ROOT / "remat") == set(REMAT_LEVEL)


def names_in(folder):
    return {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__", "py"}


def test_packages_of_remat_import_only_from_lower_ones():
    """A package's modules see each other and those of lower packages, not `jrc.remat` itself."""
    wrong, seen = [], 0
    for path, parts, module in imports():
        names = module.split(".")
        if parts[0] != "remat" or len(parts) < 3 or names[:2] != ["jrc", "remat"]:
            continue
        seen += 1
        here, there = parts[1], names[2] if len(names) > 2 else None
        if here != there and not REMAT_LEVEL.get(there, len(REMAT_LAYERS)) < REMAT_LEVEL[here]:
            wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong and seen > 50


def test_the_seeds_do_not_import_each_other():
    seen = [(parts[1], module) for _, parts, module in imports() if parts[0] == "compat"]
    assert {here for here, _ in seen} == {"__init__", "paddle", "mindspore"}
    others = {"paddle": "jrc.compat.mindspore", "mindspore": "jrc.compat.paddle"}
    assert not [m for here, m in seen if here in others and m.startswith(others[here])]


def dependencies():
    """The modules of the package that each module imports, as `{"jrc.a": {"jrc.b"}}`."""
    files = {module_name(path): path for path in ROOT.rglob("*.py")}
    found = {}
    for name, path in files.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        wanted = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                # `from jrc import dgc` imports a module, `from jrc._text import x` a name of one.
                full = (f"{node.module}.{a.name}" for a in node.names)
                wanted |= {each if each in files else node.module for each in full}
        found[name] = (wanted & set(files)) - {name}
    return found


def module_name(path):
    parts = ("jrc", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def cycle_in(graph):
    """A circle of modules, or nothing."""
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize(
    "package",
    [
        "jrc.remat",
        "jrc._jaxpr",
        "jrc",
    ],
)
def test_no_modules_import_each_other_in_a_circle(package):
    graph = {
        name: others
        for name, others in dependencies().items()
        if name == package or name.startswith(f"{package}.")
    }
    assert len(graph) > 10 and cycle_in(graph) == []


def test_a_circle_is_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})


def test_private_jax_is_not_used():
    assert not [str(path) for path in ROOT.rglob("*.py") if "jax._src" in path.read_text()]


def test_only_jaxpr_reads_jaxprs():
    """`jax.extend.core` is imported in one package; `jax.interpreters` likewise."""
    for path, parts, module in imports():
        if module.startswith(("jax.extend", "jax.interpreters")):
            assert parts[0] == "_jaxpr", path


def test_only_jaxpr_reads_parameters_of_equations():
    remat = ROOT / "remat"
    assert not [str(path) for path in remat.rglob("*.py") if reads_parameters(path)]


def reads_parameters(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.Attribute) and node.attr == "params" for node in nodes)


def test_nothing_calls_print():
    """The command line writes through `cli/_console.py`, progress through `_progress.py`."""
    nodes = (n for path in ROOT.rglob("*.py") for n in ast.walk(ast.parse(path.read_text())))
    assert not [n for n in nodes if isinstance(n, ast.Name) and n.id == "print"]


def test_the_front_door_is_short():
    assert len((ROOT / "__init__.py").read_text().splitlines()) <= 80
