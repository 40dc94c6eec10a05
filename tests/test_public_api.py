"""Every public name is documented, and what its documentation shows is true."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import jrc

PUBLIC = [name for name in vars(jrc) if not name.startswith("_")]
CALLABLE = [name for name in PUBLIC if inspect.isroutine(getattr(jrc, name))]
SEEDS = ("append_backward", "RecomputeOptimizer", "DGCMomentumOptimizer")
MODULES = ["jrc", *(m.name for m in pkgutil.walk_packages(jrc.__path__, "jrc."))]


def test_the_contract_s_names_are_there():
    promised = """mark recompute_segments find_segments recompute recompute_sequential
    recompute_scan recompute_module recompute_op keep_op apply_rules Save SavePrimitives
    RecomputePrimitives Offload explain Report plan Plan largest_batch BudgetError scale_by_dgc
    dgc_momentum DGCState dgc_stats dgc_specs reshard_dgc dgc_advice l1_penalty
    l2_penalty SparseLoCo DiLoCo reshard TrainState init_state make_train_step save restore
    models compat"""
    assert set(promised.split()) <= set(PUBLIC)
    assert {*SEEDS} <= set(vars(jrc.compat))


@pytest.mark.parametrize("name", CALLABLE)
def test_public_functions_are_documented(name):
    doc = inspect.getdoc(getattr(jrc, name))
    assert doc and ">>> " in doc, f"{name} has no example"
    for section in ("Args:", "Returns:", "Raises:", "Source:"):
        if name == "save" and section == "Returns:":
            continue
        assert section in doc or name in NO_NEED.get(section, ()), f"{name} lacks {section}"
    for argument in inspect.signature(getattr(jrc, name)).parameters:
        assert re.search(rf"^\s+\**{argument}:|, {argument}:", doc, re.M), f"{name}: {argument}"


NO_NEED = {
    "Args:": ("targets",),
    "Raises:": ("dgc_specs", "targets"),
    "Source:": (
        "restore",
        "init_state",
        "make_train_step",
        "dgc_specs",
        "dgc_stats",
        "reshard_dgc",
        "reshard",
    ),
}


@pytest.mark.parametrize("name", [n for n in PUBLIC if inspect.isclass(getattr(jrc, n))])
def test_public_classes_document_their_fields(name):
    cls = getattr(jrc, name)
    doc = inspect.getdoc(cls)
    fields = getattr(cls, "_fields", None) or getattr(cls, "__dataclass_fields__", {})
    for field in fields:
        assert field.startswith("_") or f"{field}:" in doc, f"{name}.{field}"


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_names_are_documented(name):
    seed = getattr(jrc.compat, name)
    assert ">>> " in inspect.getdoc(seed) and "Source: Paddle" in inspect.getdoc(seed)
    methods = inspect.getmembers(seed, inspect.isfunction) if inspect.isclass(seed) else []
    public = [m for m in methods if not m[0].startswith("_") or m[0] == "_set_checkpoints"]
    assert len(public) >= 7 or not inspect.isclass(seed)
    for called, routine in [(name, seed), *public]:
        doc = inspect.getdoc(routine)
        for argument in inspect.signature(routine).parameters:
            known = argument == "self" or re.search(rf"^\s+\**{argument}:", doc, re.M)
            assert known, f"{name}, {called}: {argument}"


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("module", MODULES)
def test_doctests(module):
    loaded = importlib.import_module(module)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(loaded, extraglobs={"jrc": jrc}, optionflags=flags)
    assert result.failed == 0
