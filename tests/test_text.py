"""Tables as text: in a notebook they are text too."""

import jax
import rich.console
import rich.jupyter

import jrc
from jrc._text import table_text


def test_a_table_as_text_displays_nothing_in_a_notebook(monkeypatch):
    def display(*args):
        raise AssertionError("rich displayed something")

    advice = jrc.dgc_advice(
        jax.ShapeDtypeStruct((10**6,), "float32"), replicas=4, bandwidth="1Gbit/s", step_time=0.1
    )
    texts = table_text(("a", "b"), [("1", "2")]), str(advice)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(rich.jupyter, "display", display)
    assert (table_text(("a", "b"), [("1", "2")]), str(advice)) == texts
