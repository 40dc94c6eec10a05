"""The regions of a program and of the loops in it that are worth running in chunks.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr import inline_all
>>> loss = lambda w, x: jnp.mean(jax.nn.logsumexp(jnp.tanh(x) @ w, axis=1))
>>> program = Program(inline_all(jax.make_jaxpr(loss)(jnp.ones((4, 500)), jnp.ones((80, 4)))))
>>> (region,) = regions_within(program, narrow=40_000)
>>> chunked = region.chunks(most_bytes=40_000)
>>> chunked.chunks, chunked.shape
(10, (80, 500))
"""

import dataclasses
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

from jrc._jaxpr import (
    Dependent,
    Program,
    SplitValues,
    in_shard_map,
    inlined_program,
    is_manual,
    is_variable,
    nbytes,
    primitive_name,
    replaceable_programs,
    same_values,
    shape_of,
    without_mesh_axes,
)
from jrc._specs import axes_of
from jrc._tree import is_floating
from jrc.remat._chunks.chunks import Form
from jrc.remat._chunks.copies import by_more_than_a_number, by_pass_and_axis, copies_of_wide
from jrc.remat._chunks.form import form_for
from jrc.remat._chunks.in_shards import parts_of, region_alone, sharded_region
from jrc.remat._chunks.numbering import numbered_copies
from jrc.remat._chunks.region import Region
from jrc.remat._chunks.region_inside import RegionInside
from jrc.remat._chunks.regions import region_of_widest, wide_regions
from jrc.remat._chunks.searched_program import SearchedProgram
from jrc.remat._gradient.activity import differentiated_results


def regions_within(
    program: Program,
    narrow: int,
    around_loops: bool = True,
    split: SplitValues | None = None,
    devices: int = 1,
    ends: Sequence[int] = (0,),
    perturbed: Sequence[int] | None = None,
) -> list[RegionInside]:
    """Return the regions around all values wider than some bytes, those in loops too.

    Inside of a `shard_map` they are of what one device has.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that stays whole, on one device.
        around_loops: Whether a region may hold a loop that has regions inside; such a loop has
            none then.
        split: How devices split the values; `None` on one device, or where that is not known.
        devices: Over how many devices the values are split.
        ends: Which results are differentiated.
        perturbed: The inputs that they are differentiated by; by default all.
    """
    perturbed = range(len(program.jaxpr.invars)) if perturbed is None else perturbed
    search = _RegionSearch(narrow, around_loops, devices)
    return search.regions(SearchedProgram(program, split, (), ends, perturbed))


def _held(program: Program, depth: int, regions: Sequence[RegionInside]) -> set[int]:
    """The equations of regions, and loops that have regions inside.

    Args:
        program: The program.
        depth: How many loops are around it.
        regions: Regions of it, and of loops in it.
    """
    inside = {program.steps[x.path[depth]] for x in regions if len(x.path) > depth}
    own = (x.region.equations for x in regions if len(x.path) == depth)
    return inside.union(*own)


def _fine(regions: Sequence[RegionInside], narrow: int) -> list[RegionInside]:
    """The regions of which a slice has no more bytes than may stay whole."""
    return [each for each in regions if each.region.bytes <= narrow * each.slices]


class _Outside(NamedTuple):
    """Bytes of the wide values that no region makes.

    Attributes:
        all: Of those that none makes.
        fine: Of these, and those that one makes in slices that are wide themselves.
    """

    all: int
    fine: int


class _Attempt(NamedTuple):
    """The regions of a program in one form.

    Attributes:
        form: The form.
        program: The program in it.
        regions: Its regions.
        conflicts: The reads that ended others, as `Limits.conflicts` has them.
        outside: Bytes of wide values that no region makes.
    """

    form: Form
    program: Program
    regions: list[RegionInside]
    conflicts: set[tuple[int, int]]
    outside: _Outside


def _wide_outside(
    program: Program, narrow: int, depth: int, regions: Sequence[RegionInside]
) -> _Outside:
    def outside(some: Sequence[RegionInside]) -> int:
        held = _held(program, depth, some)
        eqns = (eqn for p, eqn in enumerate(program.eqns) if program.live()[p] and p not in held)
        sizes = (nbytes(v.aval) for eqn in eqns for v in eqn.outvars)
        return sum(size for size in sizes if size > narrow)

    return _Outside(outside(regions), outside(_fine(regions, narrow)))


