"""Every public function, given something wrong: the rule, what arrived, the way out."""

import inspect

import pytest

import jrc
from jrc import advice, compat, dgc, models, persist, remat, train
from tests.messages import (
    compat_rows,
    dgc_rows,
    outer_rows,
    remat_rows,
    target_rows,
    train_rows,
)

ROWS = [
    *remat_rows.ROWS,
    *target_rows.ROWS,
    *dgc_rows.ROWS,
    *train_rows.ROWS,
    *outer_rows.ROWS,
    *compat_rows.ROWS,
]

PACKAGES = (jrc, remat, dgc, train, advice, persist, compat, models.mlp, models.gpt, models.resnet)

# Names without a row, and why.
TAKES_ANYTHING = {
    "what jrc makes and hands out": """DGCState DGCStats DGCAdvice ExchangeCost
        LargestBatch BudgetError Segment Segmentation Estimate Memory StepInfo TrainState Block
        Operator ParamGrad OuterState CommunicationAdvice WayCost Target EF21State""",
    "no arguments": "Exact Global Float32 BFloat16 AllGather Sharded DenseSum Auto targets",
    "what a user's own selector, wire format or exchange is made of": """Selector Wire EntryExchange
        TensorExchange Transfer Arrived Sent Entries Space choose_each encoded""",
    "a base class": "Rule",
    "for any transform, which checks": "apply_gradients",
    "for jrc's own packages, behind a function with rows": """checked_budget check_picture
        check_writable check_offload checked_compilations checked_reserve chunks_text
        copy_bandwidth_of plan_for_each plan_within
        memory_needed device_of with_op_tags""",
    "a piece of `apply`, which checks": "block embed unembed stem",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}: {row.wrong}")
def test_the_rule_what_arrived_and_the_way_out(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(row.error) as raised:
        row.call()
    said = str(raised.value)
    assert type(raised.value) is row.error and said.startswith(f"{row.name}: ")
    parts = row.rule, row.arrived, row.way_out
    assert [part for part in parts if part not in said] == [], said
    assert len(set(parts)) == 3 and "\n" not in said


def found(name):
    """What a dotted name means."""
    value = jrc
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def owner(name):
    """The public function or class that a row is about: of a method its class."""
    outer = found(name.rpartition(".")[0])
    return outer if inspect.isclass(outer) else found(name)


def public():
    """Every public name that can be called: all of a package, of a module what it defines."""
    for package in PACKAGES:
        for name, value in vars(package).items():
            if callable(value) and not name.startswith("_"):
                if hasattr(package, "__path__") or value.__module__ == package.__name__:
                    yield name, value


def test_every_public_name_has_a_row():
    told = {owner(row.name) for row in ROWS}
    spared = {name for names in TAKES_ANYTHING.values() for name in names.split()}
    silent = {name for name, value in public() if value not in told}
    assert silent == spared


def test_each_row_is_another():
    names = [(row.name, row.wrong) for row in ROWS]
    assert len(set(names)) == len(names)
