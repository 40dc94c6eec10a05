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
import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

from jrc._jaxpr import (
    INPUT,
    Dependent,
    Program,
    SplitValues,
    copy_for_readers,
    in_shard_map,
    inlined_program,
    inner_program,
    is_manual,
    is_variable,
    label,
    loop_parts,
    nbytes,
    primitive_name,
    same_values,
    shape_of,
    without_mesh_axes,
)
from jrc._specs import axes_of
from jrc._tree import is_floating
from jrc.remat._chunks.chunks import Chunks, Shards, SplitAxis
from jrc.remat._chunks.copies import Copies, Readers, copies_of_wide
from jrc.remat._chunks.counts import chunk_count
from jrc.remat._chunks.form import form_of
from jrc.remat._chunks.growth import Region
from jrc.remat._chunks.in_shards import PartsOf, parts_of, region_alone, sharded_region
from jrc.remat._chunks.numbering import numbered_copies, without_casts
from jrc.remat._chunks.regions import region_of_widest, wide_regions
from jrc.remat._gradient.activity import active_variables, differentiated_results

_LARGE = 2**24
"""Bytes of a chunk that keep a device busy."""


@dataclasses.dataclass(frozen=True, eq=False)
class RegionInside:
    """A region of a program, or of the body of a loop in it.

    Attributes:
        program: The program that it is of.
        region: The region.
        path: The loops around it, or a `shard_map`, each as the number of its equation.
        devices: Over how many devices the program's values are split: one inside of a `shard_map`.
        parts: How devices split it, the outermost first.
        slices: Into how many slices each part may be cut at most.
        copies: The equations of the program that are copied for readers, as in `Chunks`.
        ends: Likewise.
    """

    program: Program
    region: Region
    path: tuple[int, ...]
    devices: int
    parts: tuple[PartsOf, ...]
    slices: int
    copies: Copies = ()
    ends: tuple[int, ...] = (0,)

    def chunks(self, most_bytes: int) -> Chunks | None:
        """Return the region in chunks of about so many bytes; `None` where it needs no more.

        Args:
            most_bytes: Bytes of a chunk, on one device.
        """
        # Each chunk reads all of what it reads whole, which should be less than what it makes.
        devices = math.prod(each.parts for each in self.parts)
        whole = devices * sum(nbytes(v.aval) for v in self.region.slices.whole)
        most = self.region.bytes / max(whole, _LARGE * devices)
        size = self.region.bytes / (most_bytes * self.devices)
        count = chunk_count(self.slices, size, most)
        if count < 2:
            return None
        chunks = chunks_of(self.program, self.region, count, self.path, self.parts)
        return dataclasses.replace(chunks, copies=self.copies, ends=self.ends)


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
    program, split = _in_form(program, split, ends)
    perturbed = range(len(program.jaxpr.invars)) if perturbed is None else perturbed
    search = _RegionSearch(narrow, around_loops, devices)
    found = list(search.within(program, split, (), ends, perturbed))
    if devices > 1 and split is None:
        return [dataclasses.replace(each, ends=tuple(ends)) for each in found]
    narrow *= devices
    whole = _wide_outside(program, narrow, found)
    for readers in Readers:
        if not whole:
            break
        held = () if readers is Readers.WITH_NARROW_IN_COMMON else _held(program, found)
        copied = copies_of_wide(program, narrow, held, readers)
        if not copied:
            continue
        new = copy_for_readers(program, copied)
        more = list(search.within(new, split and split.of_program(new), (), ends, perturbed))
        left = _wide_outside(new, narrow, more)
        if left < whole:
            copies = numbered_copies(program, copied)
            found = [dataclasses.replace(each, copies=copies) for each in more]
            whole = left
    return [dataclasses.replace(each, ends=tuple(ends)) for each in found]


def _held(program: Program, regions: Sequence[RegionInside]) -> set[int]:
    """The equations of regions, and loops that have regions inside."""
    return {
        p
        for each in regions
        for p in (map(program.steps.__getitem__, each.path[:1]) if each.path
                  else each.region.equations)
    }  # fmt: skip


def _wide_outside(program: Program, narrow: int, regions: Sequence[RegionInside]) -> int:
    """Bytes of the wide values that no region makes."""
    held = _held(program, regions)
    outside = (p for p, is_live in enumerate(program.live()) if is_live and p not in held)
    made = (nbytes(v.aval) for p in outside for v in program.eqns[p].outvars)
    return sum(size for size in made if size > narrow)


