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


def mapped():
    tx = jrc.scale_by_dgc(axis_name="data")
    step = jax.vmap(lambda g: tx.update(g, tx.init(G), G)[0], axis_name="data")
    return jax.jit(step)(jax.tree.map(lambda x: x[None], G))


def momentum(rate=0.1, **given):
    return jrc.dgc_momentum(rate, **({"momentum": 0.9, "rampup_begin_step": 0} | given))


def hosts():
    return Mesh(np.array(jax.devices()[:2]), ("host",))


Type, Value = TypeError, ValueError
ONE, EF21 = "jrc.scale_by_dgc", "jrc.scale_by_ef21"

# fmt: off
ROWS = [
    Row(ONE, "sparsity in per cent", lambda: options(sparsity=99.9), Value,
        "must be a number in [0, 1)", "got 99.9", "0.999 sends one entry in a thousand"),
    Row(ONE, "a set of levels", lambda: options(sparsity={0.9, 0.99}), Type,
        "a number or a sequence of numbers", "got {0.9", "sparsity=(0.999,) sends"),
    Row(ONE, "a traced sparsity", lambda: jax.jit(lambda s: options(sparsity=s).init(G))(0.9), Type,
        "a number or a sequence of numbers", "got ", "sparsity=(0.999,) sends"),
    Row(ONE, "no number", lambda: options(momentum="0.9"), Type,
        "momentum must be a finite number in [0, 1)", "got '0.9'", "Pass 0.9"),
    Row(ONE, "a Boolean for a number", lambda: options(local_grad_clip_norm=True), Type,
        "must be a finite number > 0", "got True", "Pass None for no clipping"),
    Row(ONE, "a negative step", lambda: options(rampup_begin_step=-1), Value, "whole number >= 0",
        "got -1", "0 compresses from the first step"),
    Row(ONE, "no steps", lambda: options(rampup_step=0), Value, "whole number >= 1", "got 0",
        "1 begins with the last level"),
    Row(ONE, "a Boolean for a size", lambda: options(min_size=True), Type,
        "must be a whole number", "got True", "name 'min_size' in static_args"),
    Row(ONE, "a negative size", lambda: options(min_size=-1), Value, "whole number >= 0", "got -1",
        "0 compresses every"),
    Row(ONE, "no replicas", lambda: options(num_trainers=0, axis_name="data"), Value,
        "whole number >= 1", "got 0", "Leave it out"),
    Row(ONE, "replicas without an axis", lambda: options(num_trainers=2), Value,
        "must be 1 or left out where axis_name is None", "num_trainers=2", "Pass axis_name='data'"),
    Row(ONE, "a word for a switch", lambda: options(use_nesterov="no"), Type,
        "use_nesterov must be True or False", "got 'no'", "Write use_nesterov=True"),
    Row(ONE, "no word for a switch", lambda: options(factor_masking=None), Type,
        "factor_masking must be True or False", "got None", "Write factor_masking=True"),
    Row(ONE, "an unknown exchange", lambda: options(exchange="ring"), Value,
        "'allgather', 'sharded', 'dense', 'auto'", "got 'ring'", "Leave exchange out"),
    Row(ONE, "a class for an exchange", lambda: options(exchange=dgc.AllGather), Value,
        "an object with the methods of jrc.dgc.EntryExchange", "AllGather", "Leave exchange out"),
    Row(ONE, "a list for a name", lambda: options(count_dtype=["float32"]), Value,
        "count_dtype must be one of", "got ['float32']", "Write count_dtype='float64'"),
    Row(ONE, "an unknown wire", lambda: options(wire="f16"), Value,
        "'f32', 'bf16', 'fp8', 'int8'", "got 'f16'", "Leave wire out"),
    Row(ONE, "a number for a selector", lambda: options(selector=3), Value,
        "an object with the methods of jrc.dgc.Selector", "got 3", "Leave selector out"),
    Row(ONE, "a selector for another exchange",
        lambda: options(selector="exact", exchange="sharded"), Value,
        "must be 'blocked' for exchange='sharded'", "got 'exact'", "Leave selector out"),
    Row(ONE, "an axis list", lambda: options(axis_name=["a", "b"]), Value, "a pair (inner, outer)",
        "got ['a', 'b']", "Write axis_name='data'"),
    Row(ONE, "a word for a penalty", lambda: options(regularization="l2"), Type,
        "must be a number (the L2 factor)", "got 'l2'", "Pass 1e-4"),
    Row(ONE, "a Boolean for a penalty", lambda: options(regularization=True), Type,
        "regularization must be a number", "got True", "Pass 1e-4"),
    Row(ONE, "text for parameters", lambda: TX.init({"w": "text"}), Type,
        "parameters must be arrays", "got str 'text'", "Take other values out"),
    Row(ONE, "complex parameters", lambda: TX.init(jnp.ones(2, complex)), Type,
        "parameters must be real", "got complex64", "two leaves"),
    Row(ONE, "no state", lambda: TX.update(G, None, G), Type, "state must be a DGCState",
        "got NoneType", "state = tx.init(params)"),
    Row(ONE, "a chain's state", lambda: TX.update(G, (state(),), G), Type,
        "state must be a DGCState", "got tuple", "to the chain"),
    Row(ONE, "a number for a gradient", lambda: TX.update(G | {"b": 1.0}, state(), G), Value,
        "must be a floating array", "got float", "Freeze a parameter with optax.masked"),
    Row(ONE, "another tree of parameters", lambda: TX.update(G, state(), {"w": G["w"]}), Value,
        "must have the structure and shapes of the gradients", "got leaf 'b' is missing",
        "Call update(gradients, state, params)"),
    Row(ONE, "parameters of another shape",
        lambda: TX.update(G, state(), G | {"w": jnp.ones((8, 9))}), Value,
        "must have the structure and shapes", "(8, 9)", "Call update(gradients, state, params)"),
    Row(ONE, "text for a scale", lambda: TX.update.apply(G, state(), G, "0.1"), Type,
        "scale must be a finite number", "got '0.1'", "Pass -0.1"),
    Row(ONE, "an axis that nothing binds",
        lambda: jrc.scale_by_dgc(axis_name="data").update(G, jrc.scale_by_dgc().init(G), G), Value,
        "must be an axis that is bound", "got axis_name='data'",
        "Call update inside jax.shard_map"),
    Row(ONE, "an axis of vmap", mapped, Value,
        "bound by shard_map or pmap where update runs", "got axis_name='data'",
        "Call update inside jax.shard_map"),
    Row("jrc.dgc_momentum", "momentum beyond one", lambda: momentum(momentum=2.0), Value,
        "a finite number in [0, 1)", "got 2.0", "Pass 0.9"),
    Row("jrc.dgc_momentum", "no rate", lambda: momentum(None), Type,
        "learning_rate must be a finite number", "got None", "Pass 0.1, or an optax schedule"),
    Row("jrc.dgc_momentum", "text for a rate", lambda: momentum("0.1"), Type,
        "learning_rate must be a finite number", "got '0.1'", "Pass 0.1, or an optax schedule"),
    Row("jrc.dgc_momentum", "a rate that is not finite", lambda: momentum(float("nan")), Value,
        "learning_rate must be a finite number", "got nan", "Pass 0.1, or an optax schedule"),
    Row("jrc.dgc_momentum", "no state", lambda: MOMENTUM.update(G, None, G), Type,
        "state must be the one that init(params) returns", "got NoneType",
        "state = tx.init(params)"),
    Row("jrc.dgc_momentum", "another optimizer's state",
        lambda: dgc.apply_gradients(MOMENTUM, G, state(), G), Type,
        "state must be the one that init(params) returns", "got DGCState",
        "state = tx.init(params)"),
    Row("jrc.l1_penalty", "a negative factor", lambda: jrc.l1_penalty(-1), Value,
        "a finite number >= 0", "got -1", "Pass 1e-4"),
    Row("jrc.l2_penalty", "no number", lambda: jrc.l2_penalty("1e-4"), Type,
        "factor must be a finite number", "got '1e-4'", "Pass 1e-4"),
    Row("jrc.dgc_stats", "no compression", lambda: jrc.dgc_stats(optax.adam(0.1).init(G)), Value,
        "exactly one DGCState", "got 0 in tuple", "made with jrc.scale_by_dgc"),
    Row("jrc.dgc_specs", "no axis", lambda: jrc.dgc_specs(state(), None), Value,
        "the name of one axis or a pair", "got None", "Write axis_name='data'"),
    Row("jrc.dgc_specs", "numbers for axes", lambda: jrc.dgc_specs(state(), (1, 2)), Value,
        "the name of one axis or a pair", "got (1, 2)", "Write axis_name='data'"),
    Row("jrc.reshard_dgc", "no replicas", lambda: jrc.reshard_dgc(state(), 0), Value,
        "a whole number >= 1", "got 0", "Pass mesh.shape['data']"),
    Row("jrc.reshard_dgc", "one axis twice",
        lambda: jrc.reshard_dgc(state(), 2, axis_name=("a", "a")), Value,
        "the name of one axis or a pair", "got ('a', 'a')",
        "Write axis_name='data'"),
    Row("jrc.reshard_dgc", "a mesh without the axis",
        lambda: jrc.reshard_dgc(state(), 2, mesh=hosts()), Value,
        "must be an axis of the mesh", "got 'data'", "pass one of them"),
    Row("jrc.reshard_dgc", "no compression", lambda: jrc.reshard_dgc(G, 2), Value,
        "must have a DGCState in it", "got none in dict", "made with jrc.scale_by_dgc"),
    Row("jrc.dgc_advice", "a size for a rate", lambda: advice(bandwidth="1GB"), Value,
        "a positive number and a unit", "got '1GB'", "Write '1Gbit/s'"),
    Row("jrc.dgc_advice", "no bandwidth", lambda: advice(bandwidth=0), Value,
        "a finite number > 0", "got 0", "Pass '1Gbit/s'"),
    Row("jrc.dgc_advice", "text for seconds", lambda: advice(step_time="100ms"), Type,
        "step_time must be a finite number", "got '100ms'", "Pass seconds, such as 0.1"),
    Row("jrc.dgc_advice", "a share beyond one", lambda: advice(overlap=2.0), Value,
        "a share in [0, 1]", "got 2.0", "Pass 0.5 for a half"),
    Row("jrc.dgc_advice", "no replicas", lambda: advice(replicas=0), Value, "a whole number >= 1",
        "got 0", "Pass mesh.shape['data']"),
    Row("jrc.dgc_advice", "a list for a wire", lambda: advice(wire=["f32"]), Value,
        "wire must be one of", "got ['f32']", "Leave wire out"),
    Row("jrc.dgc_advice", "sparsity in per cent", lambda: advice(sparsity=99.9), Value,
        "must be a number in [0, 1)", "got 99.9", "0.999 sends one entry in a thousand"),
    Row("jrc.dgc_advice", "text for parameters", lambda: advice({"w": "text"}), Type,
        "parameters must be arrays", "got str 'text'", "Take other values out"),
    Row("jrc.dgc_advice", "nothing to send", lambda: advice(None), Value,
        "must have a floating array in it", "got none in NoneType",
        "their shapes from jax.eval_shape"),
    Row("jrc.dgc.TwoStage", "no blocks", lambda: dgc.TwoStage(0), Value, "a whole number >= 1",
        "got 0", "TwoStage() takes 8"),
    Row("jrc.dgc.Blocked", "half an entry", lambda: dgc.Blocked(1.5), Type, "a whole number >= 1",
        "got 1.5", "Blocked() takes 16384"),
    Row("jrc.dgc.Sampled", "no sample", lambda: dgc.Sampled(0), Value, "a number in (0, 1]",
        "got 0", "Write 0.01"),
    Row("jrc.dgc.EightBits", "four bytes", lambda: dgc.EightBits("f32"), Value,
        "kind must be one of", "got 'f32'", "Write kind='fp8'"),
    Row(EF21, "a rate of nothing", lambda: jrc.scale_by_ef21(0), Value,
        "momentum_rate must be a finite number in (0, 1]", "got 0", "Pass 0.1, one minus Adam's"),
    Row(EF21, "a rate in words", lambda: jrc.scale_by_ef21("0.1"), Type,
        "momentum_rate must be a finite number in (0, 1]", "got '0.1'", "Pass 0.1"),
    Row(EF21, "nothing to send", lambda: jrc.scale_by_ef21(sparsity=1.0), Value,
        "must be a number in [0, 1)", "got 1.0", "0.999 sends one entry in a thousand"),
    Row(EF21, "the state of another", lambda: jrc.scale_by_ef21(min_size=8).update(G, state(), G),
        Type, "state must be an EF21State", "got DGCState", "Start with state = tx.init(params)"),
]
# fmt: on
