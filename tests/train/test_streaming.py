"""Fragments that are exchanged at times of their own, and exchanges hidden behind a step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrc
from tests.outer_optimizers import reference
from tests.train.tasks import same_bits
from tests.train.test_outer import (
    REPLICAS,
    ROWS,
    WIDTH,
    batch,
    collectives,
    loss_fn,
    on,
    params,
    rows_are_equal,
    run,
)

PARTS = ({"b": slice(None), "w": slice(32)}, {"w": slice(32, None)})
"""Two fragments of the parameters, written by hand."""
OVERLAPPED = jrc.DiLoCo(4, fragments=2, overlap=1)
SPARSE = {"density": 1 / 8, "chunk": 256}


def start(outer, tx=None, mesh=None, **options):
    tx, mesh = tx or optax.adamw(1e-2), mesh or on()
    state = jrc.init_state(params(), tx, jax.random.key(1), mesh=mesh, outer=outer)
    return state, jrc.make_train_step(loss_fn, tx, mesh=mesh, outer=outer, **options)


class Statement:
    """The algorithm once more: one replica, one fragment and one leaf at a time, in NumPy."""

    def __init__(self, outer, parts, tx):
        self.outer, self.tx = outer, tx
        self.parts = parts
        self.shared = {name: np.asarray(x) for name, x in params().items()}
        self.own = [dict(self.shared) for _ in range(REPLICAS)]
        self.inner = [tx.init(params()) for _ in range(REPLICAS)]
        zeros = lambda: {n: np.zeros(x.shape, np.float32) for n, x in self.shared.items()}  # noqa: E731
        self.momentum, self.errors = zeros(), [zeros() for _ in range(REPLICAS)]
        self.waiting = None
        self.grad = jax.jit(jax.grad(lambda p, b: loss_fn(p, b, None)[0]))
        self.update = jax.jit(tx.update)

    def step(self, number):
        """Take step `number`, from 1."""
        xs, ys = (np.split(x, REPLICAS) for x in batch(number - 1))
        for r in range(REPLICAS):
            grads = self.grad(self.own[r], (xs[r], ys[r]))
            updates, self.inner[r] = self.update(grads, self.inner[r], self.own[r])
            new = optax.apply_updates(self.own[r], updates)
            self.own[r] = {name: np.array(x) for name, x in new.items()}
        if self.outer.overlap and self.waiting:
            self.apply(*self.waiting, getattr(self.outer, "blend", 0.0))
        self.waiting = None
        for i, part in enumerate(self.parts):
            if number % self.outer.sync_every == self.ends(i):
                self.waiting = part, self.result(part)
                if not self.outer.overlap:
                    self.apply(*self.waiting, 0.0)

    def ends(self, i):
        every, count = self.outer.sync_every, len(self.parts)
        return (i + 1) * every // count % every

    def result(self, part):
        """The new shared values of a fragment, by leaf."""
        found = {}
        for name, rows in part.items():
            theta, own = self.shared[name][rows], [mine[name][rows] for mine in self.own]
            if isinstance(self.outer, jrc.DiLoCo):
                found[name], self.momentum[name][rows] = reference.diloco_round(
                    theta, own, self.momentum[name][rows],
                    outer_lr=0.7, outer_momentum=0.9, nesterov=True,
                )  # fmt: skip
                continue
            found[name], kept = reference.sparseloco_round(
                theta, own, [e[name][rows] for e in self.errors],
                decay=0.95, outer_lr=1.0, over_senders=True, **SPARSE,
            )  # fmt: skip
            for e, new in zip(self.errors, kept, strict=True):
                e[name][rows] = new
        return found

    def apply(self, part, result, alpha):
        self.shared = {name: np.array(x) for name, x in self.shared.items()}
        for name, rows in part.items():
            self.shared[name][rows] = result[name]
            for mine in self.own:
                mine[name][rows] = alpha * mine[name][rows] + (1 - alpha) * result[name]


def follow(outer, parts, states):
    """Compare the states after each step with those of the statement."""
    want = Statement(outer, parts, optax.adamw(1e-2))
    for number, state in enumerate(states, 1):
        want.step(number)
        for name, x in state.params.items():
            np.testing.assert_allclose(x, want.shared[name], rtol=0, atol=3e-5)
            rows = state.opt_state.local.params[name]
            for r in range(REPLICAS):
                np.testing.assert_allclose(rows[r], want.own[r][name], rtol=0, atol=3e-5)


def states_of(outer, steps=11):
    state, step = start(outer, donate=False)
    for i in range(steps):
        state, _ = step(state, batch(i))
        yield state


rare = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "outer",
    [
        pytest.param(jrc.DiLoCo(5, fragments=2, overlap=1, blend=0.25), marks=pytest.mark.slow),
        pytest.param(jrc.SparseLoCo(4, fragments=2, **SPARSE), marks=pytest.mark.slow),
        pytest.param(jrc.DiLoCo(4, fragments=2), marks=rare),
        pytest.param(jrc.DiLoCo(3, overlap=1), marks=rare),
        pytest.param(jrc.DiLoCo(2, overlap=1), marks=rare),
        pytest.param(jrc.SparseLoCo(4, fragments=2, overlap=1, **SPARSE), marks=rare),
    ],
    ids=str,
)
def test_every_form_is_that_of_an_independent_statement(outer):
    whole = ({"b": slice(None), "w": slice(None)},)
    states = list(states_of(outer))
    follow(outer, PARTS if outer.fragments == 2 else whole, states)
    # What all fragments have kept, not that of the last exchange alone.
    kept = jax.tree.leaves(states[-1].opt_state.local.outer)
    norm = np.sqrt(sum(float(jnp.sum(x * x)) for x in kept))
    np.testing.assert_allclose(states[-1].opt_state.report.norm_kept, norm, rtol=1e-5)


@pytest.fixture(scope="module")
def streamed():
    """Ten steps with two fragments and overlap, without donation."""
    state, step = start(OVERLAPPED, donate=False)
    states, infos = [state], []
    for i in range(10):
        state, info = step(state, batch(i))
        states.append(state)
        infos.append(jax.device_get(info))
    return step, states, infos


def test_the_trajectory_is_that_of_an_independent_statement(streamed):
    _, states, _ = streamed
    follow(OVERLAPPED, PARTS, states[1:])


def test_an_exchange_sends_its_fragment_and_a_round_all_of_them(streamed):
    _, states, infos = streamed
    # Fragment 0 after steps 2, 6, …, fragment 1 after 4, 8, …; applied a step later.
    assert [bool(x.synchronised) for x in infos] == [i in (3, 5, 7, 9) for i in range(1, 11)]
    assert [int(x.opt_state.rounds) for x in states] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    ring = 2 * (REPLICAS - 1) / REPLICAS * 4
    headers = 4 * 5 * (REPLICAS - 1)
    sizes = 32 * WIDTH + WIDTH, 32 * WIDTH
    sent = [ring * size + headers for size in sizes]
    assert [float(x.bytes_sent) for x in infos] == [0, 0, sent[0], 0, sent[1]] + [
        0, sent[0], 0, sent[1], 0
    ]  # fmt: skip
    shares = [float(x.density) for x in infos if x.synchronised]
    whole = ROWS * WIDTH + WIDTH
    np.testing.assert_allclose(shares, [sizes[0] / whole, sizes[1] / whole] * 2, rtol=1e-6)
    means = [np.mean([x.losses for x in infos[i : i + 2]]) for i in (0, 2, 4, 6)]
    found = [float(x.loss) for x in infos if x.synchronised]
    np.testing.assert_allclose(found, means, rtol=1e-6)


def test_collectives_are_in_the_steps_that_exchange_alone(streamed):
    step, states, _ = streamed
    assert collectives(step, states[0], closing=False) == []
    for number in (2, 4):  # the message is made, and waits
        assert collectives(step, states[0], number=number) == []
    for number, rows in ((3, 33), (5, 32)):
        found = sorted(collectives(step, states[0], number=number))
        dense = [(shape, kind) for shape, kind in found if kind == "all-reduce"]
        assert dense == [(f"f32[{rows * WIDTH}]", "all-reduce")]
        assert [x for x in found if x not in dense] == [(f"u32[{REPLICAS},5]", "all-gather")]


def test_an_overlapped_exchange_reads_nothing_of_the_inner_step(streamed):
    step, states, _ = streamed
    text = step.lower(states[0], batch(0), number=3).compile().as_text()
    reads = {}
    for name, rest in re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$", text, re.MULTILINE):
        reads[name] = rest
    assert any("f32[4,64]" in rest and "parameter(" in rest for rest in reads.values())
    for kind in ("all-reduce(", "all-gather("):
        (first,) = [name for name, rest in reads.items() if f" {kind}" in rest]
        seen, left = set(), [first]
        while left:
            name = left.pop()
            seen.add(name)
            # A called computation is gone through too.
            mentioned = re.findall(r"[\w.-]+", reads[name])
            left += [other for other in mentioned if other in reads and other not in seen]
        assert not any("f32[4,64]" in reads[name] or " dot(" in reads[name] for name in seen)


@pytest.mark.slow
def test_a_run_is_restored_with_an_exchange_under_way(streamed, tmp_path):
    step, states, _ = streamed
    jrc.save(tmp_path / "state", states[4])
    assert np.asarray(states[4].opt_state.local.in_flight.header).any()
    fresh, other = start(OVERLAPPED, donate=False)
    state = jrc.restore(tmp_path / "state", fresh)
    assert same_bits(state, states[4])
    state, _ = run(state, other, 4, begin=4)
    assert same_bits(state, states[8])


def test_a_step_that_is_not_finite_is_left_out_of_one_exchange_of_each_fragment(streamed):
    step, states, _ = streamed
    state, left_out = states[4], []
    for i in range(4, 14):
        x, y = batch(i)
        if i == 4:
            x[4:8] = np.nan  # the second replica's part of the fifth step
        state, info = step(state, (x, y))
        left_out.append(int(info.left_out))
    # Applied in step 5: the message of step 4, made before. Those of steps 6 and 8 do not count.
    assert left_out == [0, 0, 1, 0, 1, 0, 0, 0, 0, 0]
    local = state.opt_state.local
    assert local.failed.tolist() == [0] * REPLICAS and int(state.opt_state.report.left_out) == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, local)))


def test_replicas_of_one_fragment_without_overlap_are_as_ever():
    """`fragments=1` changes no bit and no leaf."""
    plain, given = jrc.SparseLoCo(2), jrc.SparseLoCo(2, fragments=1, overlap=0)
    assert plain == given and jrc.DiLoCo(2) == jrc.DiLoCo(2, fragments=1, overlap=0)
    state, _ = start(plain)
    assert jax.tree.structure(state.opt_state.local.outer) == jax.tree.structure(params())
    assert state.opt_state.local.in_flight is None


def test_workers_wait_for_an_exchange_that_is_under_way(streamed):
    _, states, _ = streamed
    with pytest.raises(ValueError, match="no exchange under way"):
        jrc.reshard(states[4], 2)


@pytest.mark.parametrize(
    "replicas", [pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=rare)]
)
def test_workers_leave_and_join_with_what_is_not_exchanged(streamed, replicas):
    _, states, _ = streamed
    mesh = on(replicas)
    fresh, step = start(OVERLAPPED, mesh=mesh)
    like = jrc.reshard(jax.eval_shape(lambda: fresh), REPLICAS, mesh=mesh)
    assert jax.tree.map(np.shape, like) == jax.tree.map(np.shape, states[3])
    state = jrc.reshard(states[3], replicas, mesh=mesh)
    assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, fresh)
    assert same_bits(state.params, states[3].params)
    old, new = states[3].opt_state.local.params, state.opt_state.local.params
    for name in old:
        np.testing.assert_allclose(old[name].mean(0), new[name].mean(0), rtol=0, atol=1e-6)
    for i in range(3, 9):
        state, info = step(state, batch(i))
    assert bool(info.synchronised) and np.isfinite(float(info.loss))


@pytest.mark.exhaustive
def test_fragments_that_were_exchanged_just_now_stay_equal_to_what_is_shared():
    outer = jrc.SparseLoCo(4, fragments=2, **SPARSE)
    state, step = start(outer)
    state, _ = run(state, step, 2)
    new = jrc.reshard(state, 3)
    rows = new.opt_state.local.params
    assert same_bits([x[:32] for x in rows["w"]], [new.params["w"][:32]] * 3)
    assert not rows_are_equal(rows["w"], 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("outer", [OVERLAPPED, jrc.SparseLoCo(4, fragments=2, overlap=1, **SPARSE)])
def test_pmap_one_device_and_a_budget(outer):
    state, step = start(outer, donate=False)
    want, _ = run(state, step, 7)
    for options in ({"via": "pmap"}, {"accumulate": 1, "memory_budget": 10**9}):
        begun, step = start(outer, **options)
        got, _ = run(begun, step, 7)
        for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    begun, step = start(outer, mesh=on(1), via="jit")
    alone, infos = run(begun, step, 7)
    assert np.isfinite(float(infos[-1].loss)) and float(infos[-1].bytes_sent) == 0


@pytest.mark.slow
def test_a_model_state_travels_with_the_last_fragment():
    def stateful(params, model_state, batch, key):
        loss, _ = loss_fn(params, batch, key)
        mean = 0.5 * model_state["mean"] + 0.5 * batch[0].mean(0)
        return loss, ({"mean": mean, "count": model_state["count"] + 1}, None)

    first = {"mean": jnp.zeros(ROWS), "count": jnp.int32(0)}
    for overlap in (0, 1):
        outer = jrc.DiLoCo(4, fragments=2, overlap=overlap, blend=0.5)
        tx, options = optax.sgd(0.01), {"mesh": on(), "outer": outer}
        begin = jrc.init_state(params(), tx, jax.random.key(1), model_state=first, **options)
        step = jrc.make_train_step(stateful, tx, donate=False, **options)
        state, infos = run(begin, step, 2 + overlap)
        small, state = infos[-1].bytes_sent, run(state, step, 2, begin=2 + overlap)
        state, (_, last) = state
        assert last.bytes_sent - small == 4 * (ROWS + 1) * (REPLICAS - 1) - 1.5 * 4 * WIDTH
        want = sum(0.5 ** (4 - i) * batch(i)[0].mean(0) for i in range(4))
        np.testing.assert_allclose(state.model_state["mean"], want, rtol=0, atol=1e-6)
        assert int(state.model_state["count"]) == 4
        own = state.opt_state.local.model_state
        assert own["count"].tolist() == [4 + overlap] * REPLICAS
        assert rows_are_equal(own["mean"]) == (not overlap)
