"""Wrong calls of `jrc.compat` and `jrc.models`."""

import functools

import jax
import jax.numpy as jnp
import optax

import jrc
from jrc import compat
from jrc.models import gpt, mlp, resnet
from tests.messages.rows import Row

P = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
X = jnp.ones((2, 4))
KEY = functools.cache(lambda: jax.random.key(0))


def loss(params, x):
    h = jrc.mark(jnp.tanh(x @ params["a"]), "h")
    return jnp.mean(h @ params["b"])


backward = functools.partial(compat.append_backward, loss, P, X)


def recomputing(checkpoints=("h",)):
    opt = compat.RecomputeOptimizer(optax.sgd(0.1))
    if checkpoints is not None:
        opt.set_checkpoints(checkpoints)
    return opt


def minimize(opt_state=(), checkpoints=("h",), **options):
    opt = recomputing(checkpoints)
    return opt.minimize(loss, P, opt.init(P) if opt_state == () else opt_state, X, **options)


def compressing(**options):
    given = {"learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 0} | options
    return compat.DGCMomentumOptimizer(**given)


def apply_gradients(pairs):
    opt = recomputing()
    return opt.apply_gradients(P, opt.init(P), pairs)


SMALL = {"mlp": mlp.Config((4, 2)), "gpt": gpt.Config(8, 1, 1, 4, 4)}
SMALL["resnet"] = resnet.Config(8, 2, width=2)
mlp_params = functools.cache(lambda: mlp.init(KEY(), SMALL["mlp"]))
gpt_params = functools.cache(lambda: gpt.init(KEY(), SMALL["gpt"]))
resnet_params = functools.cache(lambda: resnet.init(KEY(), SMALL["resnet"]))


def mlp_loss(batch):
    return mlp.loss(mlp_params(), batch, config=SMALL["mlp"])


def gpt_apply(tokens):
    return gpt.apply(gpt_params(), tokens, SMALL["gpt"])


def resnet_loss(labels):
    return resnet.loss(*resnet_params(), (jnp.ones((2, 8, 8, 3)), labels), config=SMALL["resnet"])


Type, Value = TypeError, ValueError
BACK, DGC = "jrc.compat.append_backward", "jrc.compat.DGCMomentumOptimizer"
OPT, MODELS = "jrc.compat.RecomputeOptimizer", "jrc.models"

# fmt: off
ROWS = [
    Row(BACK, "a value for a loss", lambda: compat.append_backward(jnp.ones(()), P, X), Type,
        "must be a function of the parameters", "got ArrayImpl", "Pass the function"),
    Row(BACK, "an unknown name", lambda: backward(parameter_list=["c"]), Value,
        "must be that of a parameter or a mark", "got 'c'", "The parameters are 'a', 'b'"),
    Row(BACK, "a text for names", lambda: backward(no_grad_set="a"), Type, "a list of names",
        "got str 'a'", "Write no_grad_set=['layer_0/w']"),
    Row(BACK, "no callback", lambda: backward(callbacks=3), Type,
        "a function callback(block, context)", "got 3", "Write callbacks=[callback]"),
    Row(BACK, "a text for boundaries", lambda: backward(checkpoints="h"), Type,
        "a list of mark names", "got str 'h'", "Write checkpoints=["),
    Row(BACK, "a number for a switch", lambda: backward(has_aux=1), Type,
        "has_aux must be True or False", "got 1",
        "Write has_aux=True"),
    Row(BACK, "no loss", lambda: compat.append_backward(lambda params, x: x @ params["a"], P, X),
        Value, "one real number", "got float32[2,4]", "Take jnp.mean of it"),
    Row(OPT, "no optimizer", lambda: compat.RecomputeOptimizer(optax.adam), Type,
        "an optax transform or one of jrc.compat", "got function",
        "Write RecomputeOptimizer(optax.adam(0.01))"),
    Row(OPT, "a text for boundaries", lambda: recomputing("h"), Type,
        "must be a list of mark names", "got str 'h'", "Mark values with jrc.mark"),
    Row(f"{OPT}.minimize", "no boundaries", lambda: minimize(checkpoints=None), Value,
        "checkpoints must be set before", "got none", "Write opt._set_checkpoints(["),
    Row(f"{OPT}.minimize", "no state", lambda: minimize(None), Type,
        "opt_state must be the optimizer's state", "got None", "opt_state = opt.init(params)"),
    Row(f"{OPT}.minimize", "another optimizer's state", lambda: minimize(optax.adam(0.1).init(P)),
        Type, "this optimizer's init makes", "leaves '0/count', '0/mu/a'",
        "opt_state = opt.init(params)"),
    Row(f"{OPT}.minimize", "a number for a transform", lambda: minimize(grad_clip=1.0), Type,
        "an optax transform", "got 1.0", "optax.clip_by_global_norm(1.0)"),
    Row(f"{OPT}.backward", "a program",
        lambda: recomputing().backward(loss, P, X, startup_program=3), Value,
        "must be None", "got int", "Initialize with opt.init(params)"),
    Row(f"{OPT}.apply_gradients", "a dict for pairs", lambda: apply_gradients({"a": P["a"]}), Type,
        "a list of pairs", "got dict", "list(grads.items())"),
    Row(f"{OPT}.apply_gradients", "another shape", lambda: apply_gradients([("a", X)]), Value,
        "must have its parameter's shape", "got (2, 4)", "Pair each gradient with its own name"),
    Row(f"{OPT}.update", "no state", lambda: recomputing().update(P, None, P), Type,
        "opt_state must be the optimizer's state", "got None", "opt_state = opt.init(params)"),
    Row(f"{OPT}.load", "a path", lambda: recomputing().load("run"), NotImplementedError,
        "load function is not supported", "got 'run'", "opt_state = jrc.restore('run'"),
    Row("jrc.compat.recompute_cell", "a function", lambda: compat.recompute_cell(loss), Type,
        "flax linen or nnx module", "got function", "jrc.recompute(function, *args)"),
    Row("jrc.compat.recompute_cell", "a number", lambda: compat.recompute_cell(3), Type,
        "cell must be a flax linen or nnx module", "got int", "jrc.recompute(function, *args)"),
    Row("jrc.compat.recompute_cell", "a word for a switch",
        lambda: compat.recompute_cell(None, mp_comm_recompute="no"), Type,
        "mp_comm_recompute must be True or False", "got 'no'", "Write mp_comm_recompute=True"),
    Row("jrc.compat.recompute_primitive", "no function",
        lambda: compat.recompute_primitive("relu"), Type, "primitive must be an operator",
        "got str", "Write jrc.compat.recompute_primitive(jax.nn.relu)(x)"),
    Row("jrc.compat.recompute_sequential", "functions first",
        lambda: compat.recompute_sequential([jnp.sin], X), Type, "ctx must be a dict", "got list",
        "Write {'segments': 2}"),
    Row("jrc.compat.recompute_sequential", "an unknown key",
        lambda: compat.recompute_sequential({"segment": 2}, [jnp.sin], X), Value,
        "ctx must have no keys but 'segments'", "got 'segment'", "Leave it out"),
    Row(DGC, "sparsity in per cent", lambda: compressing(sparsity=99.9), Value,
        "must be a number in [0, 1)", "got 99.9", "0.999 sends one entry in a thousand"),
    Row(DGC, "no replicas to clip for", lambda: compressing(grad_clip=1.0), Type,
        "must be a whole number >= 1", "got None", "write num_trainers=4, axis_name='data'"),
    Row(DGC, "a text for names", lambda: compressing(parameter_list="a"), Type, "a list of names",
        "got str 'a'", "Write parameter_list=["),
    Row(DGC, "an unknown option", lambda: compressing(min_sise=3), Type,
        "besides Paddle's arguments", "got 'min_sise'", "did you mean 'min_size'?"),
    Row(DGC, "the bound under another name", lambda: compressing(clip_norm=1.0), Type,
        "besides Paddle's arguments", "got 'clip_norm'", "is local_grad_clip_norm, or grad_clip"),
    Row(DGC, "two bounds", lambda: compressing(local_grad_clip_norm=1.0, grad_clip=2.0), Value,
        "must be left out where there is a grad_clip", "got 1.0 and 2.0", "Pass one of them"),
    Row(DGC, "replicas without an axis", lambda: compressing(num_trainers=2), Value,
        "must be 1 or left out where axis_name is None", "num_trainers=2",
        "Pass axis_name='data'"),
    Row(f"{MODELS}.mlp.Config", "one number", lambda: mlp.Config(3), Value,
        "an input and an output width", "got 3", "The default is (32, 128, 2)"),
    Row(f"{MODELS}.mlp.Config", "a list for a name", lambda: mlp.Config(activation=["relu"]), Value,
        "activation must be one of", "got ['relu']", "Write activation='identity'"),
    Row(f"{MODELS}.mlp.init", "a seed for a key", lambda: mlp.init(0, SMALL["mlp"]), Type,
        "one random key", "got int 0", "Write jax.random.key(0)"),
    Row(f"{MODELS}.mlp.apply", "no parameters", lambda: mlp.apply({}, X, SMALL["mlp"]), Value,
        "those that init makes", "got a dict with none", "jrc.models.mlp.init(key, config)"),
    Row(f"{MODELS}.mlp.apply", "another width",
        lambda: mlp.apply(mlp_params(), jnp.ones((2, 5)), SMALL["mlp"]), Value,
        "of shape (batch, 4)", "got float32[2, 5]", "make the model with sizes"),
    Row(f"{MODELS}.mlp.loss", "no pair", lambda: mlp_loss(X), Value, "a pair of inputs and labels",
        "got ArrayImpl", "Write batch=(x, labels)"),
    Row(f"{MODELS}.mlp.loss", "floating labels", lambda: mlp_loss((X, jnp.ones(2))), Value,
        "labels must be integers", "got float32[2]", "Number the classes from 0"),
    Row(f"{MODELS}.gpt.Config", "half a layer", lambda: gpt.Config(layers=1.5), Type,
        "layers must be a whole number", "got 1.5", "Leave it out"),
    Row(f"{MODELS}.gpt.Config", "all dropped", lambda: gpt.Config(dropout=1.0), Value,
        "dropout must lie in [0, 1)", "got 1.0", "0 drops nothing"),
    Row(f"{MODELS}.gpt.init", "no config", lambda: gpt.init(KEY(), None), Type,
        "config must be a jrc.models.gpt.Config", "got NoneType", "Write jrc.models.gpt.Config()"),
    Row(f"{MODELS}.gpt.apply", "a sequence too long", lambda: gpt_apply(jnp.zeros((1, 5), int)),
        Value, "at most config.length=4 of them", "got 5", "Cut the rows"),
    Row(f"{MODELS}.gpt.apply", "floating tokens", lambda: gpt_apply(jnp.zeros((1, 4))), Value,
        "tokens must be integers", "got float32[1, 4]", "rows of token numbers"),
    Row(f"{MODELS}.gpt.loss", "one token",
        lambda: gpt.loss(gpt_params(), jnp.zeros((1, 1), int), config=SMALL["gpt"]), Value,
        "at least two tokens", "got 1", "Pass longer rows"),
    Row(f"{MODELS}.resnet.Config", "another depth", lambda: resnet.Config(depth=9), Value,
        "depth must be one of", "got 9", "Small ones are 8, 14, 20"),
    Row(f"{MODELS}.resnet.Config", "text for a depth", lambda: resnet.Config(depth="50"), Type,
        "depth must be a whole number", "got '50'", "Leave it out"),
    Row(f"{MODELS}.resnet.init", "several keys",
        lambda: resnet.init(jax.random.split(KEY()), SMALL["resnet"]), Type, "one random key",
        "got key<fry>[2]", "Write jax.random.key(0)"),
    Row(f"{MODELS}.resnet.apply", "channels first",
        lambda: resnet.apply({}, {}, jnp.ones((2, 3, 8, 8)), SMALL["resnet"]), Value,
        "images must be floating, of shape (batch, height, width, 3)", "got float32[2, 3, 8, 8]",
        "move the channels last"),
    Row(f"{MODELS}.resnet.loss", "floating labels", lambda: resnet_loss(jnp.ones(2)), Value,
        "labels must be integers", "got float32[2]", "Number the classes from 0"),
]
# fmt: on
