"""The plan that is chosen by measuring candidates, beside that of the least stated seconds."""

from collections.abc import Iterator

import jrc
from benchmarks.device._plans import plans_of
from benchmarks.device._programs import make
from benchmarks.device._rows import Row, Settings, serve
from benchmarks.device._seconds import BASELINE, PART, compiled, plan_name, planned, timed

NAMES, TOY_NAMES = ("scanned_gpt", "mirrored_mlp", "lstm_scan"), ("mirrored_mlp",)
BUDGET = 0.5
STATED, MEASURED = "least stated seconds", "least measured seconds"


def measure(name: str, settings: Settings) -> Iterator[Row]:
    """Yield peak and seconds, stated and measured, of both plans within half of the temporaries."""
    program = make(name, settings.toy)
    plans, failed = plans_of(settings, PART, name, lambda: planned(program, settings.toy))
    if plan_name(BUDGET) in failed:
        raise ValueError(failed[plan_name(BUDGET)])
    chosen = jrc.plan(
        program.loss, *program.args, budget=BUDGET, measure=True, argnums=program.argnums,
        has_aux=program.has_aux,
    )  # fmt: skip
    losses = {
        BASELINE: program.loss,
        STATED: plans[plan_name(BUDGET)].apply(program.loss),
        MEASURED: chosen.apply(program.loss),
    }
    yield {
        "programs": timed(compiled(program, losses), settings.toy),
        "compilations": chosen.compilations,
    }


if __name__ == "__main__":
    serve(measure)
