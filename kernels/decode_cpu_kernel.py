"""The loops of decoding on the CPU, compiled by Numba: imported where they are needed only, and slow to import.

A block of tokens has three passes: products of all heads' queries with the keys, weights, and the sum of the values.
The first and the last are bound by memory and written in vectors of 16 (`_dots`, `_weigh`), which LLVM cuts down to
what the machine has: four tokens and four query rows make 16 sums that stay in registers, so that a key or value is
loaded once for four rows, and a query once for four tokens. In all passes tokens come before heads, because that is
the order in which pages lie in memory; what comes next is fetched ahead, as the processor cannot know the next page.

All that computes is in one file, as Numba's cache on disk looks at no other one; a `Job` is part of a function's type.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

from hicache.kernels.decode_job import Job

LANES: Final = 16
"""Elements that are computed together; heads are a multiple of it."""
_NUM_TOKENS = _NUM_ROWS = 4

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


def _addresses(builder: ir.IRBuilder, table: ir.Value, offset: ir.Value) -> list[ir.Value]:
    """Those of four tokens, each moved by `offset`."""
    pointer = builder.inttoptr(table, _INT64.as_pointer())
    loaded = [builder.load(builder.gep(pointer, [_INT64(i)])) for i in range(_NUM_TOKENS)]
    return [builder.add(address, offset) for address in loaded]


def _load_tokens(
    builder: ir.IRBuilder, addresses: list[ir.Value], ahead: list[ir.Value], i: ir.Value, stored: Any
) -> list[ir.Value]:
    """Sixteen elements, number `i`, of each of four tokens; those of the four that are `ahead` are asked for."""
    num_bytes, load = _STORED[stored]
    offset = builder.mul(i, _INT64(num_bytes * LANES))
    for address in ahead:
        _fetch_ahead(builder, _at(builder, address, offset))
    return [load(builder, _at(builder, address, offset)) for address in addresses]


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _dots(
    context: Any,
    stored: Any,
    query: Any,
    table: Any,
    offset: Any,
    ahead: Any,
    ahead_offset: Any,
    num_vectors: Any,
    output: Any,
) -> tuple[Any, Any]:
    """Products of four query rows and four keys, to 16 numbers at `output`: those of row 0 first. At `table` are the
    addresses of four tokens, to be moved by the offset, and at `ahead` those of what to fetch ahead."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        _, query, table, offset, ahead, ahead_offset, num_vectors, output = arguments
        addresses = _addresses(builder, table, offset)
        following = _addresses(builder, ahead, ahead_offset)

        def body(i: ir.Value, sums: Sequence[ir.Value]) -> list[ir.Value]:
            keys = _load_tokens(builder, addresses, following, i, stored)
            added = []
            for row in range(_NUM_ROWS):
                at = _at(builder, query, builder.mul(i, _INT64(_NUM_ROWS * _BYTES)), _INT64(row * _BYTES))
                elements = _load_floats(builder, at)
                added += [
                    _fused(builder, elements, key, sums[row * _NUM_TOKENS + token]) for token, key in enumerate(keys)
                ]
            return added

        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = list(_loop(builder, num_vectors, [zero] * (_NUM_ROWS * _NUM_TOKENS), body))
        run = LANES
        while len(sums) > 1:
            sums = [_folded(builder, sums[i], sums[i + 1], run) for i in range(0, len(sums), 2)]
            run //= 2
        _store(builder, sums[0], output)
        return target.get_dummy_value()

    return types.void(stored, *[types.int64] * 7), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _weigh(
    context: Any,
    stored: Any,
    total: Any,
    table: Any,
    offset: Any,
    ahead: Any,
    ahead_offset: Any,
    num_vectors: Any,
    weights: Any,
) -> tuple[Any, Any]:
    """Add four values, by the 16 weights at `weights`, to four rows at `total`; otherwise as `_dots`."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        _, total, table, offset, ahead, ahead_offset, num_vectors, weights = arguments
        addresses = _addresses(builder, table, offset)
        following = _addresses(builder, ahead, ahead_offset)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        spread = []
        for i in range(_NUM_ROWS * _NUM_TOKENS):
            at = builder.inttoptr(_at(builder, weights, _INT64(4 * i)), _FLOAT.as_pointer())
            first = builder.insert_element(undefined, builder.load(at), _INT32(0))
            spread.append(builder.shuffle_vector(first, undefined, everywhere))

        def body(i: ir.Value, carried: Sequence[ir.Value]) -> Sequence[ir.Value]:
            values = _load_tokens(builder, addresses, following, i, stored)
            for row in range(_NUM_ROWS):
                at = _at(builder, total, builder.mul(i, _INT64(_NUM_ROWS * _BYTES)), _INT64(row * _BYTES))
                added = _load_floats(builder, at)
                for token, value in enumerate(values):
                    added = _fused(builder, spread[row * _NUM_TOKENS + token], value, added)
                _store(builder, added, at)
            return carried

        _loop(builder, num_vectors, [], body)
        return target.get_dummy_value()

    return types.void(stored, *[types.int64] * 7), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _as_float(context: Any, bits: Any) -> tuple[Any, Any]:
    """The float32 that has these bits."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


# ---- the passes

_F = np.float32
_MINUS_INFINITY: Final = _F(-np.inf)


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


