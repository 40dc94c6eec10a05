"""Gradients by name: the pairs and their order, stopped gradients, and callbacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.compat import append_backward
from jrc.models import mlp
from tests.remat.measure import bit_equal, largest_error, operators, rerun_operators

X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)
W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
PARAMS = {f"layer_{i}": {"b": jnp.ones((1, 4)) * i, "w": W + 0.1 * i} for i in range(3)}


def loss_fn(params, x):
    for name, layer in params.items():
        x = jrc.mark(jnp.sin(x @ layer["w"] + layer["b"]), name.replace("layer", "h"))
    return jnp.mean(x**2)


def names(pairs):
    return [name for name, _ in pairs]


def at(tree, name):
    return functools.reduce(lambda node, key: node[key], name.split("/"), tree)


def test_pairs_are_the_gradient_in_the_order_of_the_tree():
    pairs = append_backward(loss_fn, PARAMS, X)
    assert names(pairs) == [f"layer_{i}/{leaf}" for i in range(3) for leaf in "bw"]
    want = jax.grad(loss_fn)(PARAMS, X)
    assert bit_equal([grad for _, grad in pairs], jax.tree.leaves(want))


def test_pairs_in_the_order_of_the_list():
    want = jax.grad(loss_fn)(PARAMS, X)
    listed = ["layer_2/w", "layer_0/b", "layer_1/w", "layer_0/b"]
    pairs = append_backward(loss_fn, PARAMS, X, parameter_list=listed)
    assert names(pairs) == listed[:3]
    assert all(bit_equal(grad, at(want, name)) for name, grad in pairs)
    assert append_backward(loss_fn, PARAMS, X, parameter_list=[]) == []


def test_the_name_of_a_mark_gives_the_gradient_of_an_intermediate():
    def rest(h, params):
        for i in (1, 2):
            h = jnp.sin(h @ params[f"layer_{i}"]["w"] + params[f"layer_{i}"]["b"])
        return jnp.mean(h**2)

    first = jnp.sin(X @ PARAMS["layer_0"]["w"] + PARAMS["layer_0"]["b"])
    want = jax.grad(loss_fn)(PARAMS, X)
    listed = ["layer_0/w", "h_0", "layer_2/w"]
    for checkpoints in (None, ["h_0", "h_1"]):
        pairs = append_backward(loss_fn, PARAMS, X, parameter_list=listed, checkpoints=checkpoints)
        assert names(pairs) == listed
        assert largest_error(pairs[1].grad, jax.grad(rest)(first, PARAMS)) < 1e-6
        assert largest_error(pairs[0].grad, want["layer_0"]["w"]) < 1e-6


def test_a_name_means_all_its_marks_and_all_their_arrays():
    def fn(params, x):
        a, b = jrc.mark((params * x, params + x), "pair")
        jrc.mark(a, "twice")  # the value has the name, also for readers of `a`
        return jnp.sum(jrc.mark(a * 3, "twice") * b)

    x, p = jnp.float32(2), jnp.float32(5)
    pairs = append_backward(fn, p, x, parameter_list=["twice", "pair", "twice#2", ""])
    assert [(name, float(grad)) for name, grad in pairs] == [
        ("twice", 21.0), ("twice#2", 7.0), ("pair/0", 21.0), ("pair/1", 30.0), ("", 72.0),
    ]  # fmt: skip


def test_the_name_of_a_pair_may_be_listed_and_stopped():
    def fn(p):
        a, b = jrc.mark((p * 2.0, p * 3.0), "pair")
        c, d = jrc.mark((a * b, p * 1.0), "pair")
        return c * d

    p = jnp.float32(2)
    found = lambda **options: [(n, float(g)) for n, g in append_backward(fn, p, **options)]  # noqa: E731
    assert found(parameter_list=["pair#2/1", "pair/0", ""]) == [
        ("pair#2/1", 24.0), ("pair/0", 12.0), ("", 72.0)
    ]  # fmt: skip
    assert found(no_grad_set=["pair/0"]) == [("", 48.0)]
    assert found(no_grad_set={"pair": 1}.keys()) == []
    with pytest.raises(ValueError, match=r"got 'pair/2' \(did you mean"):
        found(parameter_list=["pair/2"])


@pytest.mark.slow
def test_complex_values_have_gradients():
    def fn(p):
        return jnp.sum(jnp.abs(jrc.mark(jnp.fft.fft(p["r"]) * p["c"], "z")) ** 2)

    params, calls = {"c": 3.0 + 1j, "r": jnp.arange(1.0, 5.0)}, []
    count = lambda block, context: calls.append(context["__current_op_desc__"].type)  # noqa: E731
    pairs = append_backward(fn, params, callbacks=count, parameter_list=["r", "z", "c"])
    assert names(pairs) == ["r", "z", "c"] and {"abs_grad", "fft_grad"} <= set(calls)
    want = jax.grad(fn)({"c": jnp.asarray(3.0 + 1j), "r": params["r"]})
    assert largest_error({name: grad for name, grad in pairs if name != "z"}, want) < 1e-6
    z = jnp.fft.fft(params["r"]) * params["c"]
    assert largest_error(pairs[1].grad, jax.grad(lambda z: jnp.sum(jnp.abs(z) ** 2))(z)) < 1e-6
    assert append_backward(fn, params, no_grad_set=["z"]) == []


def test_the_gradient_of_a_mark_is_placed_as_the_mark():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("x", None)))
        h, w = append_backward(small_loss, SMALL | {"b": x}, x, parameter_list=["h", "w"])
        assert h.grad.sharding.spec == P("x", None) and w.grad.sharding.spec == P(None, None)


def test_no_grad_set_takes_a_parameter_s_pair_and_wins():
    barred = ["layer_1/w", "layer_0/b"]
    pairs = append_backward(loss_fn, PARAMS, X, no_grad_set=set(barred))
    assert names(pairs) == ["layer_0/w", "layer_1/b", "layer_2/b", "layer_2/w"]
    want = jax.grad(loss_fn)(PARAMS, X)
    assert all(bit_equal(grad, at(want, name)) for name, grad in pairs)
    listed = ["layer_1/w", "layer_2/w"]
    pairs = append_backward(loss_fn, PARAMS, X, parameter_list=listed, no_grad_set=barred)
    assert names(pairs) == ["layer_2/w"]


@pytest.mark.parametrize("checkpoints", [None, ["h_0", "h_1"]])
def test_the_gradient_stops_at_a_mark_in_no_grad_set(checkpoints):
    pairs = append_backward(loss_fn, PARAMS, X, no_grad_set=["h_1"], checkpoints=checkpoints)
    assert names(pairs) == ["layer_2/b", "layer_2/w"]
    listed = ["h_0", "h_1", "h_2", "layer_1/b"]
    pairs = append_backward(loss_fn, PARAMS, X, parameter_list=listed, no_grad_set=["h_1"])
    assert names(pairs) == ["h_2"]


def test_a_stopped_mark_leaves_other_paths():
    def fn(params, x):
        h = jrc.mark(params["w"] * x, "h")
        return jnp.sum(h * params["w"])

    params, x = {"w": jnp.float32(3)}, jnp.float32(5)
    (pair,) = append_backward(fn, params, x, no_grad_set=["h"])
    assert pair == ("w", 15.0)
    assert append_backward(fn, params, x) == [("w", 30.0)]


def test_values_without_a_gradient_have_no_pair():
    def fn(params):
        def body(carry, _):
            kept, lost = carry
            return (kept * params["scan"], lost * params["carry"]), None

        (kept, _), _ = jax.lax.scan(body, (1.0, params["unread"]), None, length=2)
        inner = jax.jit(lambda a, b: a * jax.lax.stop_gradient(b))
        table = params["table"][params["index"]]
        return kept * inner(params["inner"], params["stopped"]) * table * jnp.sign(params["sign"])

    one = jnp.float32(2)
    params = dict.fromkeys(("carry", "inner", "scan", "sign", "stopped", "unread"), one)
    params |= {"index": jnp.int32(1), "flag": jnp.bool_(True), "rate": 0.5, "size": 3, "no": None}
    params |= {"table": np.ones(3, np.float32), "unused": jnp.ones(2)}
    assert names(append_backward(fn, params)) == ["inner", "scan", "table"]
    pairs = append_backward(fn, params, parameter_list=["index", "stopped", "size", "table"])
    assert names(pairs) == ["table"] and pairs[0].grad.tolist() == [0.0, 16.0, 0.0]
    # Whole numbers stay static, and floats are differentiated.
    fn = lambda params: sum(params["rate"] for _ in range(params["size"])) * 1.0  # noqa: E731
    assert append_backward(fn, params) == [("rate", 3.0)]


def test_gradients_that_are_not_requested_are_not_computed():
    def dots(**options):
        return operators(lambda p: append_backward(loss_fn, p, X, **options), PARAMS)["dot_general"]

    # Three forwards; backwards each layer has two, but the first, whose input is data, has one.
    assert dots() == 3 + 5
    assert dots(parameter_list=["layer_2/w"]) == 3 + 1
    assert dots(parameter_list=["h_1"]) == 3 + 1
    assert dots(parameter_list=["layer_0/b"]) == 3 + 2
    assert dots(no_grad_set=["layer_0/w"]) == 3 + 4
    assert dots(no_grad_set=["h_1"]) == 3 + 1
    assert dots(no_grad_set=["h_2"]) == dots(parameter_list=[]) == 3


@pytest.mark.parametrize("listed", [None, ["h_1", "layer_0/w", "layer_2/w"]])
def test_checkpoints_are_honoured(listed):
    """Paddle's own sample of `append_backward` ignores them."""

    def grads(params, checkpoints):
        return append_backward(loss_fn, params, X, parameter_list=listed, checkpoints=checkpoints)

    marks = ["h_0", "h_1", "h_2"]
    plain, lean = (
        operators(functools.partial(grads, checkpoints=c), PARAMS) for c in (None, marks)
    )
    fluid = jrc.recompute_segments(loss_fn, marks, rule="fluid")
    assert (lean - plain)["dot_general"] == 3
    assert rerun_operators(fluid, loss_fn, PARAMS, X)["dot_general"] == 3
    one, two = (jax.jit(grads, static_argnums=1)(PARAMS, c) for c in (None, tuple(marks)))
    assert names(one) == names(two) and largest_error(two, one) < 1e-6
    with jax.disable_jit():
        assert bit_equal(grads(PARAMS, None), grads(PARAMS, marks))


