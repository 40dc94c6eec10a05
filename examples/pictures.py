"""The pictures of the examples and benchmarks: one style, and what several of them draw.

Not run by itself. The colours are those of `jrc.Report.plot`.
"""

import numpy as np
from rich.console import Console

RED, BLUE, GREEN, PURPLE = "#c44e52", "#4c72b0", "#55a868", "#8172b2"
INK, GREY, GRID = "#1f2933", "#5a5a5a", "#e5e7eb"
STYLE = {
    "font.size": 12,
    "axes.edgecolor": GREY,
    "text.color": INK,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def pyplot():
    """Return matplotlib without a window; print a note and return None if it is missing."""
    try:
        import matplotlib
    except ImportError:
        Console().print("matplotlib is missing, no PNGs: pip install '.[plot]'")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(path, title, panels, size, caption="", columns=None):
    """Write a PNG of panels side by side; return its path, or None without matplotlib.

    Each panel is called with its axes; `size` is its width and height in inches. With `columns`
    there are as many in each row.
    """
    if (plt := pyplot()) is None:
        return None
    with plt.rc_context(STYLE):
        columns = columns or len(panels)
        rows = len(panels) // columns
        figure, grid = plt.subplots(
            rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        figure.get_layout_engine().set(wspace=0.06)
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel(axes)
        figure.suptitle(title, fontsize=15, weight="bold", x=0.01, ha="left")
        if caption:
            figure.supxlabel(caption, fontsize=10, color=GREY, x=0.01, ha="left")
        figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})
        plt.close(figure)
    return path


def memory(size):
    """Return bytes of memory as text: `1.5 MiB`."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB"))


def network(size):
    """Return bytes that cross a network as text: `1.5 MB`."""
    return _scaled(size, 1000, ("B", "kB", "MB", "GB"))


def _scaled(size, base, units):
    power = 0
    while power + 1 < len(units) and size >= base ** (power + 1):
        power += 1
    return f"{size / base**power:,.4g} {units[power]}"


def smooth(axes, values, label, **ends):
    """Plot every value pale, a running mean, and the first and last of another measure."""
    axes.plot(values, color="0.8", label=label)
    window = max(1, len(values) // 30)
    mean = np.convolve(values, np.ones(window) / window, "valid")
    axes.plot(np.arange(len(mean)) + window - 1, mean, color=BLUE, label=f"mean of {window} steps")
    for name, pair in ends.items():
        x = [0, len(values) - 1]
        axes.plot(x, pair, "o", color=RED, label=name.replace("_", " "))
    axes.set(xlabel="step")
    axes.legend()


def warm_up_end(found):
    """Return the first step that sends as few bytes as the last one; None without a warm-up."""
    sent = np.asarray(found["bytes_sent"])
    more = np.flatnonzero(sent > sent[-1])
    # With an outer optimizer, the steps between two exchanges send nothing.
    return int(more[-1]) + 1 if len(more) and sent.min() > 0 else None


def training(path, title, found, panels):
    """Draw panels of a run and its bytes, and say what happens where the warm-up ends."""
    end, caption = warm_up_end(found), ""
    if end is not None:
        caption = (
            f"Dotted: the warm-up ends at step {end}. After it a step sends few entries of the "
            "gradient, and keeps the others for later steps.\nUpdates then come late, so that the "
            "loss may rise for some tens of steps."
        )

    def marked(panel):
        def draw_panel(axes):
            panel(axes)
            if end is not None:
                axes.axvline(end, color=INK, ls=":", lw=1.2)

        return draw_panel

    panels = [*panels, lambda axes: bytes_sent(axes, found)]
    size = min(6, 12.5 / len(panels)), 4.6
    return draw(path, title, [marked(panel) for panel in panels], size, caption)


def bytes_sent(axes, found):
    """Draw the bytes of each step, beside those of a dense all-reduce."""
    axes.step(range(len(found["losses"])), found["bytes_sent"], where="post", color=BLUE,
              label="sent")  # fmt: skip
    axes.axhline(found["bytes_dense"], color=RED, ls="--", label="dense all-reduce")
    axes.set(yscale="log", xlabel="step", ylabel="bytes per step and replica", title="Network")
    axes.yaxis.set_major_formatter(lambda y, _: network(y))
    shown = [x for x in (*found["bytes_sent"], found["bytes_dense"]) if x]
    axes.set_ylim(min(shown, default=1) / 2, max(shown, default=1) * 2)  # they may all be equal
    axes.legend()


def peaks(axes, found, recomputed="blocks recomputed"):
    """Draw the peaks of the compiled step with and without recomputation."""
    names = {"plain": "baseline", "recomputed": recomputed}
    start = np.zeros(2)
    for part, colour in zip(("arguments", "outputs", "temporaries"), (GREY, GREEN, BLUE),
                            strict=True):  # fmt: skip
        sizes = np.array([found["memory"][name][part] for name in names]) / 2**20
        if not sizes.any():
            continue
        axes.barh(list(names.values()), sizes, left=start, label=part, color=colour, height=0.6)
        start += sizes
    for y, total in enumerate(start):
        axes.text(total, y, f" {total:,.1f} MiB", va="center")
    axes.set(xlabel="MiB per replica, as XLA states them")
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.35))