@njit(fastmath=_FAST_MATH, error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _attend(stored: Any, job: Any, run: Any) -> None:
    """Take the tokens of one run into its state."""
    num_heads, blocks_a_head, num_vectors = job.num_heads, job.blocks_a_head, job.num_vectors
    num_blocks, most = num_heads * blocks_a_head, job.tokens_at_once
    block_bytes = _NUM_ROWS * _BYTES * num_vectors
    total_at = job.total_at + run * num_blocks * block_bytes
    scores_at = job.scores_at + run * num_blocks * (most // 4) * _BYTES
    addresses_at = job.addresses_at + run * (most + 4) * 8
    state_at = run * num_blocks * _NUM_ROWS * 4
    tops = carray(_pointer(job.tops_at + state_at, _F(0)), num_blocks * _NUM_ROWS)
    sums = carray(_pointer(job.sums_at + state_at, _F(0)), num_blocks * _NUM_ROWS)
    total = carray(_pointer(total_at, _F(0)), (num_blocks, num_vectors, _NUM_ROWS, LANES))
    scores = carray(_pointer(scores_at, _F(0)), (num_blocks, most // 4, 16))
    addresses = carray(_pointer(addresses_at, np.int64(0)), most + 4)
    table = carray(_pointer(job.table_at, np.int32(0)), 1 + (job.last - 1) // job.page_size)
    greatest = np.empty(16, np.float32)
    added = np.empty(16, np.float32)
    lead = job.heads_ahead
    start = job.first + (job.last - job.first) * run // job.num_runs
    last = job.first + (job.last - job.first) * (run + 1) // job.num_runs
    while start < last:
        count = min(most, last - start)
        fours = (count + 3) // 4
        # Behind the block's own tokens: those that follow, only to be fetched ahead.
        for i in range(4 * fours + 4):
            token = min(start + i, last - 1)
            slot = np.int64(table[token // job.page_size])
            addresses[i] = job.pages_at + slot * job.slot_stride + (token % job.page_size) * job.token_stride
        for four in range(fours):
            for head in range(num_heads):
                ahead_at, ahead = addresses_at + 32 * four, head + lead
                if ahead >= num_heads:
                    ahead_at, ahead = ahead_at + 32, ahead - num_heads
                for block in range(head * blocks_a_head, (head + 1) * blocks_a_head):
                    _dots(
                        stored, job.query_at + block * block_bytes,
                        addresses_at + 32 * four, head * job.head_stride, ahead_at, ahead * job.head_stride,
                        num_vectors, scores_at + 64 * (block * (most // 4) + four),
                    )  # fmt: skip
        if job.cap > _F(0.0):
            for block in range(num_heads * blocks_a_head):
                for four in range(fours):
                    for i in range(16):
                        scores[block, four, i] = job.cap * np.tanh(scores[block, four, i])
        for block in range(num_heads * blocks_a_head):
            for token in range(count, 4 * fours):
                for row in range(4):
                    scores[block, fours - 1, 4 * row + token % 4] = _MINUS_INFINITY
            for i in range(16):
                greatest[i] = scores[block, 0, i]
            for four in range(1, fours):
                for i in range(16):
                    greatest[i] = max(greatest[i], scores[block, four, i])
            for row in range(4):
                at = 4 * block + row
                top = max(greatest[4 * row], greatest[4 * row + 1], greatest[4 * row + 2], greatest[4 * row + 3])
                if top > tops[at]:
                    if sums[at] != _F(0.0):
                        factor = _exp2(tops[at] - top)
                        sums[at] *= factor
                        for vector in range(num_vectors):
                            for i in range(LANES):
                                total[block, vector, row, i] *= factor
                    tops[at] = top
                for token in range(4):
                    greatest[4 * row + token] = tops[at]
            for i in range(16):
                added[i] = _F(0.0)
            for four in range(fours):
                for i in range(16):
                    weight = _exp2(scores[block, four, i] - greatest[i])
                    added[i] += weight
                    scores[block, four, i] = weight
            for row in range(4):
                sums[4 * block + row] += (added[4 * row] + added[4 * row + 1]) + (
                    added[4 * row + 2] + added[4 * row + 3]
                )
            for token in range(count, 4 * fours):
                for row in range(4):
                    scores[block, fours - 1, 4 * row + token % 4] = _F(0.0)
        for four in range(fours):
            for head in range(num_heads):
                ahead_at, ahead = addresses_at + 32 * four, head + lead
                if ahead >= num_heads:
                    ahead_at, ahead = ahead_at + 32, ahead - num_heads
                for block in range(head * blocks_a_head, (head + 1) * blocks_a_head):
                    _weigh(
                        stored, total_at + block * block_bytes,
                        addresses_at + 32 * four, head * job.head_stride + job.plane_stride,
                        ahead_at, ahead * job.head_stride + job.plane_stride,
                        num_vectors, scores_at + 64 * (block * (most // 4) + four),
                    )  # fmt: skip
        start += count


def compiled(number: Any) -> Any:
    """A function of C, at `address` while this object is kept, that takes the address of a `Job` with pages of the type
    that `number` stands for (`_STORED`), and works on runs until none is left. Several threads may do so at once."""

    def attend(jobs: Any) -> None:
        job = carray(jobs, 1)[0]
        run = _counted(jobs)
        while run < job.num_runs:
            _attend(number, job, run)
            run = _counted(jobs)

    job = types.CPointer(from_dtype(np.dtype(Job)))
    try:
        return cfunc(types.void(job), cache=True)(attend)
    except RuntimeError:
        # Neither the folder of this file nor the user's own can be written to.
        return cfunc(types.void(job))(attend)