def test_unknown_checkpoints_are_ignored_with_a_warning(caplog):
    with caplog.at_level("WARNING", logger="jrc"):
        append_backward(loss_fn, PARAMS, X, checkpoints=["h_1", "h_9"])
    (text,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert text == (
        "jrc.compat.append_backward: checkpoints must be marks of `loss_fn`, got 'h_9' (did you "
        "mean 'h_2', 'h_1', 'h_0'?), which is ignored. It marks 'h_0', 'h_1', 'h_2'."
    )


def test_returned_pairs_are_names():
    pairs = append_backward(loss_fn, PARAMS, X, parameter_list=["layer_2/w", "h_1"])
    assert names(append_backward(loss_fn, PARAMS, X, parameter_list=pairs)) == names(pairs)
    rest = append_backward(loss_fn, PARAMS, X, no_grad_set=pairs[:1])
    assert "layer_2/w" not in names(rest)
    plain = [(name, grad) for name, grad in pairs]
    assert names(append_backward(loss_fn, PARAMS, X, parameter_list=plain)) == names(pairs)
    again = jax.jit(lambda pairs: append_backward(loss_fn, PARAMS, X, parameter_list=pairs))(pairs)
    assert names(again) == names(pairs)


def small_loss(params, x):
    h = jrc.mark(x @ params["w"], "h")
    return jnp.sum(jnp.sin(h) * params["b"]) + jnp.sum(jnp.floor(h))


SMALL = {"w": W, "b": X}
SCHEDULE = (
    "add_grad(reduce_sum_0, reduce_sum_1, add_0@GRAD) -> reduce_sum_0@GRAD",
    "reduce_sum_grad(mul_0, reduce_sum_0@GRAD) -> mul_0@GRAD",
    "mul_grad(sin_0, b, mul_0@GRAD) -> sin_0@GRAD, b@GRAD",
    "sin_grad(h, sin_0@GRAD) -> h@GRAD",
    "dot_general_grad(args/0, w, h@GRAD) -> w@GRAD",
)


def test_callbacks_run_once_per_gradient_operator_last_one_first():
    seen = []

    def callback(block, context):
        seen.append(("one", str(context["__current_op_desc__"]), block, context))

    def other(block, context):
        seen.append(("two", str(context["__current_op_desc__"]), block, context))

    append_backward(small_loss, SMALL, X, callbacks=callback)
    assert tuple(text for _, text, *_ in seen) == SCHEDULE
    block, context = seen[-1][2:]
    assert str(block).splitlines() == [
        "dot_general(args/0, w) -> h", "sin(h) -> sin_0", "mul(sin_0, b) -> mul_0",
        "reduce_sum(mul_0) -> reduce_sum_0", "floor(h) -> floor_0",
        "reduce_sum(floor_0) -> reduce_sum_1", "add(reduce_sum_0, reduce_sum_1) -> add_0",
    ]  # fmt: skip
    assert context.pop("__current_op_desc__").type == "dot_general_grad"
    assert context == {
        f"{name}@GRAD": name for name in ("add_0", "reduce_sum_0", "mul_0", "sin_0", "b", "h", "w")
    }
    seen.clear()
    append_backward(small_loss, SMALL, X, callbacks=[callback, other], parameter_list=["b"])
    assert [(who, text) for who, text, *_ in seen] == [
        (who, text)
        for text in (*SCHEDULE[:2], SCHEDULE[2].replace("sin_0@GRAD, ", ""))
        for who in ("one", "two")
    ]


def test_callbacks_run_while_the_program_is_built():
    calls = []
    count = lambda block, context: calls.append(context)  # noqa: E731
    step = jax.jit(functools.partial(append_backward, callbacks=count), static_argnums=0)
    for _ in range(3):
        step(small_loss, SMALL, X)
    assert len(calls) == 5
    for _ in range(2):
        append_backward(small_loss, SMALL, X, callbacks=count, checkpoints=["h"])
    assert len(calls) == 15
    append_backward(small_loss, SMALL, X, callbacks=count, no_grad_set=["w", "b"])
    assert len(calls) == 15
    # A function that is jitted as a whole has the same operators.
    append_backward(jax.jit(small_loss), SMALL, X, callbacks=count)
    assert len(calls) == 20


def test_an_error_in_a_callback_is_raised():
    def callback(block, context):
        raise RuntimeError(context["__current_op_desc__"].type)

    with pytest.raises(RuntimeError, match="add_grad"):
        append_backward(small_loss, SMALL, X, callbacks=[callback])


def test_aux_and_paddle_s_shape_of_a_loss():
    def with_aux(params, x):
        return loss_fn(params, x)[None], {"x": x, "words": "as they are", "count": jnp.int32(3)}

    pairs, aux = append_backward(with_aux, PARAMS, X, has_aux=True)
    assert bit_equal([g for _, g in pairs], jax.tree.leaves(jax.grad(loss_fn)(PARAMS, X)))
    assert aux["words"] == "as they are" and int(aux["count"]) == 3 and bit_equal(aux["x"], X)


def test_under_transforms():
    grads = lambda params, x: append_backward(  # noqa: E731
        loss_fn, params, x, parameter_list=["h_0", "layer_1/w"], checkpoints=["h_0", "h_1"]
    )
    plain = grads(PARAMS, X)
    jitted = jax.jit(grads)(PARAMS, X)
    assert names(jitted) == ["h_0", "layer_1/w"] and largest_error(jitted, plain) < 1e-6
    both = jax.vmap(grads, (None, 0))(PARAMS, jnp.stack([X, X * 2]))
    assert (
        largest_error(both, jax.tree.map(lambda *x: jnp.stack(x), plain, grads(PARAMS, X * 2)))
        < 1e-6
    )
    scanned = jax.lax.scan(lambda c, x: (c, grads(PARAMS, x)), 0, X[None])[1]
    assert largest_error(scanned, jax.tree.map(lambda x: x[None], plain)) < 1e-6
    second = jax.grad(lambda p: jnp.sum(grads(p, X)[1].grad))(PARAMS)
    want = jax.grad(lambda p: jnp.sum(jax.grad(loss_fn)(p, X)["layer_1"]["w"]))(PARAMS)
    assert largest_error(second, want) < 1e-5


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma):
    mesh = Mesh(jax.devices()[:2], ("i",))

    def replica(params, x):
        pairs = append_backward(loss_fn, params, x, parameter_list=["h_0", "layer_1/w"])
        h, w = (grad for _, grad in pairs)
        return h, jax.lax.psum(w, "i") if not check_vma else w

    xs = jnp.concatenate([X, X * 2])
    run = jax.shard_map(
        replica, mesh=mesh, in_specs=(P(), P("i")), out_specs=(P("i"), P()), check_vma=check_vma
    )
    h, w = jax.jit(run)(PARAMS, xs)
    want = [
        append_backward(loss_fn, PARAMS, x, parameter_list=["h_0", "layer_1/w"]) for x in (X, X * 2)
    ]
    assert largest_error(h, jnp.concatenate([pairs[0].grad for pairs in want])) < 1e-6
    assert largest_error(w, want[0][1].grad + want[1][1].grad) < 1e-6


