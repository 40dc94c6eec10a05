"""Compression: options, gradients and states, replicas, bandwidths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jrc
from jrc import dgc
from tests.messages.rows import Row

G = {"w": jnp.ones((8, 8)), "b": jnp.ones(3)}
TX = jrc.scale_by_dgc(min_size=8)
MOMENTUM = jrc.dgc_momentum(0.1, 0.9, 0, min_size=8)
state = functools.cache(lambda: TX.init(G))


def advice(params=G, replicas=4, bandwidth="1Gbit/s", step_time=0.1, **options):
    return jrc.dgc_advice(params, replicas, bandwidth, step_time, **options)


def options(**given):
    return jrc.scale_by_dgc(**given)


def momentum(rate=0.1, **given):
    return jrc.dgc_momentum(rate, **({"momentum": 0.9, "rampup_begin_step": 0} | given))


def hosts():
    return Mesh(np.array(jax.devices()[:2]), ("host",))


Type, Value = TypeError, ValueError
ONE = "jrc.scale_by_dgc"

# fmt: off
ROWS = [
    Row(ONE, "sparsity in per cent", lambda: options(sparsity=99.9), Value, "must lie in [0, 1)",
        "got 99.9", "0.999 sends one entry in a thousand"),
    Row(ONE, "a set of levels", lambda: options(sparsity={0.9, 0.99}), Type,
        "a number or a sequence of numbers", "got {0.9", "sparsity=(0.999,) sends"),
    Row(ONE, "a traced sparsity", lambda: jax.jit(lambda s: options(sparsity=s).init(G))(0.9), Type,
        "a number or a sequence of numbers", "got ", "sparsity=(0.999,) sends"),
    Row(ONE, "no number", lambda: options(momentum="0.9"), Type, "momentum must be a number",
        "got '0.9'", "pass 0.9"),
    Row(ONE, "a Boolean for a number", lambda: options(local_grad_clip_norm=True), Type,
        "must be a number", "got True", "pass None, for no clipping"),
    Row(ONE, "a negative step", lambda: options(rampup_begin_step=-1), Value, "at least 0",
        "got -1", "0 compresses from the first step"),
    Row(ONE, "no steps", lambda: options(rampup_step=0), Value, "at least 1", "got 0",
        "1 begins with the last level"),
    Row(ONE, "a Boolean for a size", lambda: options(min_size=True), Type, "must be a Python int",
        "got True", "name 'min_size' in static_args"),
    Row(ONE, "a negative size", lambda: options(min_size=-1), Value, "at least 0", "got -1",
        "0 compresses every"),
    Row(ONE, "no replicas", lambda: options(num_trainers=0, axis_name="data"), Value, "at least 1",
        "got 0", "leave it out"),
    Row(ONE, "replicas without an axis", lambda: options(num_trainers=2), Value, "needs an axis",
        "num_trainers=2", "pass axis_name"),
    Row(ONE, "a word for a switch", lambda: options(use_nesterov="no"), Type,
        "use_nesterov must be True or False",
        "got 'no'", "True or False"),
    Row(ONE, "no word for a switch", lambda: options(factor_masking=None), Type,
        "factor_masking must be True or False", "got None", "True or False"),
    Row(ONE, "an unknown exchange", lambda: options(exchange="ring"), Value,
        "exchange must be one of", "got 'ring'", "'allgather', 'sharded', 'dense', 'auto'"),
    Row(ONE, "a list for a name", lambda: options(count_dtype=["float32"]), Value,
        "count_dtype must be one of", "got ['float32']", "'float64', 'float32'"),
    Row(ONE, "an unknown wire", lambda: options(wire="f16"), Value, "wire must be one of",
        "got 'f16'", "'f32', 'bf16', 'fp8', 'int8'"),
    Row(ONE, "an axis list", lambda: options(axis_name=["a", "b"]), Value, "a pair (inner, outer)",
        "got ['a', 'b']", "name the axis over which"),
    Row(ONE, "a word for a penalty", lambda: options(regularization="l2"), Type,
        "must be a number (the L2 factor)", "got 'l2'", "pass 1e-4"),
    Row(ONE, "a Boolean for a penalty", lambda: options(regularization=True), Type,
        "regularization must be a number", "got True", "pass 1e-4"),
    Row(ONE, "text for parameters", lambda: TX.init({"w": "text"}), Type,
        "parameters must be arrays", "got str 'text'", "keep what is none apart"),
    Row(ONE, "complex parameters", lambda: TX.init(jnp.ones(2, complex)), Type,
        "parameters must be real", "got complex64", "as two leaves"),
    Row(ONE, "no state", lambda: TX.update(G, None, G), Type, "the state must be a DGCState",
        "got NoneType", "state = tx.init(params)"),
    Row(ONE, "a chain's state", lambda: TX.apply(G, (state(),), G), Type,
        "the state must be a DGCState", "got tuple", "to the chain"),
    Row(ONE, "a number for a gradient", lambda: TX.update(G | {"b": 1.0}, state(), G), Value,
        "must be a floating array", "got float", "freeze a parameter with optax.masked"),
    Row(ONE, "another tree of parameters", lambda: TX.update(G, state(), {"w": G["w"]}), Value,
        "in the structure and shapes of the gradients", "got PyTreeDef({'w': *})",
        "call update(gradients, state, params)"),
    Row(ONE, "parameters of another shape",
        lambda: TX.update(G, state(), G | {"w": jnp.ones((8, 9))}), Value,
        "in the structure and shapes", "(8, 9)", "call update(gradients, state, params)"),
    Row(ONE, "text for a scale", lambda: TX.apply(G, state(), G, "0.1"), Type,
        "a scale that is one number", "got '0.1'", "-0.1 goes down"),
    Row(ONE, "an axis that nothing binds",
        lambda: jrc.scale_by_dgc(axis_name="data").update(G, jrc.scale_by_dgc().init(G), G), Value,
        "must be bound where update runs", "axis_name='data'", "call it inside jax.shard_map"),
    Row("jrc.dgc_momentum", "momentum beyond one", lambda: momentum(momentum=2.0), Value,
        "must lie in [0, 1)", "got 2.0", "pass 0.9"),
    Row("jrc.dgc_momentum", "no rate", lambda: momentum(None), Type,
        "a number or an optax schedule", "got None", "pass 0.1"),
    Row("jrc.dgc_momentum", "text for a rate", lambda: momentum("0.1"), Type,
        "a number or an optax schedule", "got '0.1'", "pass 0.1"),
    Row("jrc.dgc_momentum", "a rate that is none", lambda: momentum(float("nan")), Value,
        "must be finite", "got nan", "pass 0.1"),
    Row("jrc.dgc_momentum", "no state", lambda: MOMENTUM.update(G, None, G), Type,
        "what init(params) returns", "got NoneType", "state = tx.init(params)"),
    Row("jrc.dgc_momentum", "another optimizer's state", lambda: MOMENTUM.apply(G, state(), G),
        Type, "what init(params) returns", "got DGCState", "state = tx.init(params)"),
    Row("jrc.l1_penalty", "a negative factor", lambda: jrc.l1_penalty(-1), Value, "finite and >= 0",
        "got -1", "pass 1e-4"),
    Row("jrc.l2_penalty", "no number", lambda: jrc.l2_penalty("1e-4"), Type,
        "the factor must be a number", "got '1e-4'", "pass 1e-4"),
    Row("jrc.dgc_stats", "no compression", lambda: jrc.dgc_stats(optax.adam(0.1).init(G)), Value,
        "exactly one DGCState", "got 0 in tuple", "made with scale_by_dgc"),
    Row("jrc.dgc_specs", "no axis", lambda: jrc.dgc_specs(state(), None), Value,
        "the name of one axis or a tuple", "got None", "give it as to the compression"),
    Row("jrc.dgc_specs", "numbers for axes", lambda: jrc.dgc_specs(state(), (1, 2)), Value,
        "the name of one axis or a tuple", "got (1, 2)", "give it as to the compression"),
    Row("jrc.reshard_dgc", "no replicas", lambda: jrc.reshard_dgc(state(), 0), Value, "at least 1",
        "got 0", "pass mesh.shape['data']"),
    Row("jrc.reshard_dgc", "one axis twice",
        lambda: jrc.reshard_dgc(state(), 2, axis_name=("a", "a")), Value,
        "the name of one axis or a tuple", "got ('a', 'a')", "give it as to the compression"),
    Row("jrc.reshard_dgc", "a mesh without the axis",
        lambda: jrc.reshard_dgc(state(), 2, mesh=hosts()), Value, "none named 'data'",
        "the axes 'host'", "pass axis_name= one of them"),
    Row("jrc.reshard_dgc", "no compression", lambda: jrc.reshard_dgc(G, 2), Value,
        "must hold a DGCState", "got none in dict", "made with jrc.scale_by_dgc"),
    Row("jrc.dgc_advice", "a size for a rate", lambda: advice(bandwidth="1GB"), Value,
        "a positive number and a unit", "got '1GB'", "'1Gbit/s'"),
    Row("jrc.dgc_advice", "no bandwidth", lambda: advice(bandwidth=0), Value, "finite and positive",
        "got 0", "pass '1Gbit/s'"),
    Row("jrc.dgc_advice", "text for seconds", lambda: advice(step_time="100ms"), Type,
        "step_time must be a number", "got '100ms'", "pass seconds, such as 0.1"),
    Row("jrc.dgc_advice", "a share beyond one", lambda: advice(overlap=2.0), Value,
        "a share in [0, 1]", "got 2.0", "pass 0.5 for a half"),
    Row("jrc.dgc_advice", "no replicas", lambda: advice(replicas=0), Value, "at least 1", "got 0",
        "pass mesh.shape['data']"),
    Row("jrc.dgc_advice", "a list for a wire", lambda: advice(wire=["f32"]), Value,
        "wire must be one of", "got ['f32']", "'f32', 'bf16', 'fp8', 'int8'"),
    Row("jrc.dgc_advice", "sparsity in per cent", lambda: advice(sparsity=99.9), Value,
        "must lie in [0, 1)", "got 99.9", "0.999 sends one entry in a thousand"),
    Row("jrc.dgc_advice", "text for parameters", lambda: advice({"w": "text"}), Type,
        "parameters must be arrays", "got str 'text'", "keep what is none apart"),
    Row("jrc.dgc_advice", "nothing to send", lambda: advice(None), Value,
        "must hold a floating array", "got none in NoneType", "their shapes from jax.eval_shape"),
    Row("jrc.dgc.TwoStage", "no blocks", lambda: dgc.TwoStage(0), Value, "an int of at least 1",
        "got 0", "TwoStage() takes the usual"),
    Row("jrc.dgc.Blocked", "half an entry", lambda: dgc.Blocked(1.5), Value, "an int of at least 1",
        "got 1.5", "Blocked() takes the usual"),
    Row("jrc.dgc.Sampled", "no sample", lambda: dgc.Sampled(0), Value, "must lie in (0, 1]",
        "got 0", "0.01 looks at one entry"),
    Row("jrc.dgc.EightBits", "four bytes", lambda: dgc.EightBits("f32"), Value,
        "one of 'fp8', 'int8'", "got 'f32'", "take wire='f32'"),
    Row("jrc.dgc.replica_axis", "no axis", lambda: dgc.replica_axis(None), Value,
        "the name of one axis or a tuple", "got None", "give it as to the compression"),
]
# fmt: on
