"""Wrong calls of `jrc.train` and `jrc.persist`."""

import functools
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jrc
from tests.messages.rows import Row

PARAMS, SGD = {"w": jnp.zeros(3)}, optax.sgd(0.1)
BATCH = jnp.ones((8, 3)), jnp.ones(8)
KEY = functools.cache(lambda: jax.random.key(0))


def loss(params, batch, key):
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2)


def no_loss(scale, params, batch, key):
    return {"loss": scale * loss(params, batch, key)}


def mesh(count=4, name="data"):
    return Mesh(np.array(jax.devices()[:count]), (name,))


def state(params=PARAMS, tx=SGD, key=None, **options):
    return jrc.init_state(params, tx, KEY() if key is None else key, **options)


placed = functools.cache(state)


def compressed():
    return state(tx=compress(), mesh=mesh())


def make(fn=loss, tx=SGD, **options):
    return jrc.make_train_step(fn, tx, **({"donate": False} | options))


def compress(axis_name="data"):
    return jrc.dgc_momentum(0.1, 0.9, 0, min_size=1, axis_name=axis_name)


def step(given=None, batch=BATCH, **options):
    return make(**options)(placed() if given is None else given, batch)


def with_plan():
    one = jax.tree.map(lambda x: x[:1], BATCH)
    plan = jrc.plan(loss, PARAMS, one, KEY(), budget=10**9, verify=False)
    return make(plan=plan, memory_budget="1GiB")


def another_model_state():
    def fn(params, model_state, batch, key):
        return loss(params, batch, key), ({"m": jnp.ones(2, int)}, None)

    return step(state(model_state={"m": jnp.ones(2)}), fn=fn)


def donated():
    own, run = state(), make(donate=True)
    run(own, BATCH)
    return own, run


def again_with_the_old_state():
    own, run = donated()
    run(own, BATCH)


def save_the_old_state():
    jrc.save("run", donated()[0])


def restore(like, saved=None, damage=None):
    jrc.save("run", {"w": jnp.ones(3), "b": jnp.ones(2)} if saved is None else saved)
    if damage is not None:
        damage(pathlib.Path("run", "jrc_0", "manifest", "metadata"))
    return jrc.restore("run", like)


def under_a_file():
    pathlib.Path("notes").write_text("")
    jrc.save("notes/run", PARAMS)


def beside_notes():
    pathlib.Path("run").mkdir()
    pathlib.Path("run", "notes").write_text("")
    return jrc.restore("run", PARAMS)


LIKE = {"w": jnp.zeros(3), "b": jnp.zeros(2)}


def saved_twice(**options):
    jrc.save("run", PARAMS, step=0)
    jrc.save("run", PARAMS, **options)


Type, Value = TypeError, ValueError
STEP, INIT, SAVE, RESTORE = "jrc.make_train_step", "jrc.init_state", "jrc.save", "jrc.restore"