def test_closed_over_values_and_random_draws():
    key = jax.random.key(0)

    def dropped(params, x):
        h = jrc.mark(x @ params["w"], "h") * jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.sum(jnp.sin(h @ params["w"]))

    def step(x):
        return append_backward(lambda p: dropped(p, x), {"w": W}, checkpoints=["h"])

    (pair,) = jax.jit(step)(X)
    assert largest_error(pair.grad, jax.grad(dropped)({"w": W}, X)["w"]) < 1e-6


def test_unknown_names_list_close_ones():
    with pytest.raises(ValueError) as error:
        append_backward(loss_fn, PARAMS, X, parameter_list=["layer_0/v"])
    assert str(error.value) == (
        "jrc.compat.append_backward: a name must be that of a parameter or a mark, got 'layer_0/v' "
        "(did you mean 'layer_0/w', 'layer_0/b', 'layer_2/w'?). The parameters are 'layer_0/b', "
        "'layer_0/w', "
        "'layer_1/b', 'layer_1/w', 'layer_2/b', 'layer_2/w', and `loss_fn` marks 'h_0', 'h_1', "
        "'h_2'."
    )
    with pytest.raises(ValueError, match=r"got 'h_9' \(did you mean 'h_2', 'h_1', 'h_0'"):
        append_backward(loss_fn, PARAMS, X, no_grad_set={"h_9"})

    def hidden(params, x):
        return jnp.sum(jax.lax.scan(lambda c, _: (jrc.mark(c * params, "c"), None), x, None, 2)[0])

    words = "got 'c' of `hidden`, which is inside lax.scan at test_append_backward.py:"
    with pytest.raises(ValueError, match=words):
        append_backward(hidden, jnp.float32(1), X, no_grad_set=["c"])
    clash = lambda params: jnp.sum(jrc.mark(params["h"] * 2, "h"))  # noqa: E731
    with pytest.raises(ValueError, match="got 'h', which is a parameter and a mark of `<lambda>`"):
        append_backward(clash, {"h": X}, parameter_list=["h"])
    assert names(append_backward(clash, {"h": X})) == ["h"]
    with pytest.raises(ValueError, match="got 'a/b' twice. Use no '/' in a dict's keys"):
        append_backward(loss_fn, {"a": {"b": X}, "a/b": X}, X)


