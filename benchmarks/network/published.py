"""Compare `jrc.communication_advice` with times and bandwidths that others published.

    python -m benchmarks.network.published --out benchmarks/results/published.json

- `bandwidth`: the Gbit/s with which replicas compute 50 to 99 % of the time, simulated in Douillard
  et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512, table 4, for models
  of 1, 10 and 100 billion parameters. Their bandwidths lie on a grid whose steps are a fifth, and
  theirs is the next one on it above what is needed. There the exchange passes behind a step's
  computation, here it does so only with `overlap=1`: that is the difference of data parallel, and
  of all methods at large shares.
- `hours`: the hours of a run over 1 Gbit/s from table 1 of the same paper.
- `covenant`: bytes and seconds of an exchange of Covenant-72B, arXiv:2603.08163, which are of a
  real run over the internet (SparseLoCo through an object store, on average 16.9 peers). Such a
  store takes a message once; the collectives of JAX are rings, where each peer passes on the
  messages of all others.
- `peers`: the share of the time in which 2 to 70 peers would compute with links of 100 Mbit/s and
  1 Gbit/s, by the prediction alone.

Nothing is run. Parameters are bfloat16 and two replicas exchange where the papers do not say
otherwise. A DiLoCo without fragments sends as many bytes as one exchange of dense gradients.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib.command import Benchmark, Run
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
SYNC_EVERY = 100
LAYERS_OF_A_FRAGMENT = 3
DENSE, DILOCO, STREAMING = "data parallel", "DiLoCo", "streaming DiLoCo, 4 bits, overlap"
# Parameters, layers, seconds of a step; Gbit/s for each of `SHARES`.
SIMULATED = {
    "1B": (1e9, 24, 0.1, {
        DENSE: (86.8, 152.6, 184.2, 222.3, 569.0),
        DILOCO: (1.4, 6.2, 13.3, 23.3, 86.8),
        STREAMING: (0.4, 0.9, 1.7, 2.0, 3.0),
    }),
    "10B": (1e10, 48, 0.8, {
        DENSE: (104.8, 222.3, 222.3, 268.3, 471.5),
        DILOCO: (1.7, 7.5, 16.0, 33.9, 104.8),
        STREAMING: (0.4, 0.9, 1.4, 1.4, 1.7),
    }),
    "100B": (1e11, 108, 4.9, {
        DENSE: (184.2, 323.8, 390.7, 390.7, 471.5),
        DILOCO: (3.0, 11.0, 23.3, 49.4, 184.2),
        STREAMING: (0.5, 0.9, 1.1, 1.1, 1.4),
    }),
}  # fmt: skip
# Hours without a network, and over 1 Gbit/s, of the model of 1B: a step takes 0.1 seconds.
HOURS = {DENSE: (0.67, 109.0), STREAMING: (0.67, 0.88)}
COVENANT = {
    "parameters": 72.7e9, "peers": 16.9, "seconds": 70.0, "compression": 146.0,
    "uplink_bits_per_second": 110e6,
}  # fmt: skip
PEERS = (2, 4, 8, 16, 32, 70)
LINKS = ("100Mbit/s", "1Gbit/s")
PEER_MODELS = {"1B": (1e9, 24, 2.0), "72B": (72.7e9, 80, 40.0)}


def measure(run: Run) -> None:
    """Predict everything; of the simulated models only the smallest with `--toy`."""
    simulated = {"1B": SIMULATED["1B"]} if run.options.toy else SIMULATED
    run.report |= {
        "bandwidth": {name: bandwidths(*row) for name, row in simulated.items()},
        "hours": {name: hours(name, *row) for name, row in HOURS.items()},
        "covenant": covenant(),
        "peers": {name: peers(*row) for name, row in PEER_MODELS.items()},
    }


def bandwidths(
    count: float, layers: int, step: float, published: dict[str, tuple[float, ...]]
) -> dict[str, list[dict[str, float]]]:
    """Return the Gbit/s for each share, published and predicted, of each method."""
    return {
        name: [
            {
                "share": share,
                "published": theirs,
                "predicted": bandwidth_for(share, name, count, layers, step),
            }
            for share, theirs in zip(SHARES, row, strict=True)
        ]
        for name, row in published.items()
    }


def bandwidth_for(share: float, name: str, count: float, layers: int, step: float) -> float:
    """Return the least Gbit/s with which two replicas compute a share of the time."""
    low, high = 1e-2, 1e5
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        enough = way(name, count, layers, step, middle * 1e9 / 8).utilisation >= share
        low, high = (low, middle) if enough else (middle, high)
    return high


def way(name: str, count: float, layers: int, step: float, bandwidth: float) -> Any:
    """Return the prediction for a method; DiLoCo exchanges dense once in `SYNC_EVERY` steps."""
    steps = SYNC_EVERY if name == DILOCO else 1
    outers = [streaming(layers)] if name == STREAMING else []
    advice = jrc.communication_advice(
        shapes(count, layers), 2, bandwidth, step * steps, outers=outers
    )
    return advice.ways[-1] if outers else advice.ways[0]


def shapes(count: float, layers: int) -> list[jax.ShapeDtypeStruct]:
    """Return a matrix a layer, of so many bfloat16 parameters in all."""
    rows = round(count / layers / 4096)
    return [jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)] * layers


def streaming(layers: int) -> jrc.DiLoCo:
    """Return the streaming DiLoCo of the paper for a model of so many layers."""
    fragments = layers // LAYERS_OF_A_FRAGMENT
    return jrc.DiLoCo(sync_every=SYNC_EVERY, wire="4bit", fragments=fragments, overlap=1)


def hours(name: str, alone: float, published: float) -> dict[str, float]:
    """Return the hours of a run over 1 Gbit/s, published and predicted."""
    count, layers, step, _ = SIMULATED["1B"]
    seconds = way(name, count, layers, step, 1e9 / 8).seconds
    return {"alone": alone, "published": published, "predicted": alone * seconds / step}


def covenant() -> dict[str, Any]:
    """Return what one exchange of Covenant-72B takes, published and predicted."""
    about: dict[str, Any] = dict(COVENANT)
    sent = payload(about["parameters"], 80)
    rate = about["uplink_bits_per_second"] / 8
    received = sent * (about["peers"] - 1)
    return about | {
        "payload": sent,
        "predicted_compression": 4 * about["parameters"] / sent,
        "upload_seconds": sent / rate,
        "ring_seconds": received / rate,
        "least_download_bytes_per_second": received / about["seconds"],
    }


def payload(count: float, layers: int) -> float:
    """Return the bytes of one replica's message of `jrc.SparseLoCo`, as it is by default."""
    outers = [jrc.SparseLoCo()]
    advice = jrc.communication_advice(shapes(count, layers), 2, "1Gbit/s", 1.0, outers=outers)
    return advice.ways[-1].bytes


