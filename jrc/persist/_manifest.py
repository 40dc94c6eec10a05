"""The manifest of a save: its leaves, stored next to the arrays and checked before them."""

from typing import Any

import numpy as np

from jrc._optional import needed
from jrc._tree import place_difference
from jrc.persist._leaves import Leaf

FORMAT = 1


def manifest_of(leaves: list[Leaf]) -> list[list[Any]]:
    """Return place, name, shape and dtype of every leaf, as JSON holds them."""
    return [
        [leaf.place, leaf.name, list(getattr(leaf.value, "shape", ())), _dtype(leaf.value)]
        for leaf in leaves
    ]


def kind_of(leaf: Leaf) -> str:
    """Return dtype and shape as text, `float32[2, 3]`."""
    return f"{_dtype(leaf.value)}{list(getattr(leaf.value, 'shape', ()))}"


def _dtype(value: Any) -> str:
    return "None" if value is None else str(value.dtype)


def keys_of(leaves: list[Leaf]) -> list[str]:
    """Return keys for orbax that sort in tree order and are unique."""
    return [f"{i:05d}.{leaf.name.replace('/', '.')}" for i, leaf in enumerate(leaves)]


def stored(leaves: list[Leaf]) -> dict[str, Any]:
    """Return what orbax stores: no arrays without elements, and at least one array.

    orbax refuses both. The manifest holds everything about an array without elements.
    """
    pairs = zip(keys_of(leaves), leaves, strict=True)
    full = {k: leaf.value for k, leaf in pairs if leaf.value is not None and leaf.value.size}
    return {"format": np.asarray(FORMAT)} | full


def read_manifest(reader: Any, where: str) -> list[list[Any]]:
    """Return the manifest of a save, by orbax's reader, or raise if none can be read."""
    ocp = needed("orbax.checkpoint")
    try:
        args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        manifest = reader.restore(where, args=args)["manifest"]
        if manifest["format"] == FORMAT:
            return [[place, name, list(shape), dtype]
                    for place, name, shape, dtype in manifest["leaves"]]  # fmt: skip
        reason = f"its format is {manifest['format']}, this version reads {FORMAT}"
    except (KeyError, TypeError, ValueError, OSError) as error:
        reason = f"it has no readable manifest ({type(error).__name__})"
    raise ValueError(
        f"path must hold a save of jrc.save, got {where}: {reason}. Read it with the "
        "library that wrote it; if that was jrc.save, it is damaged: restore a copy of the folder."
    )


def check_same(saved: list[list[Any]], wanted: list[list[Any]], folder: str) -> None:
    """Raise unless every leaf was saved in its place, with its shape and dtype."""
    old = {place: (name, shape, dtype) for place, name, shape, dtype in saved}
    new = {place: (name, shape, dtype) for place, name, shape, dtype in wanted}
    needed, given = ({place: x[0] for place, x in leaves.items()} for leaves in (new, old))
    if difference := place_difference(needed, given, "not saved", "saved and not expected"):
        raise ValueError(
            "like must have the tree that was saved, got one that differs from "
            f"{folder}: {difference}. Build like with the model and the optimizer that were saved."
        )
    for place, (name, shape, dtype) in new.items():
        if old[place][1:] != (shape, dtype):
            raise ValueError(
                f"like must have the shapes and dtypes that were saved, got "
                f"{dtype}{shape} for leaf {name!r}, which was saved as "
                f"{old[place][2]}{old[place][1]}. Build like as it was saved; compression state "
                "has a row for each replica, which jrc.reshard_dgc changes."
            )
