import json

import pytest

from tests.processes import ranks, run_processes


@pytest.mark.slow
def test_all_processes_get_the_plan_of_the_first():
    said = run_processes(ranks("tests.remat.planner.plan_in_processes", 2))
    first, second = (json.loads(text[text.index("{") :]) for text in said)
    assert first == second
    assert first["verified"]["flops_ratio"] > 1