def leaves_marked(p):
    a, b = jrc.mark((p["h"][0] * 100.0, p["h"][0] * 3.0), "h")
    return jnp.sum(a + b)


def twice_marked(p):
    return jnp.sum(jrc.mark(jrc.mark(p["h#2"] * 100.0, "h") * 3, "h"))


def tree_marked(p):
    a, b = jrc.mark((p["h"] * 2.0, p["h"] * 3.0), "h")
    return jnp.sum(a + b)


def named_as_a_leaf(p):
    a, b = jrc.mark((p * 2.0, p * 3.0), "pair")
    return jnp.sum(jrc.mark(a * b, "pair/0"))


@pytest.mark.parametrize(
    ("fn", "params", "name", "words"),
    [
        (leaves_marked, {"h": [X]}, "h", "'h/0', which is a parameter and a mark of `leaves_m"),
        (leaves_marked, {"h": [X]}, "h/0", "'h/0', which is a parameter and a mark of"),
        (twice_marked, {"h#2": X}, "h", "'h#2', which is a parameter and a mark of `twice_m"),
        (tree_marked, {"h": X}, "h", "'h', which is a parameter and a mark of `tree_marked`"),
        (named_as_a_leaf, X, "pair", "'pair/0', which is two marks of `named_as_a_leaf`: an"),
        (named_as_a_leaf, X, "pair/0", "Give one of the marks another name"),
    ],
)
def test_a_name_of_several_values_is_refused(fn, params, name, words):
    for options in ({"parameter_list": [name]}, {"no_grad_set": [name]}):
        with pytest.raises(ValueError, match=words):
            append_backward(fn, params, **options)
    # Without that name there is no error.
    assert len(append_backward(fn, params)) == 1