@dataclasses.dataclass(frozen=True)
class _RegionSearch:
    """The arguments of `regions_within`, and the regions of programs inside that were found."""

    narrow: int
    around_loops: bool
    devices: int
    inside: dict[Any, list[RegionInside]] = dataclasses.field(default_factory=dict)

    def regions(self, given: SearchedProgram) -> list[RegionInside]:
        """The regions of a program in the form in which most wide values are in one."""
        first = self._attempt(given, form_for(given.program, given.active))
        if self.devices > 1 and given.split is None:
            return first.regions
        found = [first, *self._with_reads_apart(given, first)]
        if all(each.outside.fine for each in found):
            for copied in self._with_copies(given, first):
                found += [copied, *self._with_reads_apart(given, copied)]
                if not found[-1].outside.fine:
                    break
        found = [each for each in found if each.outside.all <= first.outside.all]
        return min(found, key=lambda each: each.outside.fine).regions

    def _attempt(self, given: SearchedProgram, form: Form) -> "_Attempt":
        """The regions of a program in a form."""
        searched, conflicts = given.in_form(form), set[tuple[int, int]]()
        regions = list(self._in_form(searched, form, conflicts))
        program, narrow, depth = searched.program, self.narrow * self.devices, len(given.path)
        outside = _wide_outside(program, narrow, depth, regions)
        return _Attempt(form, program, regions, conflicts, outside)

    def _with_copies(self, given: SearchedProgram, before: "_Attempt") -> "Iterator[_Attempt]":
        """The regions with copies for readers of wide values, if there are any."""
        program, narrow = before.program, self.narrow * self.devices
        held = _held(program, len(given.path), _fine(before.regions, narrow))
        for groups in (by_more_than_a_number, by_pass_and_axis):
            if copied := copies_of_wide(program, narrow, held, groups):
                copies = numbered_copies(program, copied)
                yield self._attempt(given, dataclasses.replace(before.form, copies=copies))

    def _with_reads_apart(self, given: SearchedProgram, before: "_Attempt") -> "Iterator[_Attempt]":
        """The regions with operands as values of their own, where reads of them ended some."""
        number = {p: k for k, p in enumerate(before.program.steps)}
        apart = sorted((number[p], i) for p, i in before.conflicts if p in number)
        if apart and before.outside.fine:
            yield self._attempt(given, dataclasses.replace(before.form, apart=tuple(apart)))

    def _in_form(
        self, searched: SearchedProgram, form: Form, conflicts: set[tuple[int, int]]
    ) -> Iterator[RegionInside]:
        program, split, path = searched.program, searched.split, searched.path
        ends, perturbed, active = searched.ends, searched.perturbed, searched.active
        results = program.jaxpr.outvars
        around = {}
        for k, p in enumerate(program.steps):
            eqn = program.eqns[p]
            if primitive_name(eqn) == "shard_map":
                of_part = differentiated_results(program, p, [results[i] for i in ends])
                around[p] = self._in_shard_map(eqn, of_part, (*path, k), active)
            elif replaceable_programs(eqn):
                around[p] = self._inside(searched, k)
        apart = () if self.around_loops else [p for p, inside in around.items() if inside]
        held: set[int] = set()
        if self.devices == 1 or split is not None:  # else slices might be cut across devices
            devices = _Devices(program, split, self.devices)
            placed: dict[Region, RegionInside] = {}

            def accepts(region: Region) -> bool:
                found = devices.placed(region, path)
                if found is not None:
                    placed[region] = dataclasses.replace(found, forms=(form,))
                return found is not None

            for region in wide_regions(
                devices.part,
                self.narrow * self.devices,
                apart,
                devices.lies_across,
                [devices.part.jaxpr.outvars[i] for i in ends],
                [devices.part.jaxpr.invars[i] for i in perturbed],
                accepts,
                conflicts,
            ):
                yield placed[region]
                held.update(region.equations)
        for p, inside in around.items():
            if p not in held:
                yield from (dataclasses.replace(x, forms=(form, *x.forms)) for x in inside)

    def _inside(self, searched: SearchedProgram, k: int) -> list[RegionInside]:
        """The regions of a loop's body, of the branches of a conditional, or of a region."""
        found = []
        for each in searched.inside(k):
            # A branch is one step more: its number among the branches, which has no form.
            more = len(each.path) - len(searched.path) - 1
            for x in self._regions_of(each):
                path = (*each.path, *x.path[len(each.path) :])
                found.append(dataclasses.replace(x, path=path, forms=(*more * [Form()], *x.forms)))
        return found

    def _regions_of(self, inside: SearchedProgram) -> list[RegionInside]:
        """The regions of a program inside; all forms of that around it have the same."""
        if inside.split is not None:
            return self.regions(inside)
        key = inside.program, tuple(inside.ends), tuple(inside.perturbed), len(inside.path)
        if key not in self.inside:
            self.inside[key] = self.regions(inside)
        return self.inside[key]

    def _in_shard_map(
        self, eqn: Any, ends: Sequence[int], path: tuple[int, ...], active: Set[Any]
    ) -> list[RegionInside]:
        if not is_manual(eqn):
            return []
        search = dataclasses.replace(self, devices=1, inside={})
        perturbed = [i for i, x in enumerate(eqn.invars) if is_variable(x) and x in active]

        def found(jaxpr: Any) -> list[RegionInside]:
            return search.regions(
                SearchedProgram(inlined_program(jaxpr), None, path, ends, perturbed)
            )

        return in_shard_map(eqn, found)


