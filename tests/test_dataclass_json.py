"""Dataclasses as JSON: every form of a decision is read as it was written, and nothing else."""

import dataclasses
import json

import pytest

from jrc._dataclass_json import from_json_text, json_text
from jrc.remat._chunks.chunks import Chunks, Form, Shards, SplitAxis
from jrc.remat._planner.plan.decision import (
    AsWritten,
    Baseline,
    Branches,
    Decision,
    LeftToJax,
    Loop,
    LoopPart,
    Mapped,
    Region,
    Stages,
)
from tests.remat.changed_json import changed_texts


@dataclasses.dataclass(frozen=True)
class Holder:
    """Something of each kind that a plan or a report has."""

    decision: Decision
    chunks: tuple[Chunks, ...] = ()
    pair: tuple[str, float | None] = ("", None)
    is_on: bool = False


INSIDE = Stages((Region((0, 1), saved=((1, 0),), recomputed=(0,), by_name=False),))
ALL_STAGES = Stages(
    (
        Region((0, 2)),
        LeftToJax((1,)),
        Loop(3, (LoopPart(2, INSIDE, segments=1), LoopPart(3, Stages(())))),
        Branches(4, (None, INSIDE)),
        Mapped(5, INSIDE),
    ),
    offloaded=((-1, 0), (0, 0)),
    without_barrier="chains",
    in_order=True,
)
SHARDS = Shards(("data",), 4, ((0, 1, 0),), (SplitAxis((0, 0, 1), ("model",)),))
FORMS = (Form((5,), ((3, (), 3),)),)
CHUNKS = Chunks((1,), (2, 3), ((0, 0, 0),), 8, (4,), "float32", "dot", 64, 0, (SHARDS,), FORMS)


@pytest.mark.parametrize("decision", [ALL_STAGES, Stages(()), Baseline(), AsWritten()], ids=str)
@pytest.mark.parametrize("rest", [(), ((CHUNKS,), ("x", 0.1), True)])
def test_all_is_read_as_it_was_written(decision, rest):
    value = Holder(decision, *rest)
    text = json_text(value, "holder/1", more=3)
    assert from_json_text(Holder, text, "holder/1") == value
    assert hash(from_json_text(Holder, text, "holder/1")) == hash(value)
    data = json.loads(text)
    assert data["format"] == "holder/1" and data["more"] == 3
    other = json.dumps(dict(reversed(data.items())), indent=3)
    assert from_json_text(Holder, other, "holder/1") == value


def test_every_change_is_refused():
    texts = list(changed_texts(json_text(Holder(ALL_STAGES, (CHUNKS,)), "holder/1")))
    assert len(texts) > 500
    for text in texts:
        with pytest.raises(ValueError, match=r"written$|^format "):
            from_json_text(Holder, text, "holder/1")


def test_a_text_of_another_class_of_the_same_format_is_refused():
    text = json_text(CHUNKS, "holder/1")
    with pytest.raises(ValueError, match="KeyError: 'decision'"):
        from_json_text(Holder, text, "holder/1")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", None, 3, "[" * 10**5])
def test_what_is_no_such_text(text):
    with pytest.raises(ValueError):
        from_json_text(Holder, text, "holder/1")
