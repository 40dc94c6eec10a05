"""SparseLoCo and DiLoCo in NumPy, from the formulas alone, one chunk and one entry at a time."""

import math

import numpy as np


def tiles_of(shape, chunk):
    """Flat indices of the entries of each chunk of a leaf, in order; -1 is padding."""
    size = math.prod(shape)
    side = math.isqrt(chunk)
    columns = shape[-1] if len(shape) > 1 else size
    rows = size // columns
    places = np.arange(size).reshape(rows, columns)
    if min(rows, columns) < side:
        count = -(-size // chunk)
        width = -(-size // count)
        flat = np.full(count * width, -1)
        flat[:size] = np.arange(size)
        return list(flat.reshape(count, width))
    down, across = -(-rows // side), -(-columns // side)
    height, width = -(-rows // down), -(-columns // across)
    padded = np.full((down * height, across * width), -1)
    padded[:rows, :columns] = places
    return [
        padded[i * height : (i + 1) * height, j * width : (j + 1) * width].reshape(-1)
        for i in range(down)
        for j in range(across)
    ]


def two_levels(sizes):
    """Lloyd's algorithm for two levels, from the mean of what is not zero."""
    sizes = sizes[sizes > 0].astype(np.float64)
    if not sizes.size:
        return 0.0, 0.0
    low = high = sizes.mean()
    for _ in range(8):
        upper = sizes > (low + high) / 2
        low, high = (
            sizes[~upper].mean() if (~upper).any() else 0.0,
            sizes[upper].mean() if upper.any() else 0.0,
        )
        high = max(high, low)
    return low, high


def sent_by(e, shape, chunk, density):
    """What one replica sends of e, dense and zero elsewhere, with two bits a value."""
    e = e.reshape(-1)
    chosen, tiles = [], tiles_of(shape, chunk)
    least = 1 if len(tiles) == 1 else 2
    for tile in tiles:
        k = max(least, math.ceil(density * len(tile) - 1e-9))
        values = np.where(tile >= 0, e[tile], 0.0)
        order = np.argsort(-np.abs(values), kind="stable")[:k]
        chosen.append((tile[order], values[order]))
    low, high = two_levels(np.abs(np.concatenate([values for _, values in chosen])))
    out = np.zeros_like(e)
    for places, values in chosen:
        worthless = np.abs(values) <= low / 2
        for place, value, skip in zip(places, values, worthless, strict=True):
            if place >= 0 and not skip:
                size = high if abs(value) > (low + high) / 2 else low
                out[place] = -size if value < 0 else size
    return out.reshape(shape)


def sparseloco_round(theta, own, errors, *, chunk, density, decay, outer_lr, over_senders=False):
    """One round of a leaf: shared parameters, and what each replica keeps.

    `own` and `errors` have an entry for each replica.
    """
    sent, kept = [], []
    for mine, e in zip(own, errors, strict=True):
        e = decay * e + (theta - mine)
        v = sent_by(e, theta.shape, chunk, density)
        sent.append(v)
        kept.append(e - v)
    number = np.maximum(sum(v != 0 for v in sent), 1) if over_senders else len(own)
    return theta - outer_lr * sum(sent) / number, kept


def diloco_round(theta, own, momentum, *, outer_lr, outer_momentum, nesterov):
    """One round of a leaf: shared parameters and momentum."""
    g = sum(theta - mine for mine in own) / len(own)
    momentum = outer_momentum * momentum + g
    return theta - outer_lr * (g + outer_momentum * momentum if nesterov else momentum), momentum
