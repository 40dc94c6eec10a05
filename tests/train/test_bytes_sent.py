"""`info.bytes_sent` is what the step sent: in mini-steps, skipped steps and over pairs of axes."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.dgc._internal import dgc_states
from jrc.remat._compiled.collectives import collectives
from jrc.remat._compiled.hlo import parse_hlo
from tests.train.test_step import NET, compress, mesh, net_batch, net_loss

SIZE = 4 * sum(x.size for x in NET.values())
SENT = 3 * 8 * (12 + 3)  # half of each leaf, a value and an index, to three other replicas


def trained(tx, batches, on=None, **options):
    on = on or mesh()
    outer = {name: options[name] for name in ("axis_name", "outer") if name in options}
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=on, **outer)
    step = jrc.make_train_step(net_loss, tx, mesh=on, donate=False, **options)
    infos, states = [], [state]
    for batch in batches:
        state, info = step(state, batch)
        infos.append(info)
        states.append(state)
    return step, states, infos


gathered = functools.partial(compress, exchange="allgather")
chained = functools.partial(optax.chain, gathered(), optax.scale(-0.1))
alone = functools.partial(jrc.dgc_momentum, 0.1, 0.9, 0, 1, (0.5,), min_size=2)


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("as_transform", [False, True])
def test_gradients_are_sent_once_in_k_steps(as_transform):
    tx = optax.MultiSteps(chained(), 2)
    tx = tx.gradient_transformation() if as_transform else tx
    step, states, infos = trained(tx, map(net_batch, range(4)))
    assert [float(info.bytes_sent) for info in infos] == [0, SENT, 0, SENT]
    assert [float(info.density) for info in infos] == [0, 0.5, 0, 0.5]
    text = step.lower(states[0], net_batch(0)).compile().as_text()
    program = text[text.index("ENTRY") :]
    assert "all-gather(" in text and "all-gather(" not in program


EXCHANGED = []


def exchanged(x):
    EXCHANGED.append(x.shape)
    return np.asarray(x)


class CountedSum(jrc.dgc.DenseSum):
    """Counts its tensors where it runs: the text of a program does not tell how often that is."""

    def mean(self, tensors, axis):
        counted = [jax.pure_callback(exchanged, x, x) for x in tensors]
        return super().mean(counted, axis)


def test_an_exchange_runs_once_in_k_steps():
    """Optax itself calls the compression in each mini-step, and drops what comes out."""
    EXCHANGED.clear()
    tx = optax.MultiSteps(compress(exchange=CountedSum()), 2)
    _, states, _ = trained(tx, map(net_batch, range(4)))
    jax.block_until_ready(states[-1])
    assert len(EXCHANGED) == 2 * 4 * len(NET)  # rounds, replicas, leaves


def test_mini_steps_are_those_of_accumulation():
    """Two mini-steps of half a batch are a step with both halves."""
    halves = [np.concatenate([net_batch(t)[r::2] for r in range(2)]) for t in range(2)]
    whole = np.concatenate([x.reshape(4, 2, 4) for x in halves], 1).reshape(16, 4)
    _, states, _ = trained(optax.MultiSteps(chained(), 2), halves)
    _, expected, _ = trained(chained(), [whole])
    for one, two in zip(
        jax.tree.leaves(states[-1].params), jax.tree.leaves(expected[-1].params), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def without_state(updates, step, params):
    return optax.tree.norm(updates) > 1.0, ()


SKIPS = [functools.partial(optax.skip_large_updates, max_squared_norm=1.0), without_state]


@pytest.mark.parametrize("skips", SKIPS, ids=["with state", "without"])
@pytest.mark.parametrize("as_transform", [False, True])
def test_mini_steps_that_replicas_would_skip_alone_are_refused(skips, as_transform):
    """Where replicas skip by their own gradients the run would wait for ever."""
    tx = optax.MultiSteps(chained(), 2, should_skip_update_fn=skips)
    tx = tx.gradient_transformation() if as_transform else tx
    with pytest.raises(ValueError, match="must not skip .* Leave should_skip_update_fn out"):
        jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())


REFUSED = {
    "contrib.sam": optax.contrib.sam(chained(), optax.sgd(0.1)),
    "contrib.mechanize": optax.contrib.mechanize(chained()),
    "contrib.galore": optax.contrib.galore(0.1, rank=2, base_optimizer=gathered()),
    "conditionally_transform": optax.conditionally_transform(chained(), lambda step: step < 1),
}


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_wrappers_that_would_send_in_vain_or_differ_are_refused(name, is_gathered):
    tx = optax.MultiSteps(REFUSED[name], 2) if is_gathered else REFUSED[name]
    with pytest.raises(ValueError, match=f"optax.{name} must not be around a compression, .*out"):
        jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())


def test_mini_steps_inside_of_another_transform_are_refused():
    inside = optax.chain(optax.MultiSteps(compress(), 2).gradient_transformation(), optax.scale(-1))
    with pytest.raises(ValueError, match=r"outermost .* Write optax.MultiSteps\(optax.chain"):
        trained(inside, [net_batch(0)])


def test_a_skipped_chain_sends_nothing():
    """An optimizer alone sends and then drops; a chain does not run."""
    bad = net_batch(1)
    bad[0] = np.nan
    for tx, sent in (
        (alone(axis_name="data", exchange="allgather"), [SENT, SENT, SENT]),
        (chained(), [SENT, 0, SENT]),
    ):
        _, _, infos = trained(tx, [net_batch(0), bad, net_batch(2)])
        assert [bool(info.skipped) for info in infos] == [False, True, False]
        assert [float(info.bytes_sent) for info in infos] == sent


def test_a_compression_skips_what_a_transform_before_it_made_infinite():
    """The gradients are finite, so that the chain runs; the compression asks again."""
    huge = optax.chain(optax.scale(1e38), optax.scale(1e38))
    _, states, infos = trained(optax.chain(huge, chained()), [net_batch(0)])
    (own,) = dgc_states(states[1].opt_state)
    assert int(own.skipped) == 1 and not bool(infos[0].skipped)
    for leaf, before in zip(*map(jax.tree.leaves, (states[1].params, NET)), strict=True):
        np.testing.assert_array_equal(leaf, before)
    assert not any(np.any(v) for v in jax.tree.leaves(own.v))


PAIR = {"axis_name": ("chip", "data")}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", ["compressed", "rounds", "mean"])
def test_the_inner_axis_of_a_pair_counts(kind):
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "chip"))
    inner = SIZE  # a ring all-reduce over two sends 2 * 1/2 of it
    compressed = alone(exchange="allgather", **PAIR)
    sgd, outer = optax.sgd(0.1), {"outer": jrc.DiLoCo(sync_every=2)}
    tx, options, sent = {
        "compressed": (compressed, {}, [inner + SENT / 3] * 2),
        "rounds": (sgd, outer, []),
        "mean": (sgd, {}, [1.5 * SIZE] * 2),
    }[kind]
    _, _, infos = trained(tx, map(net_batch, range(2)), two, **PAIR, **options)
    found = [float(info.bytes_sent) for info in infos]
    if kind == "rounds":
        hosts = Mesh(np.array(jax.devices()[:2]), ("data",))
        _, _, rounds = trained(sgd, map(net_batch, range(2)), hosts, **outer)
        sent = [inner + float(info.bytes_sent) for info in rounds]
    assert found == sent


def bytes_in_program(step, state, on, **number):
    """The bytes that a device sends between replicas, but for scalars; all branches of a step."""
    text = step.lower(state, net_batch(0), **number).compile().as_text()
    found = collectives(parse_hlo(text), dict(on.shape))
    return sum(x.sent for x in found if x.axes and set(x.axes) <= {"data", "chip"} and x.sent > 24)


SEND = {"sparsity": 0.5, "min_size": 1, "exchange": "allgather", **PAIR}
WAYS = {
    "compressed": (jrc.dgc_momentum(0.1, 0.9, 0, **SEND), {}),
    "chained": (optax.chain(jrc.scale_by_dgc(0.9, **SEND), optax.scale(-0.1)), {}),
    "gathered": (optax.MultiSteps(jrc.dgc_momentum(0.1, 0.9, 0, **SEND), 2), {}),
    "rounds": (optax.sgd(0.1), {"outer": jrc.DiLoCo(sync_every=2)}),
    "mean": (optax.sgd(0.1), {}),
}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize(("way", "parts"), [(way, parts) for parts in (2, 1) for way in WAYS])
def test_bytes_of_a_pair_are_those_of_the_program(way, parts):
    """A device sends its own shards, and a mean over the inner axis in the steps that have one."""
    devices = np.array(jax.devices()[: 4 * parts]).reshape(2, 2, parts)
    on = Mesh(devices, ("data", "chip", "fsdp"))
    params = {"w": jax.device_put(np.ones((4, 64), np.float32), NamedSharding(on, P("fsdp")))}
    tx, options = WAYS[way]

    def loss(params, batch, key):
        return ((batch @ params["w"]) ** 2).mean()

    state = jrc.init_state(params, tx, jax.random.key(0), mesh=on, **PAIR, **options)
    step = jrc.make_train_step(loss, tx, mesh=on, donate=False, **PAIR, **options)
    sent, expected = [], []
    for number in (1, 2):
        given = {"number": number} if options else {}
        expected.append(bytes_in_program(step, state, on, **given))
        state, info = step(state, net_batch(0))
        sent.append(float(info.bytes_sent))
    if way == "gathered":
        expected[0] = 4 * 4 * 64 / parts
    assert sent == pytest.approx(expected, abs=24)
    assert sent[0] > 24
