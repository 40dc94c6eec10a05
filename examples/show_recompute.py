"""Show that the gradient of BatchNorm reads a recomputed convolution.

    python examples/show_recompute.py

The model has two residual blocks of convolution, BatchNorm and relu. Prints every convolution of
the lowered gradient program (StableHLO) with its operands, and which one the gradient of each
BatchNorm reads: first with nothing recomputed, then with the second block recomputed. Without
recomputation it is the convolution of the forward pass, whose result must be saved. In the
recomputed block it is a second convolution with the same operands.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jrc


def conv(w, x):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(scale, bias, x):
    mean = x.mean((0, 1, 2), keepdims=True)
    variance = ((x - mean) ** 2).mean((0, 1, 2), keepdims=True)
    normal = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return normal * scale[None, None, None] + bias[None, None, None]


def loss(params, x):
    for i, block in enumerate(params):
        branch = batch_norm(block["scale"], block["bias"], conv(block["w"], x))
        x = jrc.mark(jax.nn.relu(x + branch), f"block_{i}")
    return jnp.mean(x)


def arguments():
    shape = jax.ShapeDtypeStruct
    channels = shape((4,), jnp.float32)
    block = {"bias": channels, "scale": channels, "w": shape((3, 3, 4, 4), jnp.float32)}
    return [block, block], shape((8, 6, 6, 4), jnp.float32)


# ---------------------------------------------------------------- the lowered program


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line: `%5 = stablehlo.add %3, %4 : tensor<8xf32>`."""

    result: str
    operator: str
    operands: tuple[str, ...]
    shape: str
    settings: str


class Listing:
    """The operations of a gradient program's main function, in order, and their operands."""

    def __init__(self, fn):
        args = arguments()
        # With the value: otherwise JAX may drop the last block's forward pass as dead code.
        lowered = jax.jit(jax.value_and_grad(fn), keep_unused=True).lower(*args)
        main = lowered.as_text().split("func.func public @main", 1)[1].split("func.func private")[0]
        found = (_operation(line) for line in main.splitlines())
        self.operations = [operation for operation in found if operation]
        self.made = {operation.result: operation for operation in self.operations}
        self.names = {f"%arg{i}": name for i, name in enumerate(_names(args))}
        _, *returned = next(o for o in self.operations if o.operator == "return").operands
        self.gradients = dict(zip(_names(args[0]), returned, strict=True))

    def maker(self, value):
        """Return the operation that makes a value; None for an argument."""
        return self.made.get(value.partition("#")[0])

    def source(self, value):
        """Return the value before `optimization_barrier`, which only orders the program."""
        maker = self.maker(value)
        if maker is None or maker.operator != "optimization_barrier":
            return value
        return self.source(maker.operands[int(value.partition("#")[2] or 0)])

    def convolutions(self):
        return [o for o in self.operations if o.operator == "convolution"]

    def same(self, one, two):
        """Return whether two operations have equal settings and operands."""
        operands = [tuple(map(self.source, o.operands)) for o in (one, two)]
        return one.settings == two.settings and operands[0] == operands[1]

    def forward(self, block):
        """Return a block's convolution in the forward pass: the first that reads its weights."""
        reads = lambda o: f"{block}/w" in map(self.name, o.operands)  # noqa: E731
        return next(o for o in self.convolutions() if reads(o))

    def reruns(self, forward):
        """Return the later operations that compute the same."""
        later = self.operations[self.operations.index(forward) + 1 :]
        return [o for o in later if o.operator == "convolution" and self.same(o, forward)]

    def normalised(self, scale):
        """Return the normalised value in the gradient of BatchNorm's scale.

        The gradient is sum(cotangent * normalised). The normalised value is itself a product, of
        x - mean and 1 / deviation; the cotangent comes from a `select`, the gradient of relu.
        """
        maker = self.maker(scale)
        while maker.operator in ("reduce", "reshape"):
            maker = self.maker(self.source(maker.operands[0]))
        factors = [self.source(value) for value in maker.operands]
        (value,) = [v for v in factors if self.maker(v).operator == "multiply"]
        return value

    def convolutions_of(self, value):
        """Return the convolutions that a value is computed from directly."""
        found, seen, left = [], set(), [value]
        while left:
            maker = self.maker(self.source(left.pop()))
            if maker is None or maker.result in seen:
                continue
            seen.add(maker.result)
            if maker.operator == "convolution":
                found.append(maker)
            else:
                left += maker.operands
        return found

    def name(self, value):
        """Return the name of a parameter or the input; any other value as the program writes it."""
        value = self.source(value)
        return self.names.get(value, value)


def _operation(line):
    line = line.strip()
    if line.startswith("return "):
        return Operation("", "return", tuple(re.findall(r"%[\w#]+", line)), "", "")
    match = re.match(r"(%\w+)(?::\d+)? = (?:stablehlo\.)?(\w+)(.*)", line)
    if not match:
        return None
    body, _, types = match[3].rpartition(" : ")
    operands = tuple(re.findall(r"%[\w#]+", body))
    shape = re.findall(r"tensor<(?:([\dx]*)x)?\w+>", types)[-1]
    return Operation(match[1], match[2], operands, shape, re.sub(r"%[\w#]+", "", body))


def _names(tree):
    """Return the names of the leaves: `block_0/w`, and `x` for the input."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [re.findall(r"\w+", jax.tree_util.keystr(path)) for path, _ in pairs]
    return [f"block_{name[-2]}/{name[-1]}" if len(name) > 1 else "x" for name in names]


# ---------------------------------------------------------------- the tables


def rows(listing):
    """Yield each convolution, and each BatchNorm's gradient with the convolution it reads."""
    blocks = [f"block_{i}" for i in range(len(arguments()[0]))]
    words, reads = {made: f"gradient of {name}" for name, made in listing.gradients.items()}, {}
    for block in blocks:
        forward = listing.forward(block)
        again = listing.reruns(forward)
        words |= {forward.result: f"{block}, forward"}
        words |= {o.result: f"{block}, RE-RUN of {forward.result}" for o in again}
        scale = listing.gradients[f"{block}/scale"]
        (read,) = listing.convolutions_of(listing.normalised(scale))
        reads[scale] = read.result
    other = "gradient of a block's input"
    for o in listing.operations:
        operands = ", ".join(listing.name(v) for v in o.operands if not v.startswith("%cst"))
        if o.operator == "convolution":
            yield o.result, o.operator, o.shape, operands, words.get(o.result, other)
        if o.result in reads:
            block = next(b for b in blocks if listing.gradients[f"{b}/scale"] == o.result)
            word = f"{block}, gradient of BatchNorm's scale, from {reads[o.result]}"
            yield o.result, o.operator, o.shape, operands, word


def show(console, title, listing):
    count = len(listing.convolutions())
    table = Table("", "operator", "result", "operands", "", title=f"{title}: {count} convolutions")
    for row in rows(listing):
        table.add_row(*row, style="bold" if "RE-RUN" in row[-1] else None)
    console.print(table)


def main():
    console = Console()
    show(console, "Before, the baseline", Listing(loss))
    lean = jrc.recompute_segments(loss, ["block_0", "block_1"], no_recompute_segments=[0])
    show(console, "After, block_1 re-run", Listing(lean))


if __name__ == "__main__":
    main()
