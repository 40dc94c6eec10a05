"""Recomputation: names, rules, sizes, budgets, and plans and reports as text."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jrc
from tests.messages.rows import Row

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))
NORM = nnx.BatchNorm(4, rngs=nnx.Rngs(0))


def loss(w, x):
    h = jrc.mark(jnp.tanh(x @ w), "fc_1")
    return jnp.mean(jrc.mark(jnp.sin(h @ w), "pred"))


def vector(w, x):
    return x @ w


def body(carry, x):
    return carry + x, carry


def of_tree(params, x):
    return loss(params["w"], x)


def of_step(loss_first=False):
    """A train step of the user's own."""

    def step(params, x):
        value, grads = jax.value_and_grad(of_tree)(params, x)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        return (value, new, x) if loss_first else (new, value)

    return step


def cut(**options):
    return jax.grad(jrc.recompute_segments(loss, ["fc_1", "pred"], **options))(W, X)


@functools.cache
def report():
    return jrc.explain(loss, W, X)


@functools.cache
def plan():
    return jrc.plan(loss, W, X, budget=10**9, verify=False)


def shapes(batch):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (batch, 4))]


def edited(**changes):
    return json.dumps(json.loads(report().to_json()) | changes)


def largest(budget="1MB", make_args=shapes, fn=loss, **options):
    return jrc.largest_batch(make_args, fn, budget, most=4, **options)


def in_shard_map(call):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.sharding.PartitionSpec("data")
    return jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows)(X)


def writes(carry, _):
    jax.experimental.io_callback(print, None, carry)
    return carry, None


scan = functools.partial(jrc.recompute_scan, body, jnp.float32(0), jnp.ones(8))
planned = functools.partial(jrc.plan, loss, W, X, verify=False)
Type, Value = TypeError, ValueError

