"""Recompute the blocks of a flax module, linen or nnx: less memory, the same numbers.

    python examples/flax_modules.py
    python examples/flax_modules.py --layers 16

`jrc.recompute_module` makes a block one region: its output is saved, its interior is recomputed for
the gradient. Parameters, dropout masks and running statistics are those of the plain module.
`jrc.plan` needs no change to the module: it chooses what to recompute within a budget.
"""

import common
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from rich.console import Console
from rich.table import Table

import jrc


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        h = nn.Dense(4 * x.shape[-1])(nn.BatchNorm(use_running_average=not train)(x))
        h = nn.Dropout(0.1, deterministic=not train)(nn.gelu(h))
        return x + nn.Dense(x.shape[-1])(h), h != 0  # the mask, to be compared


class Net(nn.Module):
    layers: int
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x, train):
        masks = []
        for i in range(self.layers):
            x, mask = self.block(name=f"block_{i}")(x, train)
            masks.append(mask)
        return x, masks


def linen_ways(layers, x, y):
    """Return the losses of the three ways, each with its arguments."""

    def loss_of(net):
        def loss(params, statistics):
            variables = {"params": params, "batch_stats": statistics}
            rngs, mutable = {"dropout": jax.random.key(1)}, ["batch_stats"]
            (out, masks), new = net.apply(variables, x, train=True, rngs=rngs, mutable=mutable)
            return jnp.mean((out - y) ** 2), (masks, new["batch_stats"])

        return loss

    plain = Net(layers)
    recomputed = Net(layers, block=jrc.recompute_module(Block))
    variables = plain.init(jax.random.key(0), x, train=False)  # for both modules
    args = variables["params"], variables["batch_stats"]
    plan = jrc.plan(loss_of(plain), *args, budget=0.25, has_aux=True)
    losses = loss_of(plain), loss_of(recomputed), plan.apply(loss_of(plain))
    return [(loss, args) for loss in losses]


class NnxBlock(nnx.Module):
    def __init__(self, width, *, rngs):
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        h = self.dropout(nnx.gelu(self.up(self.norm(x))))
        return x + self.down(h), h != 0


class NnxNet(nnx.Module):
    def __init__(self, layers, width, *, rngs, recompute=False):
        blocks = [NnxBlock(width, rngs=rngs) for _ in range(layers)]
        self.blocks = nnx.List(map(jrc.recompute_module, blocks) if recompute else blocks)

    def __call__(self, x):
        masks = []
        for block in self.blocks:
            x, mask = block(x)
            masks.append(mask)
        return x, masks


def nnx_ways(layers, x, y):
    def loss(net):
        out, masks = net(x)
        return jnp.mean((out - y) ** 2), (masks, nnx.state(net, nnx.BatchStat))

    # A call changes the module (statistics, key counters), so each way has a module of its own.
    nets = [NnxNet(layers, x.shape[1], rngs=nnx.Rngs(0), recompute=i == 1) for i in range(3)]
    plan = jrc.plan(loss, nets[0], budget=0.25, has_aux=True)
    return [(fn, (net,)) for fn, net in zip((loss, loss, plan.apply(loss)), nets, strict=True)]


def largest_error(tree, other):
    """Return the largest difference of two trees, relative to a leaf's largest entry."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model")
    parser.add_argument("--width", type=int, default=64, help="features of the model")
    parser.add_argument("--batch", type=int, default=1024, help="examples of a batch")
    options = parser.parse_args(argv)
    x, y = jax.random.normal(jax.random.key(2), (2, options.batch, options.width))

    title = f"{options.layers} residual blocks: the gradient, against that of the plain module"
    table = Table("", "peak", "gradients", "masks", "statistics", title=title)
    found = {}
    kinds = ("linen", linen_ways, jax.jit, jax.grad), ("nnx", nnx_ways, nnx.jit, nnx.grad)
    for kind, ways, jit, grad in kinds:
        first = None
        names = "plain", "recompute_module", "jrc.plan"
        for name, (loss, args) in zip(names, ways(options.layers, x, y), strict=True):
            peak = jrc.explain(loss, *args, has_aux=True).memory.peak
            grads, (masks, statistics) = jit(grad(loss, has_aux=True))(*args)
            first = first or (grads, masks, statistics)
            equal = (
                largest_error(grads, first[0]) < 1e-5,
                all(jnp.array_equal(a, b) for a, b in zip(masks, first[1], strict=True)),
                largest_error(statistics, first[2]) < 1e-6,  # would differ after a second update
            )
            found[kind, name] = peak, *equal
            words = ["equal" if e else "DIFFER" for e in equal] if name != "plain" else []
            table.add_row(f"{kind}, {name}", f"{peak / 2**20:,.1f} MiB", *words)
    Console().print(table)
    return found


if __name__ == "__main__":
    main()
