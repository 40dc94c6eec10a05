"""Wrong calls of outer optimizers, and of training with them."""

import jax

import jrc
from tests.messages.rows import Row
from tests.messages.train_rows import BATCH, KEY, PARAMS, SGD, compress, loss, make, mesh, state

OUTER = jrc.SparseLoCo(3)


def unfinished():
    begun = jrc.init_state(PARAMS, SGD, KEY(), outer=OUTER)
    step = jrc.make_train_step(loss, SGD, outer=OUTER)
    return jrc.reshard(step(begun, BATCH)[0], 2)


def advice(replicas=4, bandwidth="1Gbit/s", **options):
    return jrc.communication_advice(PARAMS, replicas, bandwidth, 0.1, **options)


def traced():
    begun = jrc.init_state(PARAMS, SGD, KEY(), outer=OUTER)
    jax.jit(jrc.make_train_step(loss, SGD, outer=OUTER))(begun, BATCH)


Type, Value = TypeError, ValueError
SPARSE, DILOCO, RESHARD = "jrc.SparseLoCo", "jrc.DiLoCo", "jrc.reshard"
ADVICE = "jrc.communication_advice"
STEP, INIT = "jrc.make_train_step", "jrc.init_state"

# fmt: off
ROWS = [
    Row(SPARSE, "no steps", lambda: jrc.SparseLoCo(0), Value, "sync_every must be a whole number",
        "got 0", "Write sync_every=30"),
    Row(SPARSE, "half a step", lambda: jrc.SparseLoCo(0.5), Type,
        "sync_every must be a whole number >= 1", "got 0.5", "Write sync_every=30"),
    Row(SPARSE, "nothing to send", lambda: jrc.SparseLoCo(density=0), Value,
        "density must be a share in (0, 1]", "got 0", "Write density=1/64"),
    Row(SPARSE, "a sparsity in words", lambda: jrc.SparseLoCo(density="1/64"), Type,
        "density must be a share in (0, 1]", "got '1/64'", "Write density=1/64"),
    Row(SPARSE, "a chunk of 13 bits", lambda: jrc.SparseLoCo(chunk=8192), Value,
        "chunk must be a whole number from 16 to 4096", "got 8192", "Write chunk=4096"),
    Row(SPARSE, "growing errors", lambda: jrc.SparseLoCo(error_decay=1.1), Value,
        "error_decay must be a share in [0, 1]", "got 1.1", "Write error_decay=0.95"),
    Row(SPARSE, "three bits", lambda: jrc.SparseLoCo(wire="3bit"), Value,
        "wire must be one of '2bit', '4bit', 'bf16', 'f32'", "got '3bit'", "Write wire="),
    Row(SPARSE, "no rate", lambda: jrc.SparseLoCo(outer_lr=0), Value,
        "outer_lr must be a finite number > 0", "got 0", "Write outer_lr=1.0"),
    Row(SPARSE, "levels of rows", lambda: jrc.SparseLoCo(levels="row"), Value,
        "levels must be one of 'leaf', 'chunk'", "got 'row'", "Write levels="),
    Row(SPARSE, "a median", lambda: jrc.SparseLoCo(mean="median"), Value,
        "mean must be one of 'all', 'senders'", "got 'median'", "Write mean="),
    Row(DILOCO, "no steps", lambda: jrc.DiLoCo(0), Value, "sync_every must be a whole number",
        "got 0", "Write sync_every=100"),
    Row(DILOCO, "more fragments than steps", lambda: jrc.DiLoCo(4, fragments=5), Value,
        "fragments must be at most sync_every", "got 5 for sync_every=4", "Write fragments=4"),
    Row(DILOCO, "no fragment", lambda: jrc.DiLoCo(fragments=0), Value,
        "fragments must be a whole number >= 1", "got 0", "Write fragments=4"),
    Row(SPARSE, "two steps of overlap", lambda: jrc.SparseLoCo(overlap=2), Value,
        "overlap must be a whole number from 0 to 1", "got 2", "behind the next step"),
    Row(DILOCO, "an exchange under way at any time",
        lambda: jrc.DiLoCo(3, fragments=2, overlap=1), Value,
        "sync_every must be at least 2 * fragments", "got 3 for fragments=2", "sync_every=4"),
    Row(DILOCO, "all of its own", lambda: jrc.DiLoCo(overlap=1, blend=1), Value,
        "blend must be a share in [0, 1)", "got 1", "Write blend=0.0"),
    Row(INIT, "more fragments than rows", lambda: state(outer=jrc.DiLoCo(99, fragments=99)), Value,
        "no more fragments than the parameters can be cut into", "got 99 for 1 leaves",
        "Use fewer fragments"),
    Row(DILOCO, "momentum that grows", lambda: jrc.DiLoCo(outer_momentum=1.0), Value,
        "outer_momentum must be a number in [0, 1)", "got 1.0", "Write outer_momentum=0.9"),
    Row(DILOCO, "a word for a switch", lambda: jrc.DiLoCo(nesterov="no"), Type,
        "nesterov must be True or False", "got 'no'", "Write nesterov=True"),
    Row(DILOCO, "two bits", lambda: jrc.DiLoCo(wire="2bit"), Value,
        "wire must be one of '4bit', 'f32'", "got '2bit'", "Write wire="),
    Row(INIT, "a name for an outer optimizer", lambda: state(outer="diloco"), Type,
        "outer must be None or an outer optimizer", "got 'diloco'", "jrc.SparseLoCo(sync_every="),
    Row(INIT, "an outer optimizer not called", lambda: state(outer=jrc.DiLoCo), Type,
        "outer must be None or an outer optimizer", "got <class", "jrc.SparseLoCo(sync_every=30)"),
    Row(INIT, "a compression beside an outer optimizer",
        lambda: state(tx=compress(), outer=OUTER), Value, "must not compress gradients",
        "got one with jrc.scale_by_dgc", "Pass a plain optimizer"),
    Row(INIT, "complex parameters", lambda: state(params={"w": 1j * PARAMS["w"]}, outer=OUTER),
        Value, "params must be real with outer=", "got complex64 at 'w'", "as two arrays"),
    Row(STEP, "one jit over all replicas", lambda: make(outer=OUTER, mesh=mesh(4), via="jit"),
        Value, "via must be 'shard_map' or 'pmap'", "got 'jit' on 4", "Leave via= out"),
    Row(STEP, "a number for an outer optimizer", lambda: make(outer=30), Type,
        "outer must be None or an outer optimizer", "got 30", "jrc.SparseLoCo(sync_every=30)"),
    Row(STEP, "a state without an outer optimizer", lambda: make(outer=OUTER)(state(), BATCH),
        Value, "must be built for tx and outer=SparseLoCo(sync_every=3", "another opt_state",
        "jrc.init_state(params, tx, key, outer=outer)"),
    Row(STEP, "a state with an outer optimizer", lambda: make()(state(outer=OUTER), BATCH),
        Value, "must be built for the optimizer tx", "another opt_state: leaves 'rounds', ",
        "Build it with jrc.init_state"),
    Row(STEP, "rows of other replicas",
        lambda: make(outer=OUTER, mesh=mesh(4))(state(outer=OUTER, mesh=mesh(2)), BATCH), Value,
        "must be built for the 4 replicas", "got one with rows for 2", "the same mesh"),
    Row(STEP, "an outer optimizer inside of jit", traced, Type, "outside of jax.jit",
        "got a traced state", "Call it in a Python loop"),
    Row(RESHARD, "no replicas", lambda: jrc.reshard(state(outer=OUTER), 0), Value,
        "num_replicas must be a whole number >= 1", "got 0", "Pass mesh.shape"),
    Row(RESHARD, "nothing to share out", lambda: jrc.reshard(state(), 2), Value,
        "must have a DGCState", "got none in TrainState", "with jrc.scale_by_dgc"),
    Row(RESHARD, "a round that is not finished", unfinished, Value, "between two rounds",
        "got one with 1 inner steps", "Take the steps up to the end of the round"),
    Row(RESHARD, "an optimizer's state alone",
        lambda: jrc.reshard(state(outer=OUTER).opt_state, 2), Value, "must be a whole train state",
        "got OuterState", "Pass the state of jrc.init_state"),
    Row(ADVICE, "no replicas", lambda: advice(0), Value, "replicas must be a whole number >= 1",
        "got 0", "Pass mesh.shape"),
    Row(ADVICE, "a sparsity of ef21 above one", lambda: advice(ef21_sparsity=1.5), Value,
        "ef21_sparsity must be a share in [0, 1)", "got 1.5", "jrc.scale_by_ef21"),
    Row(ADVICE, "more fragments than rows",
        lambda: advice(outers=[jrc.DiLoCo(99, fragments=99)]), Value,
        "no more fragments than the parameters can be cut into", "got 99", "Use fewer fragments"),
    Row(ADVICE, "a bandwidth without a unit", lambda: advice(bandwidth="1"), Value,
        "bandwidth as text must be", "got '1'", "Write '1Gbit/s'"),
    Row(ADVICE, "no waiting at all", lambda: advice(utilisation=1), Value,
        "utilisation must be below 1", "got 1.0", "Pass a share, such as 0.9"),
    Row(ADVICE, "a name for an outer optimizer", lambda: advice(outers=["diloco"]), Type,
        "outers must be a sequence of outer", "got 'diloco'", "jrc.SparseLoCo(sync_every="),
]
# fmt: on