@dataclasses.dataclass(frozen=True)
class _RegionSearch:
    """The arguments of `regions_within`."""

    narrow: int
    around_loops: bool
    devices: int

    def within(
        self,
        program: Program,
        split: SplitValues | None,
        path: tuple[int, ...],
        ends: Sequence[int],
        perturbed: Sequence[int],
    ) -> Iterator[RegionInside]:
        inputs, results = program.jaxpr.invars, program.jaxpr.outvars
        active = active_variables(program, [inputs[i] for i in perturbed],
                                  [results[i] for i in ends])  # fmt: skip
        loops = {}
        for k, p in enumerate(program.steps):
            eqn, inside = program.eqns[p], (*path, k)
            if primitive_name(eqn) == "scan":
                loops[p] = self._in_loop(eqn, split, inside, active)
            elif primitive_name(eqn) == "shard_map":
                of_part = differentiated_results(program, p, [results[i] for i in ends])
                loops[p] = self._in_shard_map(eqn, of_part, inside, active)
        apart = () if self.around_loops else [p for p, inside in loops.items() if inside]
        held: set[int] = set()
        if self.devices == 1 or split is not None:  # else slices might be cut across devices
            devices = _Devices(program, split, self.devices)
            narrow = self.narrow * self.devices
            of_part = [devices.part.jaxpr.outvars[i] for i in ends]
            by = [devices.part.jaxpr.invars[i] for i in perturbed]
            for region in wide_regions(
                devices.part, narrow, apart, devices.lies_across, of_part, by
            ):
                found = devices.placed(region, path)
                if found is not None:
                    yield found
                    held.update(region.equations)
        for p, inside in loops.items():
            if p not in held:
                yield from inside

    def _in_loop(
        self, eqn: Any, split: SplitValues | None, path: tuple[int, ...], active: Set[Any]
    ) -> list[RegionInside]:
        body = form_of(inlined_program(inner_program(eqn)), None)
        consts, carried = loop_parts(eqn)
        is_active = [is_variable(x) and x in active for x in eqn.invars]
        for i in range(carried):
            is_active[consts + i] |= eqn.outvars[i] in active
        perturbed = [i for i, flag in enumerate(is_active) if flag]
        ends = range(len(body.jaxpr.outvars))
        return list(self.within(body, split and split.inside(eqn, body), path, ends, perturbed))

    def _in_shard_map(
        self, eqn: Any, ends: Sequence[int], path: tuple[int, ...], active: Set[Any]
    ) -> list[RegionInside]:
        if not is_manual(eqn):
            return []
        search = dataclasses.replace(self, devices=1)
        perturbed = [i for i, x in enumerate(eqn.invars) if is_variable(x) and x in active]

        def found(jaxpr: Any) -> list[RegionInside]:
            program = form_of(inlined_program(jaxpr), None)
            return list(search.within(program, None, path, ends, perturbed))

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
    devices = _Devices(*_in_form(program, split, [0]), 1)
    loss = devices.part.jaxpr.outvars[:1]
    by = [devices.part.jaxpr.invars[i] for i in perturbed]
    region = region_of_widest(devices.part, narrow, devices.lies_across, loss, by)
    return None if region is None else devices.placed(region, ())


def _in_form(
    program: Program, split: SplitValues | None, ends: Sequence[int]
) -> tuple[Program, SplitValues | None]:
    new = form_of(program, ends)
    return new, split if split is None or new is program else split.of_program(new)


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


def chunks_of(
    program: Program,
    region: Region,
    count: int,
    path: tuple[int, ...],
    parts: Sequence[PartsOf] = (),
) -> Chunks:
    """Return a region of a program in so many chunks.

    Args:
        program: The program.
        region: The region.
        count: How many chunks, see `sizes`.
        path: The loops around the program.
        parts: How devices split it.
    """
    wide: Any = region.wide
    inputs = region_alone(region.slices, region.results)[0].jaxpr.invars
    shards = tuple(
        Shards(
            each.names,
            each.parts,
            tuple((*_place(program, inputs[i]), at) for i, at in each.axes.items()),
            tuple(
                SplitAxis((*_place(program, inputs[i]), at), names)
                for i, split in each.split.items()
                for at, names in enumerate(split)
                if names and not path  # in a loop XLA would exchange what it carries
            ),
        )
        for each in parts
    )
    chunks = Chunks(
        path,
        region.equations,
        tuple((*_place(program, v), axis) for v, axis in region.inputs.items()),
        count,
        shape_of(wide),
        str(wide.aval.dtype),
        label(program.eqns[program.producer[wide]]),
        nbytes(wide.aval),
        shards=shards,
    )
    return without_casts(program, chunks)


def _place(program: Program, v: Any) -> tuple[int, int]:
    p = program.producer[v]
    made = program.jaxpr.invars if p == INPUT else program.eqns[p].outvars
    return p + 1, list(made).index(v)