def peers(count: float, layers: int, step: float) -> dict[str, Any]:
    """Return the share of the time in which so many peers compute, for each link and method."""
    outers = [jrc.SparseLoCo(), jrc.DiLoCo(wire="4bit"), jrc.DiLoCo()]
    found: dict[str, Any] = {"step": step}
    for link in LINKS:
        rows = {}
        for many in PEERS:
            advice = jrc.communication_advice(
                shapes(count, layers), many, link, step, outers=outers, optimizer="adamw"
            )
            rows[str(many)] = {
                f"{each.name}, every {each.sync_every}": each.utilisation
                for each in advice.ways
                if each.name not in ("dense", "ef21")
            }
        found[link] = rows
    return found


def tables(report: Report) -> list[Table]:
    """Return a table of each section."""
    return [*_bandwidth_tables(report), _covenant_table(report), *_peer_tables(report)]


def _bandwidth_tables(report: Report) -> Iterator[Table]:
    heads = ("", "", *(f"{share:.0%}" for share in SHARES))
    rows = [
        (model, name, *(f"{cell['published']:,.1f} / {cell['predicted']:,.1f}" for cell in cells))
        for model, methods in report["bandwidth"].items()
        for name, cells in methods.items()
    ]
    yield Table(
        "Gbit/s with which two replicas compute so much of the time: published (arXiv:2501.18512, "
        "table 4, a simulation on a grid with steps of a fifth) / predicted",
        heads,
        rows,
    )
    yield Table(
        "Hours of a run of 1 billion parameters over 1 Gbit/s (the same, table 1)",
        ("", "no network", "published", "predicted"),
        [
            (name, f"{row['alone']:.2f}", f"{row['published']:.2f}", f"{row['predicted']:.2f}")
            for name, row in report["hours"].items()
        ],
    )


def _covenant_table(report: Report) -> Table:
    row = report["covenant"]
    rate = row["least_download_bytes_per_second"] * 8 / 1e9
    cells = [
        ("a message, times smaller than float32", row["compression"], row["predicted_compression"]),
        ("s, the message through the uplink once", row["seconds"], row["upload_seconds"]),
        ("s, an all-gather on a ring of such uplinks", row["seconds"], row["ring_seconds"]),
    ]
    return Table(
        f"An exchange of Covenant-72B (arXiv:2603.08163: {row['peers']} peers on average, links of "
        "500 Mbit/s down and 110 up, an object store)",
        ("", "published", "predicted"),
        [(name, f"{one:,.0f}", f"{other:,.0f}") for name, one, other in cells],
        f"To receive the messages of all others in {row['seconds']:.0f} seconds takes "
        f"{rate:.1f} Gbit/s.",
    )


def _peer_tables(report: Report) -> Iterator[Table]:
    for model, found in report["peers"].items():
        for link in LINKS:
            rows = found[link]
            methods = [*next(iter(rows.values()))]
            yield Table(
                f"Per cent of the time in which peers compute, {model} parameters, "
                f"{found['step']:.0f} s a step, links of {link}, predicted",
                ("peers", *methods),
                [(many, *(f"{row[name]:.0%}" for name in methods)) for many, row in rows.items()],
            )


def problems(report: Report) -> Iterator[str]:
    """Yield predictions that are far from what was published where the models are the same."""
    for name, row in report["hours"].items():
        if abs(row["predicted"] / row["published"] - 1) > 0.15:
            yield f"{name}: {row['predicted']:.2f} hours predicted, {row['published']} published"


BENCHMARK = Benchmark("network.published", __doc__, measure, tables, problems=problems)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