# fmt: off
ROWS = [
    Row("jrc.mark", "no text", lambda: jrc.mark(W, 3), Type, "name must be a string", "got int 3",
        "Write jrc.mark(x, 'block_0')"),
    Row("jrc.mark", "a number's sign", lambda: jrc.mark(W, "a#2"), Value, "nor contain '#'",
        "got 'a#2'", "Choose another name"),
    Row("jrc.recompute_segments", "no function", lambda: jrc.recompute_segments(3, ["fc_1"]), Type,
        "fn must be the function to cut", "got 3", "Pass the loss function"),
    Row("jrc.recompute_segments", "a text", lambda: jrc.recompute_segments(loss, "fc_1"), Type,
        "a list of mark names", "got str 'fc_1'", "Write checkpoints=['block_0', 'block_1']"),
    Row("jrc.recompute_segments", "an unknown mark",
        lambda: jrc.recompute_segments(loss, ["fc_9"])(W, X), Value,
        "checkpoints must name marks of `loss` ('fc_1', 'pred')", "got 'fc_9'",
        "did you mean 'fc_1'?"),
    Row("jrc.recompute_segments", "an unknown rule", lambda: cut(rule="Fluid"), Value,
        "rule must be one of 'partition'", "got 'Fluid'", "Write rule='fluid'"),
    Row("jrc.recompute_segments", "names for rules", lambda: cut(keep="fc_1"), Type,
        "keep must be a rule", "got str 'fc_1'", "such as jrc.Save('h')"),
    Row("jrc.recompute_segments", "a rule's unknown mark", lambda: cut(keep=jrc.Save("fc_9")),
        Value, "must name marks of `loss` within its reach ('fc_1', 'pred')", "got 'fc_9'",
        "jrc.mark(x, name), or leave the name out"),
    Row("jrc.recompute_segments", "an unknown memory",
        lambda: cut(keep=jrc.Offload("fc_1", to="moon")), Value,
        "must name a memory kind of", "got 'moon'", "Choose one of them, or use jrc.Save"),
    Row("jrc.recompute_segments", "a pattern without operators",
        lambda: cut(keep_patterns=[{"num": 2}]), Value, "must name at least one operator",
        "got {'num': 2}", "Write {'main_ops'"),
    Row("jrc.recompute_segments", "a pattern that is a list", lambda: cut(keep_patterns=["tanh"]),
        Type, "keep_patterns[0] must be a dict", "got 'tanh'", "Write {'main_ops'"),
    Row("jrc.recompute_segments", "a segment too far", lambda: cut(no_recompute_segments=[5]),
        Value, "no_recompute_segments[0] must be a whole number from 0 to 1", "got 5",
        "See the segments with jrc.find_segments"),
    Row("jrc.recompute_segments", "a number for a list", lambda: cut(no_recompute_segments=0), Type,
        "must be a list of numbers", "got 0", "Write no_recompute_segments=[0]"),
    Row("jrc.recompute_segments", "no segments",
        lambda: jrc.recompute_segments(loss, [], no_recompute_segments=[0])(W, X), Value,
        "must be empty where there is no segment", "got [0]",
        "See the segments with jrc.find_segments"),
    Row("jrc.find_segments", "names that are none", lambda: jrc.find_segments(loss, [3], W, X),
        Type, "must contain names of marks", "got int", "Mark the value with jrc.mark"),
    Row("jrc.find_segments", "no marks", lambda: jrc.find_segments(vector, ["fc_1"], W, X), Value,
        "checkpoints must name marks of `vector` (none)", "got 'fc_1'",
        "Name a value with jrc.mark(x, name)"),
    Row("jrc.recompute", "no function", lambda: jrc.recompute(W, X), Type,
        "function must be the function to call", "got ArrayImpl", "Write jrc.recompute(block, x)"),
    Row("jrc.recompute", "a word for a switch",
        lambda: jrc.recompute(vector, W, X, preserve_rng_state="no"), Type,
        "preserve_rng_state must be True or False",
        "got 'no'", "Write preserve_rng_state=True"),
    Row("jrc.recompute", "no word for a switch",
        lambda: jrc.recompute(vector, W, X, use_reentrant=None), Type,
        "use_reentrant must be True or False",
        "got None", "Write use_reentrant=True"),
    Row("jrc.recompute", "no key", lambda: jrc.recompute(vector, W, X, preserve_rng_state=False),
        Value, "args must contain a typed key", "got none", "Pass a jax.random.key(seed)"),
    Row("jrc.recompute", "a module that changes", lambda: jrc.recompute(NORM, X), Type,
        "must not change a flax module in place", "got 'BatchNorm'",
        "jrc.recompute_module(module)"),
    Row("jrc.recompute_sequential", "one function",
        lambda: jrc.recompute_sequential(jnp.sin, X, segments=1), Type, "functions must be a list",
        "got ", "Write [first, second]"),
    Row("jrc.recompute_sequential", "too many segments",
        lambda: jrc.recompute_sequential([jnp.sin] * 2, X, segments=3), Value,
        "segments must be a whole number from 1 to 2", "got 3", "segments=2 makes each"),
    Row("jrc.recompute_sequential", "no key",
        lambda: jrc.recompute_sequential([jnp.sin] * 2, X, segments=2, preserve_rng_state=False),
        Value, "args must contain a typed key", "got none", "Pass a jax.random.key(seed)"),
    Row("jrc.recompute_sequential", "a number for a switch",
        lambda: jrc.recompute_sequential([jnp.sin], X, segments=1, preserve_rng_state=1), Type,
        "preserve_rng_state must be True or False", "got 1", "Write preserve_rng_state=True"),
    Row("jrc.chunked", "no function", lambda: jrc.chunked(None, chunks=2), Type,
        "fn must be callable", "got NoneType", "Pass the function itself"),
    Row("jrc.chunked", "an axis that is not independent",
        lambda: jrc.chunked(lambda x: jnp.cumsum(x, 0), chunks=2)(X), Value,
        "in_axes must name an axis along which", "cumsum", "Cut another axis"),
    Row("jrc.chunked", "no chunks", lambda: jrc.chunked(jnp.tanh, chunks=0), Value,
        "chunks must be a whole number >= 1", "got 0", "Write chunks=8"),
    Row("jrc.chunked", "more chunks than slices",
        lambda: jrc.chunked(jnp.tanh, chunks=99)(X), Value,
        "chunks must be at most the slices of the axis", "got 99", "Write chunks="),
    Row("jrc.plan", "options of gradients",
        lambda: jrc.plan(vector, W, X, budget="1MB", argnums=None, offload=True), Value,
        "argnums=None must be used with", "got offload", "Leave one of the two out"),
    Row("jrc.recompute_scan", "no function", lambda: jrc.recompute_scan(None, W, X), Type,
        "body must be a function", "got NoneType", "Write jrc.recompute_scan(body, carry, xs)"),
    Row("jrc.recompute_scan", "no segments", lambda: scan(segments=0), Value,
        "at least one level and one segment", "got segments=0", "Write segments=1"),
    Row("jrc.recompute_scan", "too many segments", lambda: scan(segments=9), Value,
        "at least one step", "got segments=9", "Write fewer"),
    Row("jrc.recompute_scan", "another length", lambda: scan(length=7), Value,
        "must state one number of steps", "got 'xs': 8 and length=7", "pass length=N"),
    Row("jrc.recompute_scan", "a Boolean for a length", lambda: scan(length=True), Type,
        "length must be a whole number", "got True", "Write length=4"),
    Row("jrc.recompute_scan", "a word for a direction", lambda: scan(reverse="yes"), Type,
        "reverse must be True or False", "got 'yes'", "Write reverse=True"),
    Row("jrc.recompute_scan", "no unroll", lambda: scan(unroll=None), Type,
        "unroll must be a whole number", "got None", "Write unroll=1"),
    Row("jrc.recompute_scan", "a negative unroll", lambda: scan(unroll=-1), Value,
        "unroll must be a whole number", "got -1", "Write unroll=1"),
    Row("jrc.recompute_scan", "a body that writes", lambda: jrc.recompute_scan(writes, 0.0, None,
        length=4), Value, "body must have no effect that must run once",
        "got 'io_callback:@remat_rows.py", "use jax.lax.scan and jrc.plan"),
    Row("jrc.recompute_module", "a function", lambda: jrc.recompute_module(loss), Type,
        "must be a flax linen or nnx module", "got function 'loss'",
        "write jrc.recompute(function"),
    Row("jrc.recompute_module", "no methods", lambda: jrc.recompute_module(nn.Dense(2), methods=[]),
        Value, "must have at least one name", "got []", "Leave it out for __call__"),
    Row("jrc.recompute_module", "a negative place",
        lambda: jrc.recompute_module(nn.Dense(2), static_argnums=-1), Value,
        "must be counted from 0 after self", "got -1", "from the front"),
    Row("jrc.keep_op", "an array", lambda: jrc.keep_op(X), Type,
        "fn must be an operator", "got ArrayImpl", "Write jrc.keep_op(jax.nn.relu)(x)"),
    Row("jrc.recompute_op", "an array", lambda: jrc.recompute_op(X), Type,
        "fn must be an operator", "got ArrayImpl", "Write jrc.recompute_op(jax.nn.relu)(x)"),
    Row("jrc.apply_rules", "no function", lambda: jrc.apply_rules(None), Type,
        "fn must be a function", "got NoneType", "Pass the function itself"),
    Row("jrc.apply_rules", "an unknown operator",
        lambda: jax.grad(jrc.apply_rules(loss, jrc.RecomputePrimitives("relu6")))(W, X), Value,
        "must name operators of `loss` (", "got 'relu6'", "reached by jrc.keep_op"),
    Row("jrc.Save", "no name", lambda: jrc.Save(), Value,
        "names must contain at least one mark", "got none",
        "Write jrc.Save('name')"),
    Row("jrc.SavePrimitives", "a list", lambda: jrc.SavePrimitives(["tanh"]), Type,
        "names must be strings, each naming a primitive", "got ['tanh']",
        "Write jrc.SavePrimitives('name', 'other')"),
    Row("jrc.RecomputePrimitives", "an empty name", lambda: jrc.RecomputePrimitives(""), Type,
        "names must be strings, each naming a primitive", "got ''",
        "Write jrc.RecomputePrimitives("),
    Row("jrc.Offload", "no memory", lambda: jrc.Offload("h", to=None), Type,
        "to must be the name of a memory kind", "got None", "Write to='pinned_host'"),
    Row("jrc.explain", "no function", lambda: jrc.explain(W, X), Type,
        "fn must be a function", "got ArrayImpl", "Pass the loss function itself"),
    Row("jrc.explain", "no arguments", lambda: jrc.explain(loss), Value,
        "positions of the 0 arguments", "got 0", "Pass its arguments after the function"),
    Row("jrc.explain", "an argument twice", lambda: jrc.explain(loss, W, X, argnums=(0, 0)), Value,
        "must name each argument once", "got (0, 0)", "Leave out"),
    Row("jrc.explain", "no loss", lambda: jrc.explain(vector, W, X), Type,
        "must return a floating scalar", "got float32[2, 4]", "Sum or average"),
    Row("jrc.explain", "a gradient", lambda: jrc.explain(jax.grad(loss, (0, 1)), W, X,
        argnums=(0, 1)), Type, "fn must return a floating scalar", "got tuple from what looks like",
        "Pass `loss` itself"),
    Row("jrc.explain", "a loss and its gradient",
        lambda: jrc.explain(jax.value_and_grad(of_tree), {"w": W}, X), Type,
        "fn must return a floating scalar", "got tuple from what looks like jax.value_and_grad",
        "Pass `of_tree` itself"),
    Row("jrc.explain", "one array's gradient", lambda: jrc.explain(jax.grad(loss), W, X), Type,
        "must return a floating scalar", "got float32[4, 4]", "pass the loss itself"),
    Row("jrc.explain", "a number for a switch", lambda: jrc.explain(loss, W, X, has_aux=1), Type,
        "has_aux must be True or False", "got 1", "Write has_aux=True"),
    Row("jrc.explain", "a traced array",
        lambda: jax.jit(lambda x: jrc.explain(loss, W, x))(X), Type,
        "arguments must be arrays or shapes", "got a traced float32[2, 4]", "outside of jax.jit"),
    Row("jrc.explain", "a function of a traced array",
        lambda: jax.jit(lambda x: jrc.explain(lambda w: loss(w, x), W))(X), Type,
        "what `<lambda>` closes over must be arrays", "got a traced float32[2, 4]",
        "jax.ShapeDtypeStruct(...) as an argument"),
    Row("jrc.explain", "nothing floating", lambda: jrc.explain(loss, jnp.arange(4), X), Value,
        "an argument with a floating array", "arguments (0,)", "Pass argnums="),
    Row("jrc.Report.from_json", "no text", lambda: jrc.Report.from_json(None), Value,
        "text must be what Report.to_json writes, of format 'jrc.Report/6'", "NoneType",
        "jrc.explain(...).to_json()"),
    Row("jrc.Report.from_json", "a plan", lambda: jrc.Report.from_json(plan().to_json()), Value,
        "text must be what Report.to_json writes", "format 'jrc.Plan/21 of jrc ",
        "jrc.explain(...).to_json()"),
    Row("jrc.Report.from_json", "half of it",
        lambda: jrc.Report.from_json('{"format": "jrc.Report/6"}'), Value,
        "text must be what Report.to_json writes", "was changed after it was written",
        "jrc.explain(...).to_json()"),
    Row("jrc.Report.from_json", "another number", lambda: jrc.Report.from_json(edited(flops=3)),
        Value, "text must be what Report.to_json writes", "was changed after it was written",
        "jrc.explain(...).to_json()"),
    Row("jrc.Report.compare", "no report", lambda: report().compare(None), Type,
        "every other report must be a jrc.Report", "got NoneType", "jrc.Report.from_json(text)"),
    Row("jrc.Report.compare", "one name", lambda: report().compare(report(), names=("a",)), Value,
        "names must be two", "got ('a',)", "Write names=('before', 'after')"),
    Row("jrc.Report.compare", "a number for names", lambda: report().compare(report(), names=3),
        Type, "names must be a list of strings", "got 3", "Write names=['before', 'after']"),
    Row("jrc.Report.plot", "nothing to draw",
        lambda: dataclasses.replace(report(), live=()).plot("x.png"), Value,
        "report must have live bytes to be drawn", "got none of `loss`", "jrc.plan makes a loss"),
    Row("jrc.Report.plot", "no path", lambda: report().plot(None), Type,
        "path must be text or a pathlib.Path", "got NoneType", "Write 'memory.png'"),
    Row("jrc.Report.plot", "too many names", lambda: report().plot("x.png", names=["a", "b"]),
        Value, "names must be one for each", "got ['a', 'b']", "Leave names out"),
    Row("jrc.plan", "no function", lambda: jrc.plan(3, W, budget=1), Type,
        "fn must be a function", "got int", "Pass the loss function itself"),
    Row("jrc.plan", "offload on a CPU", lambda: planned(budget=1.0, offload=True), Value,
        "offload must be used with an accelerator", "got a CPU", "target='h100'"),
    Row("jrc.plan", "a word for a rate", lambda: planned(budget=1.0, offload="fast"), Type,
        "offload must be a bool, or the bytes per second", "got str", "Write offload=True"),
    Row("jrc.plan", "a rate for a budget", lambda: planned(budget="2 GB/s"), Value,
        "a number and a unit", "got '2 GB/s'", "such as '1.5GiB'"),
    Row("jrc.plan", "bits for a budget", lambda: planned(budget="2GBit"), Value,
        "a number and a unit", "got '2GBit'", "such as '1.5GiB'"),
    Row("jrc.plan", "a budget without a unit", lambda: planned(budget="1.5"), Value,
        "a number and a unit", "got '1.5'", "A fraction is no text"),
    Row("jrc.plan", "a negative budget", lambda: planned(budget=-5), Value,
        "budget in bytes must be positive", "got -5", "Write '1.5GiB'"),
    Row("jrc.plan", "a fraction beyond one", lambda: planned(budget=2.0), Value,
        "a fraction in [0, 1]", "got 2.0", "int(2e9), '2GiB'"),
    Row("jrc.plan", "more than all of the baseline", lambda: planned(budget="120%"), Value,
        "above 0 and at most 100", "got '120%'", "Write '60%'"),
    Row("jrc.plan", "a reserve of a fraction", lambda: planned(budget=0.5, reserve="1MB"), Value,
        "reserve must go with a budget in bytes", "got a fraction", "Write budget='16GiB'"),
    Row("jrc.plan", "a reserve that leaves nothing", lambda: planned(budget=10, reserve=10), Value,
        "reserve must be smaller than the budget", "got 10 B of 10 B", "Shard the"),
    Row("jrc.plan", "a number in a reserve", lambda: planned(budget=10, reserve=[0.5]), Type,
        "a pytree of arrays or shapes", "got float 0.5", "jax.eval_shape(tx.init, params)"),
    Row("jrc.plan", "a gradient",
        lambda: jrc.plan(jax.grad(of_tree), {"w": W}, X, budget=1, verify=False), Type,
        "fn must return a floating scalar", "got dict from what looks like jax.grad(`of_tree`)",
        "Pass `of_tree` itself: jrc.plan differentiates it"),
    *(
        Row(f"jrc.{function.__name__}", f"a train step {what}", lambda function=function, step=step:
            function(step, {"w": W}, X, **({} if function is jrc.explain else {"budget": 1})), Type,
            "`step` must return a floating scalar", "got tuple with new values of its argument",
            "Plan the loss, jrc.plan(loss, ..., reserve=opt_state), and call plan.apply(loss) in "
            "the step; argnums=None of jrc.plan and jrc.explain takes the step as it is.")
        for function in (jrc.plan, jrc.explain)
        for what, step in (("", of_step()), ("under jax.jit", jax.jit(of_step())),
                           ("that returns its loss first", of_step(loss_first=True)))
    ),
    Row("jrc.plan", "a step as it is", lambda: jrc.plan(of_step(), {"w": W}, X, budget=1,
                                                         argnums=None), jrc.BudgetError,
        "the least peak that was found of `step` is", "the budget is 1 B",
        "of a train step plan the loss, with reserve=opt_state."),
    Row("jrc.plan", "too many compilations", lambda: planned(budget=1, compilations=11), Value,
        "a whole number from 1 to 10", "got 11", "Leave it out"),
    Row("jrc.plan", "too few arguments", lambda: jrc.plan(loss, W, budget=1), Type,
        "must accept the arguments", "missing a required argument: 'x'",
        "functools.partial(fn, key=...)"),
    Row("jrc.plan", "a text for a position", lambda: planned(budget=1, argnums="0"), Type,
        "must be a position or a tuple of them", "got '0'", "Write argnums=0"),
    Row("jrc.plan", "a traced array",
        lambda: jax.grad(lambda w: jrc.plan(loss, w, X, budget=1))(W), Type,
        "arguments must be arrays or shapes", "got a traced float32[4, 4]", "outside of jax.jit"),
    Row("jrc.plan", "a traced array on a target",
        lambda: jax.jit(lambda w: jrc.plan(loss, w, X, budget=1, target="v5e"))(W), Type,
        "arguments must be arrays or shapes", "got a traced float32[4, 4]", "outside of jax.jit"),
    Row("jrc.plan", "a function of a traced array",
        lambda: jax.vmap(lambda x: jrc.plan(lambda w: loss(w, x), W, budget=1))(X[None]), Type,
        "what `<lambda>` closes over must be arrays", "got a traced float32[2, 4]",
        "plan.apply(fn)"),
    Row("jrc.plan", "a function of one device's part",
        lambda: in_shard_map(lambda x: jrc.plan(lambda w: loss(w, x), W, budget=1, cache=".")),
        Type, "what `<lambda>` closes over must be arrays", "got a traced float32[1, 4]",
        "plan.apply(fn)"),
    Row("jrc.plan", "a budget too small", lambda: planned(budget=10), jrc.BudgetError,
        "that was predicted of the gradient", "the budget is 10 B", "raise the budget"),
    Row("jrc.Plan.apply", "no function", lambda: plan().apply(None), Type,
        "the argument must be a function", "got NoneType", "Pass the function that the plan"),
    Row("jrc.Plan.apply", "another program", lambda: plan().apply(vector)(W, X), Value,
        "made for another program", "`vector`", "plan again with jrc.plan"),
    Row("jrc.Plan.apply", "another shape", lambda: plan().apply(loss)(W, X[:1]), Value,
        "made for another program", "'x' was float32[2,4], now it is float32[1,4]",
        "plan again with jrc.plan"),
    Row("jrc.Plan.from_json", "another format", lambda: jrc.Plan.from_json(report().to_json()),
        Value, "text must be what Plan.to_json writes", "got format 'jrc.Report/6'",
        "Plan again with jrc.plan"),
    Row("jrc.largest_batch", "offload on a CPU", lambda: largest(offload=True), Value,
        "offload must be used with an accelerator", "got a CPU", "target='h100'"),
    Row("jrc.largest_batch", "arguments for a function", lambda: largest(make_args=(W, X)), Type,
        "make_args must be a function", "got tuple", "Write jrc.largest_batch(lambda batch:"),
    Row("jrc.largest_batch", "its functions swapped", lambda: largest(make_args=loss, fn=shapes),
        Type, "make_args must be a function of the batch alone", "got `loss(w, x",
        "jrc.largest_batch(lambda batch: (params, shapes(batch)), loss_fn"),
    Row("jrc.largest_batch", "a traced array",
        lambda: jax.jit(lambda w: largest(make_args=lambda batch: (w, shapes(batch)[1])))(W), Type,
        "arguments must be arrays or shapes", "got a traced float32[4, 4]", "outside of jax.jit"),
    Row("jrc.largest_batch", "a function of one device's part",
        lambda: in_shard_map(lambda x: largest(fn=lambda w, y: loss(w, y) + jnp.sum(x))), Type,
        "what `<lambda>` closes over must be arrays", "got a traced float32[1, 4]",
        "plan.apply(fn)"),
    Row("jrc.largest_batch", "a fraction", lambda: largest(0.5), Type, "budget must be bytes",
        "got 0.5", "Write bytes: '16GiB'"),
    Row("jrc.largest_batch", "a zero", lambda: largest(multiple_of=0), Value,
        "multiple_of must be a whole number >= 1", "got 0", "Leave it out"),
    Row("jrc.largest_batch", "one array", lambda: largest(make_args=jnp.zeros), Type, "as a tuple",
        "got ArrayImpl", "write `return (x,)`"),
]
# fmt: on