def test_a_name_that_also_stands_inside_a_loop_is_refused():
    def fn(p):
        def body(c, _):
            c, _ = jrc.mark((c * p, c), "h")
            return c, None

        return jrc.mark(p * 2.0, "h") * jax.lax.scan(body, jnp.float32(1), None, 2)[0]

    for name in ("h", "h/0"):
        with pytest.raises(ValueError, match=f"got '{name}' of `fn`, which is inside lax.scan at"):
            append_backward(fn, jnp.float32(3), no_grad_set=[name])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parameter_list": {"layer_0/w"}}, "which gives the order of the pairs, got the set"),
        ({"parameter_list": "layer_0/w"}, "parameter_list must be a list of names, got str"),
        ({"parameter_list": [W]}, "a list of names, got one with ArrayImpl"),
        ({"no_grad_set": "h_0"}, "no_grad_set must be a list of names, got str 'h_0'"),
        ({"no_grad_set": {3}}, "no_grad_set must be a list of names, got one with int"),
        ({"callbacks": "print"}, r"callbacks must be a function callback\(block, context\)"),
        ({"callbacks": [print, 3]}, "or a list of them, got 3"),
        ({"checkpoints": "h_0"}, "checkpoints must be a list of mark names, got str 'h_0'"),
        ({"has_aux": True}, r"must return \(loss, aux\) .* got float32\[\] from `loss_fn`"),
    ],
)
def test_arguments_of_wrong_types(options, words):
    with pytest.raises(TypeError, match=words):
        append_backward(loss_fn, PARAMS, X, **options)