def region_of_loss(
    program: Program, narrow: int, split: SplitValues | None, perturbed: Sequence[int]
) -> RegionInside | None:
    """Return the region around the widest value; `None` if there is none.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that may enter or leave it.
        split: How devices split the values; `None` on one device.
        perturbed: The inputs that the loss is differentiated by.
    """
    given = SearchedProgram(program, split, (), [0], perturbed)
    form = form_for(program, given.active)
    searched = given.in_form(form)
    devices = _Devices(searched.program, searched.split, 1)
    region = region_of_widest(
        devices.part,
        narrow,
        devices.lies_across,
        devices.part.jaxpr.outvars[:1],
        [devices.part.jaxpr.invars[i] for i in perturbed],
        lambda region: devices.placed(region, ()) is not None,
    )
    found = None if region is None else devices.placed(region, ())
    return found and dataclasses.replace(found, forms=(form,))


class _Devices:
    """A program, and how devices split its values.

    Attributes:
        part: The program without the mesh axes that split data.
    """

    def __init__(self, program: Program, split: SplitValues | None, count: int) -> None:
        self._split, self._count = split, count
        self.part = without_mesh_axes(program, split.names) if split else program
        self._original = same_values(self.part, program)

    def lies_across(self, v: Any, axis: int) -> bool:
        """Return whether an axis is split as parameters are, and not as data."""
        return self._split is not None and not self._names(v, axis) <= set(self._split.names)

    def _names(self, v: Any, axis: int) -> set[str]:
        return set(self._split.of(self._original[v])[axis]) if self._split else set()

    def _may_have_lost_axes(self, v: Any) -> bool:
        """Whether the type of a value names mesh axes in the user's program, and not here.

        Of a value of a part, not of the whole program, that is not known on explicit axes.
        """
        original = self._original.get(v)
        sharding = getattr((v if original is None else original).aval, "sharding", None)
        if sharding is None or self._split is None:
            return False
        if original is None:
            return bool(sharding.mesh.explicit_axes)
        return not self._split.names.keys().isdisjoint(axes_of(sharding.spec))

    def _is_weight(self, v: Any) -> bool:
        is_data = self._split is not None and self._original[v] in self._split.data
        return is_floating(v.aval) and bool(shape_of(v)) and not is_data

    def placed(self, region: Region, path: tuple[int, ...]) -> RegionInside | None:
        """Return a region with how devices split it; `None` if slices would lie across them."""
        slices = region.slices
        if self._split is None:
            return RegionInside(self.part, region, path, self._count, (), slices.parts)
        alone, axes = region_alone(slices, region.results)
        parts = parts_of([self._original[v] for v in alone.jaxpr.invars], self._split)
        try:
            sharded = sharded_region(alone, axes, parts)
        except (Dependent, ValueError):
            return None
        if len(sharded.parts) < len(parts) and any(map(self._is_weight, slices.whole)):
            return None  # its gradient would be summed over devices in each chunk
        if any(map(self._may_have_lost_axes, sharded.made_before_parts)):
            return None  # without mesh axes equations do not run in front of the parts
        known = {name for each in sharded.parts for name in each.names}
        along = set().union(*(self._names(v, at) for v, at in slices.axes.items()))
        if not along <= known or sharded.slices.parts < 2:
            return None
        return RegionInside(
            self.part, region, path, self._count, sharded.parts, sharded.slices.parts
        )
