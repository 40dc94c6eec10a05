"""Every threshold of the planner, in one frozen value.

Bytes and FLOPs are compared as shares, so that no threshold depends on the size of a program.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PlannerSettings:
    """The thresholds, in the order in which a program meets them.

    Attributes:
        decide_every_value: A program of at most this many values may save any of them.
        smaller_than_sources: In a larger program a fused value is a save candidate if it takes at
            most this share of the bytes that it is computed from.
        tiny_share: In a larger program a value of at most this share of all bytes is saved if it
            is needed, without looking at the other way.
        decided_apart: Of the values that one equation reads so many are saved or recomputed each
            for itself, the largest; the others all alike.
        labels: How many labels the solver keeps at one place, about.
        states: How many states of undecided values the solver keeps between two equations.
        state_weights: For each of these numbers the states of the least peak plus cost times the
            number stay, both as shares of the graph's.
        label_steps: The bound on the solver's work: labels, summed over the equations. Where it is
            reached, only manual plans are candidates.
        coarse_rest: Cells into which closed bytes are divided when there are too many labels.
        coarse_open: The same for the bytes of the open region.
        cut_ratios: The scales of cuts: how many times what it saves a region makes, in bytes.
        cut_window: A region may make so many times the bytes at which it might end first.
        repeated_lines: Programs are cut behind the results of at most so many source lines.
        equal_cost: Manual plans of equal peak are taken for one if their costs differ by less than
            this share of the cost of a forward pass.
        options: About how many options of the solver a search chooses from.
        options_of_flops: About how many of the fewest FLOPs are added where costs are seconds.
        inner_options: About how many options of a loop the outer program chooses from.
        mapped_options: The same of a `shard_map`, which is most of a program.
        branch_levels: How many options of a `cond`, and of each of its branches.
        segment_scales: Numbers of segments of a loop that are tried, in multiples of the number
            that balances carries between segments against saved values inside of them.
        part_price: Between two options of a loop, a part of its steps is moved from one to the
            other for each such share of the FLOPs of its gradient.
        most_parts: At most so many such steps between two options.
        cost_weight: How many times a change of cost counts as much as the same relative change
            of bytes when points are spread along the Pareto front.
        compilations: How many programs a search may compile.
        measured: How many of them are run with `measure=True`.
        leanest_compiled: For a fraction of the range so many options that may be the leanest are
            compiled; for a fraction of 0 as many as a search may.
        compiled_between: So many at least are then compiled between both ends.
        compiled_before_refusal: So many more that may be the leanest are compiled before a budget
            is refused, or as many as a search may compile where that is more.
        near_peaks: Options are near if their peaks differ by this, as a logarithm.
        near_costs: The same of their costs, as a share of the cost of the dearest option.
        dearest_counts: What an option saves, as long as none fits, is its cost below so many times
            that of the cheapest that nearly surely fits; of the dearest where none does.
        surely_fits: One does whose temporaries are expected to be so many standard deviations below
            what there is for them.
        hopeless: As long as none fits, the search ends where it expects less than this share of
            what could be saved.
        least_gain: Where one fits, it ends where it expects to save less than this share of the
            cost of the dearest option.
        least_time_gain: The same as a share of all seconds, where they are known inexactly; so much
            another option must save for the baseline not to be taken.
        lean_margin: An option of another family than all that are compiled is compiled all the same
            if it is predicted to need less than so many times the leanest.
        least_bytes_gain: The search for the leanest option ends where it expects to save less than
            this share of the temporaries of the leanest so far.
        attained_flops: The share of an accelerator's published FLOP/s that programs reach, where
            copies to the host are weighed against recomputation.
        hidden_copy_price: The share of a copy's time that it costs although it is hidden.
        offloaded_points: Of how many plans of a loop's body values are moved to the host.
        offloaded_levels: How many sets of values of each.
        offloaded_share: A value is moved if it has at least this share of the bytes that a step
            saves.
        chunk_widths: Values wider than one of so many powers of two are made in chunks: from the
            largest on that any value exceeds, which is at most about half of what a budget leaves
            for temporaries.
        chunk_sizes: So many numbers of bytes are tried for a chunk, each a quarter of the last.
        smaller_chunks: Of a function as it is chunks of sizes are tried that have this ratio.
        nearly_fastest: Where it fits, the largest of these sizes are compiled whose predicted
            seconds are at most so many times the least.
        larger_chunks: So often a size of chunks is sought that just fits a function as it is.
        chunked_problems: At most so many ways to run regions in chunks are looked at.
        chunk_equations: Likewise, at most this number over the number of equations.
        chunked_problems_kept: The options of so many of them are searched.
        too_large_costs: The power to which what an option needs over what is there counts as cost.
        narrow_in_loss: Bytes of the widest value that may leave the whole loss in chunks.
        cost_outside_loss: Of the cost of a gradient at most this share lies outside of it.
        chunks_worth: Where the plan without chunks costs less than this share more than the
            operations of the baseline, none with chunks is looked for. Regions in chunks inside of
            a chunk of the whole loss must cost less by this share than that chunk without them.
        compiled_in_chunks: So many more programs are compiled where a plan without chunks fits, or
            where the leanest fits though it was not expected to. In the former case the options of
            so many ways are searched.
        off_chip_share: Of temporaries that fit into on-chip memory this share is outside all the
            same.
        leaner_chunks: Where none with chunks fits, those for a smaller budget are tried: smaller
            by as much as the leanest candidate exceeds it, times this.
        leanest_shares: Before a budget is refused, the leanest chunks are looked for with these
            shares of the temporaries of the leanest option without chunks.
        leaner_slack: A region may hold all that the whole loss holds where all chunks of the latter
            are predicted to need more than this many times what there is for temporaries.
        least_chunk: Bytes that a chunk has at least.
        bytes_by_names: Names for a plan that they do not say may need at most this many times the
            bytes that the plan saves.
        tags_in_all_sets: Of at most so many tags all sets are compared.
        tags_one_by_one: Of n tags, n divided by this number are left out at once, at least one.
        raw_key_words: An unsigned array of at most this many entries and two axes may be a raw
            random key.
    """

    decide_every_value: int = 48
    smaller_than_sources: float = 0.75
    tiny_share: float = 1 / 4000
    decided_apart: int = 8
    labels: int = 400
    states: int = 96
    state_weights: tuple[float, ...] = (0.2, 1.0, 5.0)
    label_steps: int = 30_000_000
    coarse_rest: int = 400
    coarse_open: int = 100
    cut_ratios: tuple[int, ...] = (2, 4, 8, 16, 32)
    cut_window: float = 1.5
    repeated_lines: int = 2
    equal_cost: float = 0.003
    options: int = 30
    options_of_flops: int = 6
    inner_options: int = 64
    mapped_options: int = 128
    branch_levels: int = 8
    segment_scales: tuple[float, ...] = (0.5, 1.0, 2.0)
    part_price: float = 0.02
    most_parts: int = 16
    cost_weight: float = 10.0
    compilations: int = 6
    measured: int = 3
    leanest_compiled: int = 3
    compiled_between: int = 2
    compiled_before_refusal: int = 3
    near_peaks: float = 0.5
    near_costs: float = 0.2
    dearest_counts: float = 1.25
    surely_fits: float = 1.6
    hopeless: float = 0.0005
    least_gain: float = 0.0005
    least_time_gain: float = 0.005
    lean_margin: float = 1.5
    least_bytes_gain: float = 0.01
    attained_flops: float = 0.5
    hidden_copy_price: float = 0.02
    offloaded_points: int = 8
    offloaded_levels: int = 6
    offloaded_share: float = 0.005
    chunk_widths: int = 7
    chunk_sizes: int = 5
    narrow_in_loss: int = 2**10
    cost_outside_loss: float = 0.1
    smaller_chunks: int = 4
    nearly_fastest: float = 1.5
    larger_chunks: int = 5
    chunked_problems: int = 16
    too_large_costs: float = 3.0
    chunk_equations: int = 20_000
    chunked_problems_kept: int = 3
    compiled_in_chunks: int = 2
    off_chip_share: float = 0.1
    leaner_chunks: float = 0.7
    leanest_shares: tuple[float, ...] = (0.5, 0.06, 0.0)
    leaner_slack: float = 4.0
    chunks_worth: float = 0.03
    least_chunk: int = 2**14
    bytes_by_names: float = 1.1
    tags_in_all_sets: int = 12
    tags_one_by_one: int = 16
    raw_key_words: int = 64


SETTINGS = PlannerSettings()
"""The settings in use."""