# fmt: off
ROWS = [
    Row(INIT, "no optimizer", lambda: state(tx=None), Type, "tx must be an optax transform",
        "got NoneType", "Write tx=optax.adam(0.01)"),
    Row(INIT, "an optimizer not called", lambda: state(tx=optax.adam), Type,
        "tx must be an optax transform", "got function", "Write tx=optax.adam(0.01)"),
    Row(INIT, "numbers for parameters", lambda: state({"w": 1.0}), Value,
        "params must have an array", "numbers of Python alone", "Write jnp.asarray(1.0)"),
    Row(INIT, "a number for a key", lambda: state(key=3), Type, "key must be one random key",
        "got int 3",
        "Write jax.random.key(0)"),
    Row(INIT, "several keys", lambda: state(key=jax.random.split(KEY())), Type,
        "key must be one random key", "got key<fry>[2]", "Write jax.random.key(0)"),
    Row(INIT, "a raw key of another generator", lambda: state(key=jnp.zeros(4, jnp.uint32)), Type,
        "key must be one random key", "got uint32[4]", "Write jax.random.key(0)"),
    Row(INIT, "an object among parameters", lambda: state({"w": object()}), Type,
        "must be an array", "got object <object", "Bind other values to the loss"),
    Row(INIT, "devices for a mesh", lambda: state(mesh=jax.devices()), Type,
        "a jax.sharding.Mesh or None", "got list", "Write jax.sharding.Mesh("),
    Row(INIT, "a mesh without the axis", lambda: state(mesh=mesh(2, "host")), Value,
        "must be an axis of the mesh", "got 'data'", "The axes are 'host'"),
    Row(INIT, "no axis", lambda: state(axis_name=None), Value, "the name of one axis", "got None",
        "Write axis_name='data'"),
    Row(STEP, "no function", lambda: make(None), Type, "loss_fn must be a function", "got NoneType",
        "Pass the function itself"),
    Row(STEP, "no optimizer", lambda: make(tx="adam"), Type, "tx must be an optax transform",
        "got str 'adam'", "Write tx=optax.adam(0.01)"),
    Row(STEP, "its two arguments swapped", lambda: make(fn=SGD, tx=loss), Type,
        "loss_fn must come before tx", "got a transform and `loss`",
        "make_train_step(loss_fn, tx)"),
    Row(INIT, "parameters of a lookahead for another",
        lambda: state(optax.LookaheadParams.init_synced(LIKE)), Value,
        "params must be the model's own", "got optax.LookaheadParams", "Pass params.slow"),
    Row(STEP, "a list for a name", lambda: make(via=["jit"]), Value, "via must be one of",
        "got ['jit']",
        "Write via='shard_map'"),
    Row(STEP, "no parts", lambda: make(accumulate=0), Value, "a whole number >= 1", "got 0",
        "1 takes the batch as one part"),
    Row(STEP, "a word for a switch", lambda: make(donate="no"), Type,
        "donate must be True or False", "got 'no'",
        "Write donate=True"),
    Row(STEP, "a rate for a budget", lambda: make(memory_budget="2GB/s"), Value,
        "a number and a unit", "got '2GB/s'", "such as '1.5GiB'"),
    Row(STEP, "text for a plan", lambda: make(plan="plan.json"), Type, "must be a jrc.Plan",
        "got str", "jrc.Plan.from_json(text)"),
    Row(STEP, "a plan and a budget", with_plan, Value, "must not both be given",
        "got a plan and '1GiB'",
        "Leave one of them out"),
    Row(STEP, "regions without a budget", lambda: make(respect_checkpoints=True), Value,
        "respect_checkpoints must go with memory_budget", "got none", "memory_budget='16GiB'"),
    Row(STEP, "offload without a budget", lambda: make(offload=True), Value,
        "offload must go with memory_budget", "got none", "memory_budget='16GiB'"),
    Row(STEP, "compilations without a budget", lambda: make(compilations=3), Value,
        "compilations must go with memory_budget", "got none", "memory_budget='16GiB'"),
    Row(STEP, "no compilations", lambda: make(memory_budget=0.5, compilations=0), Value,
        "compilations must be a whole number from 1 to 10", "got 0", "Leave it out"),
    Row(STEP, "regions that are no flag", lambda: make(respect_checkpoints=1), Type,
        "respect_checkpoints must be", "got", "True or False"),
    Row(STEP, "compression where XLA reduces", 
        lambda: step(placed(tx=compress()), tx=compress(), via="jit", mesh=mesh()), Value,
        "tx must not compress with via='jit' on several devices", "got a compression and 4",
        "Use via='shard_map'"),
    Row(STEP, "the batch in the state's place", lambda: make()(BATCH, placed()), Type,
        "must be a TrainState of jrc.init_state", "got tuple", "jrc.init_state(params, tx, key)"),
    Row(STEP, "no state", lambda: step(()), Type, "must be a TrainState of jrc.init_state",
        "got tuple", "Write state = jrc.init_state("),
    Row(STEP, "a state without a key", lambda: step(placed()._replace(key=None)), Type,
        "key must be one random key", "got NoneType None", "Write jax.random.key(0)"),
    Row(STEP, "whole numbers for parameters",
        lambda: step(placed()._replace(params={"w": jnp.arange(3)})), Value,
        "must be floating", "got int32[3] at 'w'", "Keep it in the model state"),
    Row(STEP, "another optimizer's state", lambda: step(tx=optax.adam(0.1)), Value,
        "must be built for the optimizer tx",
        "opt_state: leaves '0/count', '0/mu/w', '0/nu/w' are missing",
        "Build it with jrc.init_state"),
    Row(STEP, "a partial that returns no loss", lambda: step(fn=functools.partial(no_loss, 3)),
        Value, "a floating scalar", "got dict from `no_loss`", "Take its mean"),
    Row(STEP, "a partial without a loss, planned",
        lambda: step(fn=functools.partial(no_loss, 3), memory_budget="1GiB"), Value,
        "a floating scalar", "got dict from `no_loss`", "Take its mean"),
    Row(STEP, "another number of replicas",
        lambda: step(state(tx=compress(), mesh=mesh(4)), tx=compress()), Value,
        "the 8 replicas of the step", "got one with compression for 4", "the same mesh"),
    Row(STEP, "another mesh", lambda: step(mesh=mesh(4)), Value, "the 4 devices of the step",
        "got one on 8", "the same mesh"),
    Row(STEP, "a donated state", again_with_the_old_state, Value, "must not be donated",
        "got one whose arrays an earlier step has deleted", "pass donate=False"),
    Row(STEP, "compression without its axis",
        lambda: step(state(tx=compress(None)), tx=compress(None)), Value, "its 8 replicas",
        "got a compression with axis_name=None", "Pass axis_name='data'"),
    Row(STEP, "a batch that does not split", lambda: step(batch=(jnp.ones((7, 3)), jnp.ones(7))),
        Value, "a multiple of replicas * accumulate", "got shape [7, 3]",
        "Drop the rest of the batch"),
    Row(STEP, "text in a batch", lambda: step(batch=(jnp.ones((8, 3)), "text")), Value,
        "every leaf of batch must be an array", "got str 'text' at '1'",
        "Convert it with jnp.asarray"),
    Row(STEP, "a loss of two arguments", lambda: step(fn=lambda params, batch: 0.0), Type,
        "must take (params, batch, key)", "too many positional arguments",
        "functools.partial"),
    Row(STEP, "no loss", lambda: step(fn=lambda *_: "text"), Value, "a floating scalar",
        "got str", "Take its mean"),
    Row(STEP, "a loss for each example", lambda: step(fn=lambda p, b, k: b[1] * p["w"][0]), Value,
        "a floating scalar", "got float32[1]", "Take its mean"),
    Row(STEP, "a key as aux", lambda: step(fn=lambda p, b, k: (loss(p, b, k), k)), Value,
        "aux must hold numbers", "got key<fry>[] at '(aux itself)'", "Take it out of aux"),
    Row(STEP, "a model state that came as none",
        lambda: step(state(model_state={"m": jnp.ones(2)}), fn=lambda p, m, b, k: loss(p, b, k)),
        Value, "must return (loss, (model_state, aux))", "got float32[]", "Return that pair"),
    Row(STEP, "another model state", another_model_state, Value,
        "must have the leaves, shapes and dtypes of the old one",
        "got int32[2] for leaf 'm', float32[2]",
        "Return it like the argument"),
    Row("jrc.TrainStep.memory", "many programs",
        lambda: make(via="pmap").memory(placed(), BATCH), Value, "one that makes a single program",
        "got via='pmap'", "Use via='shard_map'"),
    Row("jrc.TrainStep.lower", "many programs", lambda: make(via="pmap").lower(placed(), BATCH),
        Value, "one that makes a single program", "got via='pmap'", "Use via='shard_map'"),
    Row(SAVE, "no path", lambda: jrc.save(None, PARAMS), Type,
        "path must be a str or a pathlib.Path",
        "got NoneType None", "Give the folder of the save"),
    Row(SAVE, "the state first", lambda: jrc.save(PARAMS, "run"), Type,
        "path must come before state", "got dict and then str 'run'",
        "Write jrc.save('run', state)"),
    Row(SAVE, "an earlier step", lambda: saved_twice(step=0), Value, "larger than that of the last",
        "got 0 after 0", "leave step out"),
    Row(SAVE, "none to keep", lambda: saved_twice(keep=0), Value, "keep must be a whole number",
        "got 0", "Write keep=1"),
    Row(SAVE, "a number for a switch", lambda: saved_twice(wait=0), Type,
        "wait must be True or False", "got 0", "Write wait=True"),
    Row(SAVE, "an empty path", lambda: jrc.save("", PARAMS), Value,
        "must name the folder of the save",
        "got ''", "'.' for the current folder"),
    Row(SAVE, "a URL", lambda: jrc.save("gs://bucket/run", PARAMS), Value,
        "a local or mounted file system", "got the URL 'gs://bucket/run'", "Mount the bucket"),
    Row(RESTORE, "bytes for a path", lambda: jrc.restore(b"run", PARAMS), Type,
        "path must be a str or a pathlib.Path", "got bytes b'run'", "Give the folder of the save"),
    Row(SAVE, "a file on the way", under_a_file, NotADirectoryError, "path must be a folder",
        "notes is a file", "Give another path"),
    Row(SAVE, "a folder that cannot be made", lambda: jrc.save("x" * 300, PARAMS), OSError,
        "a folder that can be made and written to", "File name too long", "Give another"),
    Row(SAVE, "a path that no file system takes", lambda: jrc.save("a\0b", PARAMS), Value,
        "a folder that can be made and written to", "embedded null byte", "Give another"),
    Row(SAVE, "text in a state", lambda: jrc.save("run", {"w": "text"}), Type,
        "every leaf of state must be an array", "got str 'text' at 'w'",
        "Convert it with jnp.asarray"),
    Row(SAVE, "a number alone", lambda: jrc.save("run", 3), Type,
        "every leaf of state must be an array", "got int 3 at '(the tree itself)'",
        "Convert it with jnp.asarray"),
    Row(SAVE, "inside of jit", lambda: jax.jit(lambda x: jrc.save("run", {"x": x}))(1.0), Type,
        "every leaf of state must be an array", "got a tracer at 'x'",
        "Call jrc.save outside of jax.jit"),
    Row(SAVE, "a donated state", save_the_old_state, Value, "must not be donated",
        "an array that a step has deleted",
        "Save the state that the step returned"),
    Row(RESTORE, "a number for a path", lambda: jrc.restore(3, PARAMS), Type,
        "path must be a str or a pathlib.Path", "got int 3", "Give the folder of the save"),
    Row(RESTORE, "the state first", lambda: jrc.restore(PARAMS, pathlib.Path("run")), Type,
        "path must come before like", "got dict and then PosixPath 'run'",
        "Write jrc.restore('run', like)"),
    Row(RESTORE, "a state for a path", lambda: jrc.restore(placed(), placed()), Type,
        "path must be a str or a pathlib.Path", "got TrainState TrainState(step=",
        "Give the folder of the save"),
    Row(RESTORE, "no folder", lambda: jrc.restore("run", PARAMS), FileNotFoundError,
        "must be the folder of a save", "which does not exist", "that was given to jrc.save"),
    Row(RESTORE, "a folder of something else", beside_notes, FileNotFoundError,
        "must be the folder of a save", "which has no complete save", "that was given to jrc.save"),
    Row(RESTORE, "another tree", lambda: restore({"w": jnp.zeros(3)}), Value,
        "must have the tree that was saved", "leaf 'b'", "Build like with the model"),
    Row(RESTORE, "another optimizer",
        lambda: restore(optax.adam(0.1).init(PARAMS), optax.sgd(0.1, 0.9).init(PARAMS)), Value,
        "must have the tree that was saved",
        "leaves '0/count', '0/mu/w', '0/nu/w' are not saved; leaf '0/trace/w' is saved",
        "Build like with the model"),
    Row(RESTORE, "another dtype", lambda: restore(LIKE | {"w": jnp.zeros(3, jnp.bfloat16)}), Value,
        "must have the shapes and dtypes", "got bfloat16[3]", "Build like as it was saved"),
    Row(RESTORE, "another number of replicas",
        lambda: restore({"u": jnp.zeros((8, 3))}, {"u": jnp.zeros((4, 3))}), Value,
        "was saved as float32[4, 3]", "got float32[8, 3]", "which jrc.reshard_dgc changes"),
    Row(RESTORE, "a truncated manifest",
        lambda: restore(LIKE, damage=lambda file: file.write_text(file.read_text()[:20])), Value,
        "no readable manifest", "JSONDecodeError", "restore a copy of the folder"),
    Row(RESTORE, "a manifest of something else",
        lambda: restore(LIKE, damage=lambda file: file.write_text('{"format": 1, "leaves": [3]}')),
        Value, "no readable manifest", "TypeError", "restore a copy of the folder"),
    Row(RESTORE, "a manifest without leaves",
        lambda: restore(LIKE, damage=lambda file: file.write_text('{"format": 1, "leaves": 3}')),
        Value, "no readable manifest", "TypeError", "restore a copy of the folder"),
    Row(RESTORE, "a save without arrays",
        lambda: restore(LIKE, damage=lambda file: shutil.rmtree(file.parents[1] / "arrays")), Value,
        "may be damaged", "run/jrc_0", "Restore a copy of the folder"),
    Row("jrc.flush", "an optimizer's state", lambda: jrc.flush(optax.EmptyState(), 0.1), Type,
        "state must be a TrainState", "got EmptyState", "Pass the state that jrc.init_state"),
    Row("jrc.flush", "nothing is compressed", lambda: jrc.flush(placed(), 0.1), Value,
        "state must have a DGCState in its opt_state", "got none in tuple", "leave jrc.flush out"),
    Row("jrc.flush", "averages", lambda: jrc.flush(state(tx=jrc.scale_by_ef21(min_size=1)), 0.1),
        Value, "state must have a DGCState", "got an EF21State", "leave jrc.flush out"),
    Row("jrc.flush", "a schedule", lambda: jrc.flush(compressed(), optax.constant_schedule(0.1)),
        Type, "learning_rate must be a finite number", "got <function",
        "schedule(int(state.step))"),
    Row("jrc.flush", "no rate", lambda: jrc.flush(compressed(), float("nan")), Value,
        "learning_rate must be a finite number", "got nan", "Pass 0.1"),
    Row("jrc.flush", "a word for a switch", lambda: jrc.flush(compressed(), 0.1, donate="no"),
        Type, "donate must be True or False", "got 'no'", "Write donate=True"),
]
# fmt: on
