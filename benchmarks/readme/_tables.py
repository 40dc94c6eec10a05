"""The measured tables, as Markdown, from the JSON files in benchmarks/results.

`train_gpt.json` and `train_gpt_dense.json` are the `figures.json` of the example's two runs.
"""

import json
import pathlib

from benchmarks.convergence import _tables as convergence_show
from benchmarks.dgc._tables import TABLES
from benchmarks.memory._plan_tables import dearer
from benchmarks.network import _tables as network_show
from benchmarks.pytorch import _tables as peers_show
from benchmarks.training import together

RESULTS = pathlib.Path(__file__).parents[1] / "results"


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured(name):
    """Whether there is a file: some take hours, or root, and are made later."""
    return (RESULTS / f"{name}.json").exists()


def table(*rows):
    head, *body = [f"| {' | '.join(row)} |\n" for row in rows]
    return head + "|---" * len(rows[0]) + "|\n" + "".join(body)


def training():
    dgc, dense = load("train_gpt"), load("train_gpt_dense")

    def row(name, found):
        ratio = found["bytes_dense"] / found["bytes_sent_last"]
        return (
            name,
            f"{found['held_out_before']:.2f} → {found['held_out_after']:.2f}",
            f"{found['memory']['plain']['peak'] / 2**20:.1f} → "
            f"{found['memory']['recomputed']['peak'] / 2**20:.1f} MiB",
            f"{found['bytes_sent_mean'] / 1e3:,.0f} kB",
            f"{found['bytes_sent_last'] / 1e3:,.0f} kB (1/{ratio:.0f})",
        )

    steps = len(dgc["losses"])
    return (
        f"The example, {steps} steps on {dgc['device']}, jax {dgc['jax']}; loss in nats per byte "
        "of held-out text, peak of the compiled step with nothing re-run → with every block "
        "re-run, bytes per step and replica:\n\n"
    ) + table(
        ("", "held-out loss", "peak", "sent, mean", "sent, last step"),
        row("DGC, up to 99.9 %", dgc),
        row("dense momentum SGD", dense),
    )


def recomputation():
    found = load("recompute")
    base = found["programs"]["nothing re-run"]
    rows = [
        (
            name,
            f"{row['temporaries'] / 2**20:.1f} MiB",
            f"{row['flops'] / base['flops']:.3f}",
            f"{row['compile_seconds'] / base['compile_seconds']:.2f}",
        )
        for name, row in found["programs"].items()
    ]
    return (
        f"`value_and_grad` of an unrolled {found['model']} ({found['device']}, jax "
        f"{found['jax']}), gradients bit-equal to the hand-wrapped ones:\n\n"
    ) + table(("", "temporaries", "FLOPs, ratio", "trace and compile, ratio"), *rows)


def cuts():
    """Three nets, each cut in several ways."""
    found = load("segments")
    nets = found["nets"]
    sixteen, (others) = nets.pop("sixteen blocks, blocks a segment"), nets

    def mib(row, key):
        return f"{row[key] / 2**20:,.0f}"

    rows = [
        (
            {"0": "none", "1": "each", "16": "all in one"}.get(size, f"every {size}"),
            mib(row, "held"),
            mib(row, "temporaries"),
            *(str(n) for n in found["paddle"][size]),
            str(row["products"] - sixteen["0"]["products"]),
        )
        for size, row in sixteen.items()
    ]
    text = (
        "Sixteen blocks of dense, gelu, dense, tanh (512 wide, batch 2048; gelu re-run on its "
        "own), MiB held after the forward pass and at the peak beside Paddle's on CPU, and "
        "products run again (Paddle: 32):\n\n"
    ) + table(("blocks a segment", "held", "peak", "Paddle held", "Paddle peak", "re-run"), *rows)
    rows = []
    for net, programs in others.items():
        base = next(iter(programs.values()))
        for name, row in programs.items():
            rows.append(
                (f"{net}: {name}", mib(row, "held"), mib(row, "temporaries"), mib(row, "peak"),
                 f"{row['flops'] / base['flops']:.3f}")
            )  # fmt: skip
    return (
        text
        + f"\nWhole nets ({found['device']}, jax {found['jax']}; MiB, `value_and_grad` compiled; "
        "peak with arguments and results):\n\n"
        + table(("", "held", "temporaries", "peak", "FLOPs, ratio"), *rows)
    )


def plans():
    """Nine models, twenty budgets each; real memory."""
    found = load("plan")
    models = found["models"].values()

    def at(row, base, key="flops"):
        return f"{row[key] / base[key]:.3f}" if "peak" in row else "none"

    def mib(count):
        return f"{count / 2**20:,.0f}"

    rows = []
    for model in models:
        base, beside = model["baseline"], model["beside"]
        fitting = [row for row in model["budgets"] if row.get("peak", 0) > 0]
        over = sum(row["peak"] > row["budget"] for row in fitting)
        ways = model["references"]
        won = len(ways) - len(dearer(model))
        rows.append(
            (model["title"], mib(base["peak"]), mib(model["least"]), at(fitting[0], base),
             at(beside["half"], base), at(beside["quarter"], base), f"{over} of {len(fitting)}",
             f"{won} of {len(ways)}", str(max(row["compilations"] for row in fitting)),
             f"{model['seconds']:.1f} s")
        )  # fmt: skip
    text = (
        f"`jrc.plan` ({found['device']}, jax {found['jax']}): peak with nothing re-run and the "
        "least reachable one, MiB; FLOPs, as a ratio, at the least peak, with half and with a "
        "quarter of the temporaries; budgets exceeded; ways by hand that a plan within their peak "
        "equals (to a millionth) or beats in FLOPs; compilations at most; tracing and solving "
        "without them:\n\n"
    ) + table(
        ("", "peak", "least", "FLOPs there", "half", "quarter", "exceeded", "by hand", "compiled",
         "planned in"),
        *rows,
    )  # fmt: skip
    return text + _real_memory(models)


