"""Random straight-line programs as plain data, which a reference implementation can read.

Operator i makes value i; the values 0 and 1 are the inputs `x` (4, 4) and `w` (4, 4).
"""

import dataclasses

import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

import jrc

UNARY = {"sin": lax.sin, "tanh": lax.tanh, "neg": lax.neg, "exp": lambda x: lax.exp(x)}
BINARY = {"add": lax.add, "mul": lax.mul, "dot_general": lambda x, y: lax.dot(x, y)}


@dataclasses.dataclass(frozen=True)
class CostGraph:
    ops: tuple[tuple[str, tuple[int, ...]], ...]
    marked: frozenset[int]

    def __call__(self, w, x, skip_dead=False):
        values = [x, w]
        live = self.live()
        for i, (op, operands) in enumerate(self.ops):
            if skip_dead and i not in live:
                values.append(None)
                continue
            value = (UNARY | BINARY)[op](*(values[j] for j in operands))
            values.append(jrc.mark(value, f"v{i}") if i in self.marked else value)
        return jnp.sum(values[-1])

    def live(self):
        """Return the operators that the result depends on, in order."""
        wanted = {len(self.ops) + 1}
        for i in range(len(self.ops) - 1, -1, -1):
            if i + 2 in wanted:
                wanted |= set(self.ops[i][1])
        return [i for i in range(len(self.ops)) if i + 2 in wanted]


@st.composite
def graphs(draw, mark_all=True, max_ops=12):
    count = draw(st.integers(2, max_ops))
    ops = []
    for i in range(count):
        op = draw(st.sampled_from([*UNARY, *BINARY]))
        # Mostly the latest values, so that the graph is deep and has few dead operators.
        pick = st.integers(max(0, i - 1), i + 1) | st.integers(0, i + 1)
        ops.append((op, tuple(draw(pick) for _ in range(1 if op in UNARY else 2))))
    marked = range(count) if mark_all else draw(st.sets(st.integers(0, count - 1)))
    return CostGraph(tuple(ops), frozenset(marked))
