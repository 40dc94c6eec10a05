"""The list of a save's leaves, which lies next to the arrays and is checked before them."""

from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jrc.persist._leaves import Leaf

FORMAT = 1


def manifest_of(leaves: list[Leaf]) -> list[list[Any]]:
    return [
        [leaf.place, leaf.name, list(getattr(leaf.value, "shape", ())), _dtype(leaf.value)]
        for leaf in leaves
    ]


def kind_of(leaf: Leaf) -> str:
    return f"{_dtype(leaf.value)}{list(getattr(leaf.value, 'shape', ()))}"


def _dtype(value: Any) -> str:
    return "None" if value is None else str(value.dtype)


def keys_of(leaves: list[Leaf]) -> list[str]:
    """Keys for orbax that keep their order and cannot clash."""
    return [f"{i:05d}.{leaf.name.replace('/', '.')}" for i, leaf in enumerate(leaves)]


def stored(leaves: list[Leaf]) -> dict[str, Any]:
    """What orbax gets: no arrays without elements, which it refuses, and never nothing at all.

    Of an empty array the manifest says all there is to know.
    """
    pairs = zip(keys_of(leaves), leaves, strict=True)
    full = {k: leaf.value for k, leaf in pairs if leaf.value is not None and leaf.value.size}
    return {"format": np.asarray(FORMAT)} | full


def read_manifest(reader: ocp.Checkpointer, where: str) -> list[list[Any]]:
    try:
        args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        manifest = reader.restore(where, args=args)["manifest"]
        if manifest["format"] == FORMAT:
            return [[place, name, list(shape), dtype]
                    for place, name, shape, dtype in manifest["leaves"]]  # fmt: skip
        reason = f"its format is {manifest['format']}, this version reads {FORMAT}"
    except (KeyError, TypeError, ValueError, OSError) as error:
        reason = f"it has no readable list of leaves ({type(error).__name__})"
    raise ValueError(
        f"jrc.restore: {where} was not made by this jrc.save: {reason}. "
        "Read it with the library that wrote it; if that was jrc.save, it is damaged, and a copy "
        "of the folder may not be."
    )


def check_same(saved: list[list[Any]], wanted: list[list[Any]], folder: str) -> None:
    """Every leaf must be there in its place, with its shape and dtype."""
    old = {place: (name, shape, dtype) for place, name, shape, dtype in saved}
    new = {place: (name, shape, dtype) for place, name, shape, dtype in wanted}
    for there, here, words in ((new, old, "is not saved"), (old, new, "is not expected")):
        missing = [place for place in there if place not in here]
        if missing:
            where = missing[0] or "the top"
            raise ValueError(
                f"jrc.restore: leaf {there[missing[0]][0]!r}, at {where}, {words} "
                f"({len(missing)} such) in {folder}. Build `like` with the model and the "
                "optimizer that were saved."
            )
    for place, (name, shape, dtype) in new.items():
        if old[place][1:] != (shape, dtype):
            raise ValueError(
                f"jrc.restore: leaf {name!r} was saved as {old[place][2]}{old[place][1]}, `like` "
                f"has {dtype}{shape}. Nothing is cast or cut: build `like` as it was saved "
                "(compression state grows with the number of replicas: see jrc.reshard_dgc)."
            )