def _real_memory(models):
    rows = [
        (
            model["title"],
            *(
                f"{(model['rss'][key]['most'] - model['rss'][key]['start']) / 2**20:,.0f} MiB"
                for key in ("plain", "planned")
            ),
        )
        for model in models
        if "rss" in model
    ]
    if not rows:
        return ""
    return (
        "\nResident memory of a process that runs the gradient program, above what it has before "
        "(a plan at a quarter between the least peak and that of nothing re-run):\n\n"
    ) + table(("", "nothing re-run", "planned"), *rows)


def peers():
    """PyTorch beside jrc."""
    if not measured("peers"):
        return ""
    found = [f"{title}:\n\n{table(*rows)}" for title, rows in peers_show.tables(load("peers"))]
    if (RESULTS / "peers.png").exists():
        words = "Saved bytes against matrix products, PyTorch and jrc"
        found.append(f"![{words}](results/peers.png)\n")
    return "\n".join(found)


def networks():
    """Whole steps over links of several rates, by several processes."""
    found = load("network")
    methods = network_show.methods_of(found)
    titles = [network_show.TITLES[method] for method in methods]
    others = [method for method in methods if method != "dgc"]

    def row(name, at):
        ratios = (network_show.ratio_of(at, method) for method in others)
        return (
            name,
            f"{min(at['measured_mbit']):,.0f}",
            *(_milliseconds(at.get(method)) for method in methods),
            *("-" if ratio is None else f"{ratio['ratio']:.1f}" for ratio in ratios),
            " / ".join(_megabytes(at.get(method), "bytes_sent") for method in methods),
            " / ".join(_megabytes(at.get(method), "bytes_predicted") for method in methods),
        )

    return (
        f"Whole optimizer steps of {found['parameters'] / 1e6:.1f} M parameters in "
        f"{found['leaves']} leaves, one process in each network namespace of a machine with "
        f"{found['cores']} cores ({found['device']}, jax {found['jax']}{_busy(found)}): rate that "
        "plain TCP reaches, Mbit/s; dense momentum SGD and DGC at 99.9 %"
        f"{_of_pytorch(found)}, milliseconds (quartiles); how many times as long as DGC's; MB that "
        f"a process sends in a step, {' / '.join(titles)}, at its interface and as predicted:\n\n"
    ) + table(
        ("", "TCP", *titles, *(f"{network_show.TITLES[method]} / DGC" for method in others),
         "MB sent", "predicted"),
        *(row(name, at) for name, at in found["runs"].items()),
    )  # fmt: skip


def _busy(found):
    """What else the machine did as it began, where that was written down."""
    return f", load {found['load']:g} as it began" if found.get("load") else ""


def _of_pytorch(found):
    """What the peers are, where they were measured."""
    handed = [at["handing_over"] for at in found["runs"].values() if "handing_over" in at]
    if not handed:
        return ""
    took = _range(sorted({min(handed), max(handed)}))
    return (
        f"; PyTorch {found['torch']}'s DistributedDataParallel over gloo with momentum SGD, one "
        "thread a process, as it comes and with its PowerSGD (rank 1, error feedback, warm start; "
        f"two thin factors for each matrix, vectors dense), {took} ms of each in handing prepared "
        "gradients over"
    )


def _milliseconds(at):
    return "-" if at is None else f"{1e3 * at['seconds']:,.0f} ({_range(at['quartiles'])})"


def _megabytes(at, key):
    return "-" if at is None or at[key] is None else f"{at[key] / 1e6:,.2f}"


def _range(quartiles):
    return "–".join(f"{1e3 * seconds:,.0f}" for seconds in quartiles)


def compression():
    """Bytes, selectors and compile time of DGC: the tables that `dgc.py` prints."""
    found = load("dgc")
    parts = []
    for section in (name for name in TABLES if name in found):
        where = f"{found[section]['device']}, {found[section]['cores']} cores"
        for title, rows in TABLES[section](found[section]):
            text = f"{title} ({where}, jax {found[section]['jax']}):\n\n"
            parts.append(text + table(*rows))
    return "\n".join(parts)


def convergence():
    """Where training ends with DGC and without."""
    if not measured("convergence"):
        return ""
    report = load("convergence")
    found = [f"{title}:\n\n{table(*rows)}" for title, rows in convergence_show.tables(report)]
    if (RESULTS / "convergence.png").exists():
        words = "Held-out loss of three tasks against bytes sent, dense momentum SGD and DGC"
        found.append(f"![{words}](results/convergence.png)\n")
    return "\n".join(found)


def joined():
    """Recomputation and compression in one step."""
    if not measured("together"):
        return ""
    report = load("together")
    return f"{together.title_of(report)}:\n\n{table(*together.rows_of(report))}"
