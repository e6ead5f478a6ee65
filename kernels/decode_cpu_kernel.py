"""The loops of decoding on the CPU, compiled by Numba: imported where they are needed only, and slow to import.

A block of tokens has three passes: products of all heads' queries with the keys, weights, and the sum of the values.
The first and the last are bound by memory and written in vectors of 16 (`_dots`, `_weigh`), which LLVM cuts down to
what the machine has. They go through memory in its own order, one token after the other (two in half precision), so
that the processor's prefetching follows, with four query rows for each key or value that is loaded. What comes next is
asked for too, as the processor cannot know the next page: twice, because it drops requests when it has many.

All that computes is in one file, as Numba's cache on disk looks at no other one; a `Job` is part of a function's type.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

from hicache.kernels.decode_job import Job

LANES: Final = 16
"""Elements that are computed together; heads are a multiple of it."""
_NUM_ROWS: Final = 4
_LEAD: Final = 64
"""Tokens that are looked at ahead, at most."""

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_BYTES: Final = 4 * LANES
"""Of a vector."""

# Reassociation and fused operations round differently, not worse. NaN and infinity keep their meaning.
_FAST_MATH: Final = {"reassoc", "contract", "nsz"}

# ---- vectors of 16, in LLVM's own language


def _at(builder: ir.IRBuilder, address: ir.Value, *offsets: ir.Value) -> ir.Value:
    for offset in offsets:
        address = builder.add(address, offset)
    return address


def _load(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, align: int) -> ir.Value:
    vector = ir.VectorType(element, LANES)
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=align)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, _VECTOR.as_pointer()), align=4)


def _load_floats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return _load(builder, address, _FLOAT, 4)


def _load_halves(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.fpext(_load(builder, address, ir.HalfType(), 2), _VECTOR)


def _load_bfloats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """bfloat16 is the upper half of a float32."""
    words = ir.VectorType(_INT32, LANES)
    wide = builder.zext(_load(builder, address, ir.IntType(16), 2), words)
    return builder.bitcast(builder.shl(wide, ir.Constant(words, [16] * LANES)), _VECTOR)


_STORED: Final[dict[Any, tuple[int, Callable[[ir.IRBuilder, ir.Value], ir.Value]]]] = {
    types.float32: (4, _load_floats),
    types.int16: (2, _load_halves),
    types.uint16: (2, _load_bfloats),
}
"""By the type that stands for a stored one: bytes of an element, and how sixteen of them are loaded."""
_AT_ONCE: Final[dict[Any, int]] = {types.float32: 1, types.int16: 2, types.uint16: 2}
"""Tokens that are computed with together. One is the order of memory; in half precision, where there is twice as much
to compute for every byte, queries and sums are loaded for two."""


def _called(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def _fused(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """`x * y + z`, rounded once."""
    return _called(builder, f"llvm.fma.v{LANES}f32", _VECTOR, x, y, z)


def _fetch_ahead(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line of an address that need not be one, to be used once."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    _called(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _INT32(0), _INT32(0), _INT32(1))


def _loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    carried: Sequence[ir.Value],
    body: Callable[[ir.Value, Sequence[ir.Value]], Sequence[ir.Value]],
) -> Sequence[ir.Value]:
    """`for i in range(count): carried = body(i, carried)`, for a count of at least 1."""
    before = builder.block
    head, end = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_INT64)
    index.add_incoming(_INT64(0), before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    results = body(index, values)
    following = builder.add(index, _INT64(1))
    index.add_incoming(following, builder.block)
    for phi, value in zip(values, results, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), head, end)
    builder.position_at_end(end)
    return results


def _folded(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, run: int) -> ir.Value:
    """Runs of `run` elements of both, x first, each run's second half added to its first."""
    lower = [start + i for start in range(0, 2 * LANES, run) for i in range(run // 2)]
    masks = [ir.Constant(ir.VectorType(_INT32, LANES), [i + shift for i in lower]) for shift in (0, run // 2)]
    halves = [builder.shuffle_vector(x, y, mask) for mask in masks]
    return builder.fadd(*halves)


def _load_tokens(
    builder: ir.IRBuilder, places: Sequence[Sequence[ir.Value]], i: ir.Value, stored: Any
) -> list[ir.Value]:
    """Sixteen elements, number `i`, at each of the first addresses in `places`; those at the others are asked for."""
    num_bytes, load = _STORED[stored]
    offset = builder.mul(i, _INT64(num_bytes * LANES))
    addresses, *ahead = places
    for tokens in ahead:
        # A cache line holds as many vectors as there are tokens: each time one line, of each token in turn.
        token = builder.urem(i, _INT64(len(tokens)))
        address = tokens[0]
        for other in range(1, len(tokens)):
            address = builder.select(builder.icmp_unsigned("==", token, _INT64(other)), tokens[other], address)
        line = builder.udiv(i, _INT64(len(tokens)))
        _fetch_ahead(builder, _at(builder, address, builder.mul(line, _INT64(64))))
    return [load(builder, _at(builder, address, offset)) for address in addresses]


def _places(
    builder: ir.IRBuilder, tables: Sequence[ir.Value], offsets: Sequence[ir.Value], stored: Any
) -> list[list[ir.Value]]:
    """What is at each table, the addresses of the tokens that are computed with together, moved by its offset."""
    places = []
    for table, offset in zip(tables, offsets, strict=True):
        pointer = builder.inttoptr(table, _INT64.as_pointer())
        loaded = [builder.load(builder.gep(pointer, [_INT64(i)])) for i in range(_AT_ONCE[stored])]
        places.append([builder.add(address, offset) for address in loaded])
    return places


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _dots(
    context: Any, stored: Any, query: Any, at: Any, offset: Any, near: Any, near_offset: Any, far: Any, far_offset: Any,
    num_vectors: Any, output: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Products of four query rows and the keys of `_AT_ONCE` tokens, to 16 numbers for each token at `output`: four for
    each row, to be added up. At `at` are the addresses of the tokens, to be moved by the offset, and at `near` and
    `far` those of what to ask for ahead."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        _, query, *tables, num_vectors, output = arguments
        places = _places(builder, tables[::2], tables[1::2], stored)
        num_tokens = len(places[0])

        def body(i: ir.Value, sums: Sequence[ir.Value]) -> list[ir.Value]:
            keys = _load_tokens(builder, places, i, stored)
            added = []
            for row in range(_NUM_ROWS):
                at = _at(builder, query, builder.mul(i, _INT64(_NUM_ROWS * _BYTES)), _INT64(row * _BYTES))
                elements = _load_floats(builder, at)
                added += [_fused(builder, elements, key, sums[row * num_tokens + i]) for i, key in enumerate(keys)]
            return added

        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = list(_loop(builder, num_vectors, [zero] * (_NUM_ROWS * num_tokens), body))
        for token in range(num_tokens):
            rows = sums[token::num_tokens]
            halves = [_folded(builder, rows[i], rows[i + 1], LANES) for i in (0, 2)]
            at = _at(builder, output, _INT64(token * _BYTES))
            _store(builder, _folded(builder, halves[0], halves[1], LANES // 2), at)
        return target.get_dummy_value()

    return types.void(stored, *[types.int64] * 9), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _add_up(context: Any, parts: Any, output: Any) -> tuple[Any, Any]:
    """Add up what `_dots` left of four tokens at `parts`, to 16 numbers at `output`: those of the first token first."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        parts, output = arguments
        tokens = [_load_floats(builder, _at(builder, parts, _INT64(i * _BYTES))) for i in range(4)]
        pairs = [_folded(builder, tokens[i], tokens[i + 1], 4) for i in (0, 2)]
        _store(builder, _folded(builder, pairs[0], pairs[1], 2), output)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _weigh(
    context: Any, stored: Any, total: Any, at: Any, offset: Any, near: Any, near_offset: Any, far: Any, far_offset: Any,
    num_vectors: Any, weights: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Add values, by four weights for each token at `weights`, to four rows at `total`; otherwise as `_dots`."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        _, total, *tables, num_vectors, weights = arguments
        places = _places(builder, tables[::2], tables[1::2], stored)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        spread = []
        for i in range(_NUM_ROWS * len(places[0])):
            at = builder.inttoptr(_at(builder, weights, _INT64(4 * i)), _FLOAT.as_pointer())
            first = builder.insert_element(undefined, builder.load(at), _INT32(0))
            spread.append(builder.shuffle_vector(first, undefined, everywhere))

        def body(i: ir.Value, carried: Sequence[ir.Value]) -> Sequence[ir.Value]:
            values = _load_tokens(builder, places, i, stored)
            for row in range(_NUM_ROWS):
                at = _at(builder, total, builder.mul(i, _INT64(_NUM_ROWS * _BYTES)), _INT64(row * _BYTES))
                added = _load_floats(builder, at)
                for token, value in enumerate(values):
                    added = _fused(builder, spread[token * _NUM_ROWS + row], value, added)
                _store(builder, added, at)
            return carried

        _loop(builder, num_vectors, [], body)
        return target.get_dummy_value()

    return types.void(stored, *[types.int64] * 9), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _as_float(context: Any, bits: Any) -> tuple[Any, Any]:
    """The float32 that has these bits."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


# ---- the passes

_F = np.float32
_MINUS_INFINITY: Final = _F(-np.inf)
_LN_2: Final = math.log(2.0)


@njit(inline="always")  # type: ignore[untyped-decorator]  # Numba has no types
def _exp2(x: Any) -> Any:
    """`2 ** x` for `x` up to 0, within two units of the last place: the Taylor series on half a step to either side.
    0 where it would be subnormal; NaN stays NaN."""
    whole = np.floor(x + _F(0.5))
    rest = (x - whole) * _F(0.6931471805599453)
    series = _F(1 / 5040)
    series = series * rest + _F(1 / 720)
    series = series * rest + _F(1 / 120)
    series = series * rest + _F(1 / 24)
    series = series * rest + _F(1 / 6)
    series = series * rest + _F(0.5)
    series = series * rest + _F(1.0)
    series = series * rest + _F(1.0)
    power = _as_float((np.int32(max(whole, _F(-126.0))) + np.int32(127)) << np.int32(23))
    return _F(0.0) if x < _F(-126.0) else series * power


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _counted(context: Any, job: Any) -> tuple[Any, Any]:
    """Number of the job's next run, which no other thread is given."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        counter = builder.bitcast(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", counter, _INT64(1), "monotonic")

    return types.int64(job), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _pointer(context: Any, address: Any, number: Any) -> tuple[Any, Any]:
    """The address as that of numbers of that type."""
    kind = types.CPointer(number)

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[0], target.get_value_type(kind))

    return kind(types.int64, number), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _at_once(context: Any, stored: Any) -> tuple[Any, Any]:
    """`_AT_ONCE` of what stands for a stored type."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return _INT64(_AT_ONCE[stored])

    return types.int64(stored), generate


@njit(inline="always")  # type: ignore[untyped-decorator]  # Numba has no types
def _state_at(job: Any, run: Any) -> Any:
    """Where the query is, and of a run its total, tops and sums."""
    num_rows = job.num_heads * job.blocks_a_head * _NUM_ROWS
    total_at = job.room_at + num_rows * job.num_vectors * _BYTES + run * job.run_bytes
    tops_at = total_at + num_rows * (job.num_vectors * _BYTES + _BYTES + job.tokens_at_once * 4)
    return job.room_at, total_at, tops_at, tops_at + num_rows * 4


@njit(inline="always")  # type: ignore[untyped-decorator]  # Numba has no types
def _locate(job: Any, table: Any, token: Any, last: Any, addresses: Any) -> None:
    """Write the addresses of the keys of tokens from `token` on; where there are no more before `last`, that of its
    last one."""
    token = min(token, last - 1)
    page, offset = token // job.page_size, token % job.page_size
    for i in range(len(addresses)):
        addresses[i] = job.pages_at + np.int64(table[page]) * job.slot_stride + offset * job.token_stride
        if token < last - 1:
            token += 1
            offset += 1
            if offset == job.page_size:
                page, offset = page + 1, 0


@njit(fastmath=_FAST_MATH, error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _attend(stored: Any, job: Any, run: Any) -> None:
    """Take the tokens of one run into its state."""
    num_heads, blocks_a_head, num_vectors = job.num_heads, job.blocks_a_head, job.num_vectors
    num_blocks, most = num_heads * blocks_a_head, job.tokens_at_once
    at_once, head_stride, plane_stride = _at_once(stored), job.head_stride, job.plane_stride
    near_tokens, near_head = min(job.near // num_heads * at_once, _LEAD - 2 * at_once), job.near % num_heads
    far_tokens, far_head = min(job.far // num_heads * at_once, _LEAD - 2 * at_once), job.far % num_heads
    block_bytes, scores_bytes = _NUM_ROWS * _BYTES * num_vectors, most // 4 * _BYTES
    token_bytes = num_heads * head_stride
    query_at, total_at, tops_at, sums_at = _state_at(job, run)
    parts_at = total_at + num_blocks * block_bytes
    scores_at = parts_at + num_blocks * 4 * _BYTES
    keys_at = sums_at + num_blocks * _NUM_ROWS * 4
    values_at = keys_at + (most + _LEAD) * 8
    tops = carray(_pointer(tops_at, _F(0)), num_blocks * _NUM_ROWS)
    sums = carray(_pointer(sums_at, _F(0)), num_blocks * _NUM_ROWS)
    total = carray(_pointer(total_at, _F(0)), (num_blocks, num_vectors, _NUM_ROWS, LANES))
    scores = carray(_pointer(scores_at, _F(0)), (num_blocks, most // 4, 16))
    keys = carray(_pointer(keys_at, np.int64(0)), most + _LEAD)
    values = carray(_pointer(values_at, np.int64(0)), most + _LEAD)
    table = carray(_pointer(job.table_at, np.int32(0)), 1 + (job.last - 1) // job.page_size)
    greatest = np.empty(16, np.float32)
    added = np.empty(16, np.float32)
    start = job.first + (job.last - job.first) * run // job.num_runs
    last = job.first + (job.last - job.first) * (run + 1) // job.num_runs
    while start < last:
        count = min(most, last - start)
        fours = (count + 3) // 4
        whole = (count + at_once - 1) // at_once * at_once
        # Behind the block's own tokens is what follows, only to be asked for: values after keys, then the next keys.
        _locate(job, table, start, last, keys[:whole])
        for i in range(whole):
            values[i] = keys[i] + plane_stride
        for i in range(_LEAD):
            keys[whole + i] = values[min(i, whole - 1)]
        _locate(job, table, start + count, last, values[whole : whole + _LEAD])
        for first in range(0, whole, at_once):
            near_at, near = keys_at + 8 * (first + near_tokens), near_head * head_stride
            far_at, far = keys_at + 8 * (first + far_tokens), far_head * head_stride
            is_last = first % 4 + at_once == 4 or first + at_once == whole
            for head in range(num_heads):
                for block in range(head * blocks_a_head, (head + 1) * blocks_a_head):
                    products_at = parts_at + 4 * block * _BYTES
                    _dots(
                        stored, query_at + block * block_bytes, keys_at + 8 * first, head * head_stride,
                        near_at, near, far_at, far, num_vectors, products_at + first % 4 * _BYTES,
                    )  # fmt: skip
                    if is_last:
                        _add_up(products_at, scores_at + block * scores_bytes + first // 4 * _BYTES)
                near, far = near + head_stride, far + head_stride
                if near == token_bytes:
                    near_at, near = near_at + 8 * at_once, 0
                if far == token_bytes:
                    far_at, far = far_at + 8 * at_once, 0
        if job.cap > _F(0.0):
            for block in range(num_blocks):
                for four in range(fours):
                    for i in range(16):
                        scores[block, four, i] = job.cap * np.tanh(scores[block, four, i])
        for block in range(num_blocks):
            for i in range(4 * (count + 4 - 4 * fours), 16):
                scores[block, fours - 1, i] = _MINUS_INFINITY
            for i in range(16):
                greatest[i] = scores[block, 0, i]
            for four in range(1, fours):
                for i in range(16):
                    greatest[i] = max(greatest[i], scores[block, four, i])
            for row in range(4):
                at = 4 * block + row
                top = max(greatest[row], greatest[4 + row], greatest[8 + row], greatest[12 + row])
                if top > tops[at]:
                    if sums[at] != _F(0.0):
                        factor = _exp2(tops[at] - top)
                        sums[at] *= factor
                        for vector in range(num_vectors):
                            for i in range(LANES):
                                total[block, vector, row, i] *= factor
                    tops[at] = top
                for token in range(4):
                    greatest[4 * token + row] = tops[at]
            for i in range(16):
                added[i] = _F(0.0)
            for four in range(fours):
                for i in range(16):
                    weight = _exp2(scores[block, four, i] - greatest[i])
                    added[i] += weight
                    scores[block, four, i] = weight
            for row in range(4):
                sums[4 * block + row] += (added[row] + added[4 + row]) + (added[8 + row] + added[12 + row])
            for i in range(4 * (count + 4 - 4 * fours), 16):
                scores[block, fours - 1, i] = _F(0.0)
        for first in range(0, whole, at_once):
            near_at, near = values_at + 8 * (first + near_tokens), near_head * head_stride
            far_at, far = values_at + 8 * (first + far_tokens), far_head * head_stride
            for head in range(num_heads):
                for block in range(head * blocks_a_head, (head + 1) * blocks_a_head):
                    weights_at = scores_at + block * scores_bytes + first // 4 * _BYTES + first % 4 * 16
                    _weigh(
                        stored, total_at + block * block_bytes, values_at + 8 * first, head * head_stride,
                        near_at, near, far_at, far, num_vectors, weights_at,
                    )  # fmt: skip
                near, far = near + head_stride, far + head_stride
                if near == token_bytes:
                    near_at, near = near_at + 8 * at_once, 0
                if far == token_bytes:
                    far_at, far = far_at + 8 * at_once, 0
        start += count


def _begin(jobs: Any) -> None:
    """Take over the query, and begin the states of all runs."""
    job = carray(jobs, 1)[0]
    num_blocks, num_vectors = job.num_heads * job.blocks_a_head, job.num_vectors
    query_at, _, _, _ = _state_at(job, 0)
    rows = carray(_pointer(query_at, _F(0)), (num_blocks, num_vectors, _NUM_ROWS, LANES))
    for head in range(job.num_heads):
        for row in range(job.blocks_a_head * _NUM_ROWS):
            block = head * job.blocks_a_head + row // _NUM_ROWS
            # Rows that fill up a group are those of its last.
            place = job.query_at + (head * job.group + min(row, job.group - 1)) * job.query_stride
            source = carray(_pointer(place, _F(0)), (num_vectors, LANES))
            for vector in range(num_vectors):
                for i in range(LANES):
                    rows[block, vector, row % _NUM_ROWS, i] = source[vector, i] * job.scale
    for run in range(job.most_runs):
        _, total_at, tops_at, sums_at = _state_at(job, run)
        total = carray(_pointer(total_at, _F(0)), num_blocks * num_vectors * _NUM_ROWS * LANES)
        tops = carray(_pointer(tops_at, _F(0)), num_blocks * _NUM_ROWS)
        sums = carray(_pointer(sums_at, _F(0)), num_blocks * _NUM_ROWS)
        total[:], tops[:], sums[:] = _F(0.0), _MINUS_INFINITY, _F(0.0)


def _end(jobs: Any) -> None:
    """Merge the states of all runs, in their order, and write what comes out."""
    job = carray(jobs, 1)[0]
    num_blocks, num_vectors = job.num_heads * job.blocks_a_head, job.num_vectors
    output = carray(_pointer(job.output_at, _F(0)), (job.num_heads * job.group, num_vectors, LANES))
    lse = carray(_pointer(job.lse_at, _F(0)), job.num_heads * job.group)
    for query_head in range(job.num_heads * job.group):
        head, row = query_head // job.group, query_head % job.group
        block = head * job.blocks_a_head + row // _NUM_ROWS
        at, row = block * _NUM_ROWS + row % _NUM_ROWS, row % _NUM_ROWS
        top = _MINUS_INFINITY
        for run in range(job.most_runs):
            _, _, tops_at, _ = _state_at(job, run)
            top = max(top, carray(_pointer(tops_at, _F(0)), num_blocks * _NUM_ROWS)[at])
        whole = 0.0
        for vector in range(num_vectors):
            for i in range(LANES):
                output[query_head, vector, i] = _F(0.0)
        for run in range(job.most_runs):
            _, total_at, tops_at, sums_at = _state_at(job, run)
            # In float64: rounded once, as a sum of two numbers in other units would not be.
            weight = math.exp((np.float64(carray(_pointer(tops_at, _F(0)), num_blocks * _NUM_ROWS)[at]) - top) * _LN_2)
            total = carray(_pointer(total_at, _F(0)), (num_blocks, num_vectors, _NUM_ROWS, LANES))
            whole += weight * carray(_pointer(sums_at, _F(0)), num_blocks * _NUM_ROWS)[at]
            factor = _F(weight)
            for vector in range(num_vectors):
                for i in range(LANES):
                    output[query_head, vector, i] += factor * total[block, vector, row, i]
        part = _F(1.0 / whole)
        for vector in range(num_vectors):
            for i in range(LANES):
                output[query_head, vector, i] *= part
        lse[query_head] = math.log(whole) + top * _LN_2


def compiled(number: Any) -> Any:
    """A function of C, at `address` while this object is kept, that takes the address of a `Job` with pages of the type
    that `number` stands for (`_STORED`), and works on runs until none is left. Several threads may do so at once."""

    def attend(jobs: Any) -> None:
        job = carray(jobs, 1)[0]
        run = _counted(jobs)
        while run < job.num_runs:
            _attend(number, job, run)
            run = _counted(jobs)

    return _function(attend)


def compiled_ends() -> tuple[Any, Any]:
    """Functions likewise, for one thread: to be called before the others, and when they are done."""
    return _function(_begin), _function(_end)


def _function(work: Callable[[Any], None]) -> Any:
    job = types.CPointer(from_dtype(np.dtype(Job)))
    try:
        return cfunc(types.void(job), cache=True, error_model="numpy", fastmath=_FAST_MATH)(work)
    except RuntimeError:
        # Neither the folder of this file nor the user's own can be written to.
        return cfunc(types.void(job), error_model="numpy", fastmath=_FAST_MATH)(work)
