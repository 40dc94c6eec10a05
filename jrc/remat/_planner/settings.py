"""Every threshold of the planner, in one frozen value.

Bytes and FLOPs are compared as shares, so that no threshold depends on the size of a program.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PlannerSettings:
    """The thresholds, in the order in which a program meets them.

    Attributes:
        copy_distance: A cheap shared value is copied for a reader that stands more than this many
            equations behind the last copy.
        copied_flops: Copies may cost at most this share of the FLOPs of a program.
        decide_every_value: A program of at most this many values may save any of them.
        smaller_than_sources: In a larger program a fused value is a save candidate if it takes at
            most this share of the bytes that it is computed from.
        tiny_share: In a larger program a value of at most this share of all bytes is saved if it
            is needed, without looking at the other way.
        decided_apart: Of the values that one equation reads so many are saved or recomputed each
            for itself, the largest; the others all alike.
        labels: How many labels the solver keeps at one place, about.
        states: How many states of undecided values the solver keeps between two equations.
        label_steps: The bound on the solver's work: labels, summed over the equations. Where it is
            reached, only manual plans are candidates.
        coarse_rest: Cells into which closed bytes are divided when there are too many labels.
        coarse_open: The same for the bytes of the open region.
        cut_ratios: The scales of cuts: how many times what it saves a region makes, in bytes.
        cut_window: A region may make so many times the bytes at which it might end first.
        equal_cost: Manual plans of equal peak are taken for one if their costs differ by less than
            this share of the cost of a forward pass.
        options: About how many options of the solver a search chooses from.
        inner_options: About how many options of a loop the outer program chooses from.
        mapped_options: The same of a `shard_map`, which is most of a program.
        branch_levels: How many options of a `cond`, and of each of its branches.
        chunk_scales: Numbers of chunks of a loop that are tried, in multiples of the number that
            balances carries between chunks against saved values inside of them.
        part_price: Between two options of a loop, a part of its steps is moved from one to the
            other for each such share of the FLOPs of its gradient.
        most_parts: At most so many such steps between two options.
        cost_weight: How many times a change of cost counts as much as the same relative change
            of bytes when points are spread along the Pareto front.
        compilations: How many programs a search may compile.
        compilations_on_target: The same where each may take a minute.
        leanest_compiled: For a fraction of the range so many options that may be the leanest are
            compiled; for a fraction of 0 as many as a search may.
        compiled_between: So many at least are then compiled between both ends.
        compiled_before_refusal: So many more that may be the leanest are compiled before a budget
            is refused.
        tried_above_budget: Where an option fits, a cheaper one is tried if it is expected to need
            at most this many times the budget.
        tried_if_much: The same for one that is much cheaper.
        much_cheaper: It is if it saves this share of the cost of the dearest option.
        near_family: By how much the error of an option of a family that is near is farther away
            than that of one of the own: as much as a factor of bytes, as a logarithm.
        other_family: The same of any other family.
        nearly_equal: Of options that are expected to need at most this many times the least, the
            cheapest counts as the leanest.
        lean_margin: The first of a family of options that may be the leanest is compiled if it is
            predicted to need at most this many times the least compiled peak.
        worthwhile_gain: The same for a further one of a family, by what is expected of it.
        unlike_margin: The same for one that is unlike all that are compiled.
        predicted_together: On an accelerator the gradients of so many options are traced together.
        least_shared: A temporary may lie in the memory of a later result if it has at least this
            share of the bytes of the largest one.
        attained_flops: The share of an accelerator's published FLOP/s that programs reach, where
            copies to the host are weighed against recomputation.
        hidden_copy_price: The share of a copy's time that it costs although it is hidden.
        offloaded_points: Of how many plans of a loop's body values are moved to the host.
        offloaded_levels: How many sets of values of each.
        offloaded_share: A value is moved if it has at least this share of the bytes that a step
            saves.
        bytes_by_names: Names for a plan that they do not say may need at most this many times the
            bytes that the plan saves.
        tags_in_all_sets: Of at most so many tags all sets are compared.
        raw_key_words: An unsigned array of at most this many entries and two axes may be a raw
            random key.
    """

    copy_distance: int = 24
    copied_flops: float = 0.02
    decide_every_value: int = 48
    smaller_than_sources: float = 0.75
    tiny_share: float = 1 / 4000
    decided_apart: int = 8
    labels: int = 400
    states: int = 64
    label_steps: int = 20_000_000
    coarse_rest: int = 400
    coarse_open: int = 100
    cut_ratios: tuple[int, ...] = (2, 4, 8, 16, 32)
    cut_window: float = 1.5
    equal_cost: float = 0.003
    options: int = 30
    inner_options: int = 64
    mapped_options: int = 128
    branch_levels: int = 8
    chunk_scales: tuple[float, ...] = (0.5, 1.0, 2.0)
    part_price: float = 0.02
    most_parts: int = 16
    cost_weight: float = 10.0
    compilations: int = 5
    compilations_on_target: int = 3
    leanest_compiled: int = 2
    compiled_between: int = 2
    compiled_before_refusal: int = 3
    tried_above_budget: float = 1.25
    tried_if_much: float = 1.5
    much_cheaper: float = 0.02
    near_family: float = 0.1
    other_family: float = 0.3
    nearly_equal: float = 1.1
    lean_margin: float = 1.5
    worthwhile_gain: float = 0.93
    unlike_margin: float = 2.0
    predicted_together: int = 4
    least_shared: float = 1 / 2000
    attained_flops: float = 0.5
    hidden_copy_price: float = 0.02
    offloaded_points: int = 8
    offloaded_levels: int = 6
    offloaded_share: float = 0.005
    bytes_by_names: float = 1.1
    tags_in_all_sets: int = 12
    raw_key_words: int = 64


SETTINGS = PlannerSettings()
"""The settings in use."""
