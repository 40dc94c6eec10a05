"""Texts of plans and reports that were changed after they were written."""

import copy
import json

WRONG = ["x", -1, 0, 1.5, True, None, [], ["a"], [1], {}]
# Entries of a list are alike: the first two and the last are changed.
_OF_A_LIST = (0, 1, -1)


def changed_texts(text):
    """The text with each of its entries left out, and replaced by each of `WRONG`."""
    data = json.loads(text)
    for *path, last in _paths(data):
        changed = copy.deepcopy(data)
        parent = changed
        for key in path:
            parent = parent[key]
        old = parent[last]
        for value in WRONG:
            if (type(value), value) != (type(old), old):
                parent[last] = value
                yield json.dumps(changed)
        del parent[last]
        yield json.dumps(changed)


def _paths(data):
    keys = list(data) if isinstance(data, dict) else []
    if isinstance(data, list):
        keys = sorted({k % len(data) for k in _OF_A_LIST if data})
    for key in keys:
        yield [key]
        yield from ([key, *rest] for rest in _paths(data[key]))
