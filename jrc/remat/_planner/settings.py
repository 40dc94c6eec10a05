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
            reached, only ways by hand are candidates.
        coarse_rest: Cells into which closed bytes are divided when there are too many labels.
        coarse_open: The same for the bytes of the open region.
        repeated_flops: Blocks are runs of equal products if these have at least this share of the
            FLOPs; else operators are compared, of any shape.
        least_stack: A run of equal operators is a stack of blocks if it has at least this share of
            the FLOPs.
        most_repetitions: At most so many repetitions are one block.
        much_less_crossing: They are if at most this share of the bytes crosses its ends.
        inner_options: How many options of a loop or a `shard_map` the outer program chooses from.
        branch_levels: How many options of a `cond`, and of each of its branches.
        chunk_scales: Numbers of chunks of a loop that are tried, in multiples of the number that
            balances carries between chunks against saved values inside of them.
        part_price: Between two options of a loop, a part of its steps is moved from one to the
            other for each such share of the FLOPs of its gradient.
        most_parts: At most so many such steps between two options.
        flops_weight: How many times a change of FLOPs counts as much as the same relative change
            of bytes when points are spread along the Pareto front.
        least_gain: Two candidates differ by at least this relative change of bytes.
        highest_price: A candidate may pay at most this many times the relative gain in bytes, as a
            share of the FLOPs of the gradient.
        low_price: Below this price several steps are merged into one candidate.
        merged_gain: A merged candidate gains at most this relative change of bytes.
        compilations: How many programs a search may compile.
        compilations_on_target: The same for an accelerator that is not there, whose compiler may
            take a minute for each.
        leanest_on_target: On a target so many that may be the leanest are compiled at most: for a
            fraction, before a budget is refused, and once before the search for the largest batch
            follows one of them.
        leanest_compiled: How many of the leanest candidates may be compiled before a budget is
            refused: XLA may need less for the second than for the first.
        by_hand_compiled: The same for the leanest ways by hand. Of both together the leanest by
            their own gradient programs are compiled.
        leanest_margin: One of them is compiled only if its predicted peak is at most this many
            times the least compiled one.
        followed_margin: Before one of them is compiled, the gradient programs of all ways by hand
            are traced whose modelled peak is at most this many times the least.
        compiled_margin: One that was traced is compiled only if its predicted peak is at most this
            many times the least compiled one.
        cheaper_compiled: At most so many ways by hand are compiled because they cost fewer FLOPs.
        cheaper_margin: They are compiled if their predicted peak is at most this many times the
            budget, those within the budget first.
        by_hand_margin: Where no candidate fits, a way by hand is compiled if its predicted peak is
            at most this many times the budget.
        plain_first_ratio: The gradient with nothing recomputed is compiled first if what XLA must
            keep of it is less than this many times the peak of the leanest candidate.
        followed_equations: Without compilations, two gradient programs are traced for predictions,
            but only one if the program has more equations than this.
        least_lent: A temporary may lie in the memory of a later result if it has at least this
            share of the bytes of the largest one.
        attained_flops: The share of an accelerator's published FLOP/s that programs reach, where
            copies to the host are weighed against recomputation.
        hidden_copy_price: The share of a copy's time that it costs although it is hidden.
        offloaded_points: Of how many plans of a loop's body values are moved to the host.
        offloaded_levels: How many sets of values of each.
        offloaded_share: A value is moved if it has at least this share of the bytes that a step
            saves.
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
    repeated_flops: float = 0.5
    least_stack: float = 0.05
    most_repetitions: int = 4
    much_less_crossing: float = 0.8
    inner_options: int = 64
    branch_levels: int = 8
    chunk_scales: tuple[float, ...] = (0.5, 1.0, 2.0)
    part_price: float = 0.02
    most_parts: int = 16
    flops_weight: float = 10.0
    least_gain: float = 0.005
    highest_price: float = 2.0
    low_price: float = 0.05
    merged_gain: float = 0.1
    compilations: int = 5
    compilations_on_target: int = 3
    leanest_on_target: int = 3
    leanest_compiled: int = 2
    by_hand_compiled: int = 3
    leanest_margin: float = 2.0
    followed_margin: float = 1.5
    compiled_margin: float = 1.15
    cheaper_compiled: int = 2
    cheaper_margin: float = 1.08
    by_hand_margin: float = 1.25
    plain_first_ratio: int = 2
    followed_equations: int = 800
    least_lent: float = 1 / 2000
    attained_flops: float = 0.5
    hidden_copy_price: float = 0.02
    offloaded_points: int = 8
    offloaded_levels: int = 6
    offloaded_share: float = 0.005
    raw_key_words: int = 64


SETTINGS = PlannerSettings()
"""The settings in use."""