def test_losses_that_are_no_real_number():
    with pytest.raises(
        TypeError, match="must be a function of the parameters, .* got ArrayImpl. Pass"
    ):
        append_backward(loss_fn(PARAMS, X), PARAMS, X)
    for wrong, words in [
        (lambda p: p["w"], r"got float32\[4,4\] from `<lambda>`. Take jnp.mean of it"),
        (lambda p: jnp.int32(3), r"got int32\[\]"),
        (lambda p: 3.0, "got float"),
    ]:
        with pytest.raises(ValueError, match=words):
            append_backward(wrong, {"w": W})
    with pytest.raises(TypeError, match="got a tuple of 2 from .* Pass has_aux=True"):
        append_backward(lambda p: (jnp.sum(p["w"]), 1), {"w": W})


def test_pairs_go_in_and_out_of_jit():
    pairs = jax.jit(lambda p: append_backward(small_loss, p, X))(SMALL)
    name, grad = pairs[0]
    assert name == "b" and isinstance(pairs[0], tuple)
    doubled = jax.jit(lambda pairs: jax.tree.map(lambda g: g * 2, pairs))(pairs)
    assert names(doubled) == ["b", "w"] and bit_equal(doubled[0].grad, grad * 2)


def test_paddle_s_net():
    config = mlp.Config()
    params = mlp.init(jax.random.key(0), config)
    rng = np.random.RandomState(0)
    batch = (rng.random_sample((32, 32)).astype(np.float32), rng.randint(2, size=(32, 1))[:, 0])
    loss = functools.partial(mlp.loss, config=config)
    pairs = append_backward(loss, params, batch, parameter_list=["pred/w", "fc_1", "fc_1/w"])
    assert names(pairs) == ["pred/w", "fc_1", "fc_1/w"]
    # The gradient of a dot's weights is its input against the gradient of its result.
    by_hand = batch[0].T @ np.asarray(pairs[1].grad)
    assert np.allclose(pairs[2].grad, by_hand, rtol=1e-5, atol=1e-7)
