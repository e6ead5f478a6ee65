"""The loops of decoding on the CPU, compiled by Numba: imported where they are needed only, and slow to import.

A block of tokens has three passes: products of all heads' queries with the keys, weights, and the sum of the values.
The first and the last are bound by memory and written in vectors of 16 (`_dots`, `_weigh`), which LLVM cuts down to
what the machine has: two tokens at a time, in half precision four, and four query rows. What comes next is asked for,
as the processor cannot know the next page: byte by byte in the order of memory, which its own prefetching then follows,
and again and again, because it drops requests when it has many.

All that computes is in one file, as Numba's cache on disk looks at no other one; a `Job` is part of a function's type.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

from hicache.kernels.decode_job import Job, Segment

LANES: Final = 16
"""Elements that are computed together; heads are a multiple of it."""
_NUM_ROWS: Final = 4
_LEAD: Final = 64
"""Tokens that are looked at ahead, at most."""
_LATELY: Final = 64
"""Addresses asked for last that are kept, a power of two."""

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
_AT_ONCE: Final[dict[Any, int]] = {types.float32: 2, types.int16: 4, types.uint16: 4}
"""Tokens that are computed with together, 2 or 4: enough that queries and sums are seldom loaded, and few enough that
what is asked for ahead stays small."""
_AHEAD: Final = types.UniTuple(types.int64, 4)
"""Addresses at which something is asked for, the first time and again."""
_LINE: Final = 64
"""Bytes of a cache line."""
_SMALL_PAGE: Final = 4096
"""Bytes whose addresses a processor looks up at once, at least."""


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
    # Nothing is moved across: what is asked for ahead would be bunched up, and be too much at once.
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
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


def _addresses(builder: ir.IRBuilder, table: ir.Value, offset: ir.Value, stored: Any) -> list[ir.Value]:
    """Those of the tokens that are computed with together, each moved by `offset`."""
    pointer = builder.inttoptr(table, _INT64.as_pointer())
    loaded = [builder.load(builder.gep(pointer, [_INT64(i)])) for i in range(_AT_ONCE[stored])]
    return [builder.add(address, offset) for address in loaded]


def _load_tokens(
    builder: ir.IRBuilder, addresses: Sequence[ir.Value], ahead: Sequence[ir.Value], i: ir.Value, stored: Any
) -> list[ir.Value]:
    """Sixteen elements, number `i`, of each token; as many bytes at each address that is `ahead` are asked for."""
    num_bytes, load = _STORED[stored]
    offset = builder.mul(i, _INT64(num_bytes * LANES))
    together = num_bytes * LANES * len(addresses)
    for address in ahead:
        for line in range(0, together, _LINE):
            _fetch_ahead(builder, _at(builder, address, builder.mul(i, _INT64(together)), _INT64(line)))
    return [load(builder, _at(builder, address, offset)) for address in addresses]


def _each(builder: ir.IRBuilder, addresses: ir.Value) -> list[ir.Value]:
    return [builder.extract_value(addresses, i) for i in range(len(_AHEAD))]


def _all_folded(builder: ir.IRBuilder, sums: Sequence[ir.Value], run: int = LANES) -> ir.Value:
    """Sums of 16, the second half of whose runs was added to the first until they are one: those of the first first."""
    while len(sums) > 1:
        sums = [_folded(builder, sums[i], sums[i + 1], run) for i in range(0, len(sums), 2)]
        run //= 2
    return sums[0]


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _ask(context: Any, stored: Any, table: Any, offset: Any) -> tuple[Any, Any]:
    """Ask for one line of each of `_AT_ONCE` tokens, whose addresses are at `table`, `offset` behind them."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        _, table, offset = arguments
        for address in _addresses(builder, table, offset, stored):
            _fetch_ahead(builder, address)
        return target.get_dummy_value()

    return types.void(stored, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _dots(
    context: Any,
    stored: Any,
    query: Any,
    table: Any,
    offset: Any,
    ahead: Any,
    num_vectors: Any,
    output: Any,
) -> tuple[Any, Any]:
    """Products of the keys of some tokens and four query rows, to 16 numbers at `output`, in order of tokens: of four
    tokens, or two for each row and of two tokens, to be added up. At `table` are the addresses of `_AT_ONCE` tokens, to
    be moved by the offset; as much as they have is asked for at each address that is `ahead`."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        _, query, table, offset, ahead, num_vectors, output = arguments
        addresses = _addresses(builder, table, offset, stored)

        def body(i: ir.Value, sums: Sequence[ir.Value]) -> list[ir.Value]:
            keys = _load_tokens(builder, addresses, _each(builder, ahead), i, stored)
            rows = []
            for row in range(_NUM_ROWS):
                at = _at(builder, query, builder.mul(i, _INT64(_NUM_ROWS * _BYTES)), _INT64(row * _BYTES))
                rows.append(_load_floats(builder, at))
            pairs = [(key, row) for key in keys for row in rows]
            return [_fused(builder, row, key, added) for (key, row), added in zip(pairs, sums, strict=True)]

        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = _loop(builder, num_vectors, [zero] * (_NUM_ROWS * len(addresses)), body)
        _store(builder, _all_folded(builder, sums), output)
        return target.get_dummy_value()

    return types.void(stored, *[types.int64] * 3, _AHEAD, *[types.int64] * 2), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _add_up(context: Any, pairs: Any, output: Any) -> tuple[Any, Any]:
    """Add up what `_dots` left of two tokens and, behind them, of the next two at `pairs`: 16 numbers at `output`."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        pairs, output = arguments
        both = [_load_floats(builder, _at(builder, pairs, _INT64(i * _BYTES))) for i in range(2)]
        _store(builder, _all_folded(builder, both, 2), output)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _weigh(
    context: Any,
    stored: Any,
    total: Any,
    table: Any,
    offset: Any,
    ahead: Any,
    num_vectors: Any,
    weights: Any,
) -> tuple[Any, Any]:
    """Add the values of some tokens, by four weights for each at `weights`, to four rows at `total`; otherwise as
    `_dots`."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        _, total, table, offset, ahead, num_vectors, weights = arguments
        addresses = _addresses(builder, table, offset, stored)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        spread = []
        for i in range(_NUM_ROWS * len(addresses)):
            at = builder.inttoptr(_at(builder, weights, _INT64(4 * i)), _FLOAT.as_pointer())
            first = builder.insert_element(undefined, builder.load(at), _INT32(0))
            spread.append(builder.shuffle_vector(first, undefined, everywhere))

        def body(i: ir.Value, carried: Sequence[ir.Value]) -> Sequence[ir.Value]:
            values = _load_tokens(builder, addresses, _each(builder, ahead), i, stored)
            for row in range(_NUM_ROWS):
                at = _at(builder, total, builder.mul(i, _INT64(_NUM_ROWS * _BYTES)), _INT64(row * _BYTES))
                added = _load_floats(builder, at)
                for token, value in enumerate(values):
                    added = _fused(builder, spread[token * _NUM_ROWS + row], value, added)
                _store(builder, added, at)
            return carried

        _loop(builder, num_vectors, [], body)
        return target.get_dummy_value()

    return types.void(stored, *[types.int64] * 3, _AHEAD, *[types.int64] * 2), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _add_row(context: Any, total: Any, factor: Any, output: Any, num_vectors: Any) -> tuple[Any, Any]:
    """Add a row of a total, from its first vector at `total` on, times a float32, to what is at `output`."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        total, factor, output, num_vectors = arguments
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        spread = builder.shuffle_vector(builder.insert_element(undefined, factor, _INT32(0)), undefined, everywhere)

        def body(i: ir.Value, carried: Sequence[ir.Value]) -> Sequence[ir.Value]:
            to = _at(builder, output, builder.mul(i, _INT64(_BYTES)))
            row = _load_floats(builder, _at(builder, total, builder.mul(i, _INT64(_NUM_ROWS * _BYTES))))
            _store(builder, _fused(builder, spread, row, _load_floats(builder, to)), to)
            return carried

        _loop(builder, num_vectors, [], body)
        return target.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), generate


def _constant(number: float) -> ir.Value:
    return ir.Constant(_VECTOR, [number] * LANES)


def _exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """`2 ** x` for `x` up to 0, within two units of the last place: the Taylor series on half a step to either side.
    0 where it would be subnormal; NaN stays NaN."""
    least, words = _constant(-126.0), ir.VectorType(_INT32, LANES)
    whole = _called(builder, f"llvm.rint.v{LANES}f32", _VECTOR, x)
    rest = builder.fmul(builder.fsub(x, whole), _constant(0.6931471805599453))
    series = _constant(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        series = _fused(builder, series, rest, _constant(factor))
    is_normal = builder.fcmp_ordered(">=", x, least)
    exponent = builder.fptosi(builder.select(is_normal, whole, least), words)
    power = builder.shl(builder.add(exponent, ir.Constant(words, [127] * LANES)), ir.Constant(words, [23] * LANES))
    value = builder.fmul(series, builder.bitcast(power, _VECTOR))
    return builder.select(builder.fcmp_ordered("<", x, least), _constant(0.0), value)


def _greater(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The greater of both; `y` where `x` is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _of_rows(
    builder: ir.IRBuilder, vector: ir.Value, both: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Of 16 numbers, four for each of four tokens, what `both` makes of those of all tokens, in place of each."""
    for distance in (8, 4):
        mask = ir.Constant(ir.VectorType(_INT32, LANES), [(i + distance) % LANES for i in range(LANES)])
        vector = both(builder, builder.shuffle_vector(vector, vector, mask), vector)
    return vector


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _to_weights(
    context: Any, scores: Any, fours: Any, tops: Any, sums: Any, total: Any, num_vectors: Any
) -> tuple[Any, Any]:
    """Make weights of the scores of four rows and `fours` times four tokens, relative to the greatest so far, and take
    them into the state: the four tops and sums, and the total, which becomes relative to the tops."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        scores, fours, tops, sums, total, num_vectors = arguments
        four = ir.VectorType(_FLOAT, _NUM_ROWS)
        by_row = ir.Constant(ir.VectorType(_INT32, LANES), [i % _NUM_ROWS for i in range(LANES)])
        first = ir.Constant(ir.VectorType(_INT32, _NUM_ROWS), list(range(_NUM_ROWS)))
        tops_at, sums_at = (builder.inttoptr(address, four.as_pointer()) for address in (tops, sums))
        before, added_before = (
            builder.shuffle_vector(loaded, loaded, by_row)
            for loaded in (builder.load(address, align=4) for address in (tops_at, sums_at))
        )

        def place(i: ir.Value) -> ir.Value:
            return _at(builder, scores, builder.mul(i, _INT64(_BYTES)))

        def seen(i: ir.Value, greatest: Sequence[ir.Value]) -> Sequence[ir.Value]:
            return [_greater(builder, _load_floats(builder, place(i)), greatest[0])]

        [greatest] = _loop(builder, fours, [before], seen)
        top = _of_rows(builder, greatest, _greater)
        # Not the difference of two that are both -inf.
        is_same = builder.fcmp_ordered("==", before, top)
        factor = builder.select(is_same, _constant(1.0), _exp2(builder, builder.fsub(before, top)))

        def weigh(i: ir.Value, added: Sequence[ir.Value]) -> Sequence[ir.Value]:
            weight = _exp2(builder, builder.fsub(_load_floats(builder, place(i)), top))
            _store(builder, weight, place(i))
            return [builder.fadd(added[0], weight)]

        [added] = _loop(builder, fours, [_constant(0.0)], weigh)
        added = _of_rows(builder, added, ir.IRBuilder.fadd)
        added = builder.fadd(builder.fmul(added_before, factor), added)
        for value, address in ((top, tops_at), (added, sums_at)):
            builder.store(builder.shuffle_vector(value, value, first), address, align=4)

        def rescale(i: ir.Value, carried: Sequence[ir.Value]) -> Sequence[ir.Value]:
            for row in range(_NUM_ROWS):
                mask = ir.Constant(ir.VectorType(_INT32, LANES), [row] * LANES)
                at = _at(builder, total, builder.mul(i, _INT64(_NUM_ROWS * _BYTES)), _INT64(row * _BYTES))
                by = builder.shuffle_vector(factor, factor, mask)
                _store(builder, builder.fmul(_load_floats(builder, at), by), at)
            return carried

        unchanged = builder.bitcast(is_same, ir.IntType(LANES))
        with builder.if_then(builder.icmp_unsigned("!=", unchanged, ir.IntType(LANES)(2**LANES - 1))):
            _loop(builder, num_vectors, [], rescale)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


# ---- the passes

_F = np.float32
_MINUS_INFINITY: Final = _F(-np.inf)
_LN_2: Final = math.log(2.0)


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _counted(context: Any, job: Any, counter: Any) -> tuple[Any, Any]:
    """What the counter, the first of the job's fields being number 0, was before this counted it up; what threads wrote
    before they did is there for those who do so later."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        counter = builder.gep(builder.bitcast(arguments[0], _INT64.as_pointer()), [arguments[1]])
        return builder.atomic_rmw("add", counter, _INT64(1), "acq_rel")

    return types.int64(job, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _pointer(context: Any, address: Any, number: Any) -> tuple[Any, Any]:
    """The address as that of numbers of that type."""
    kind = types.CPointer(number)

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[0], target.get_value_type(kind))

    return kind(types.int64, number), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _segments(context: Any, address: Any) -> tuple[Any, Any]:
    """The address as that of segments."""
    kind = types.CPointer(from_dtype(np.dtype(Segment)))

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[0], target.get_value_type(kind))

    return kind(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _at_once(context: Any, stored: Any) -> tuple[Any, Any]:
    """`_AT_ONCE` of what stands for a stored type."""

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return _INT64(_AT_ONCE[stored])

    return types.int64(stored), generate


@njit(inline="always")  # type: ignore[untyped-decorator]  # Numba has no types
def _integer(address: Any) -> Any:
    return carray(_pointer(address, np.int64(0)), 1)[0]


@njit(inline="always")  # type: ignore[untyped-decorator]  # Numba has no types
def _state_at(job: Any, run: Any) -> Any:
    """Where a run's total, tops and sums are."""
    num_rows = job.num_heads * job.blocks_a_head * _NUM_ROWS
    total_at = job.states_at + run * job.run_bytes
    tops_at = total_at + num_rows * (job.num_vectors * _BYTES + _BYTES // 2 + job.tokens_at_once * 4)
    return total_at, tops_at, tops_at + num_rows * 4


@njit(inline="always")  # type: ignore[untyped-decorator]  # Numba has no types
def _locate(segment: Any, table: Any, token: Any, last: Any, addresses: Any) -> None:
    """Write the addresses of the keys of tokens from `token` on; where there are no more before `last`, that of its
    last one."""
    token = min(token, last - 1)
    page, offset = token // segment.page_size, token % segment.page_size
    for i in range(len(addresses)):
        addresses[i] = segment.pages_at + np.int64(table[page]) * segment.slot_stride + offset * segment.token_stride
        if token < last - 1:
            token += 1
            offset += 1
            if offset == segment.page_size:
                page, offset = page + 1, 0


@njit(inline="always")  # type: ignore[untyped-decorator]  # Numba has no types
def _ahead_of(segment: Any, num_heads: Any, at_once: Any, distance: Any) -> Any:
    """Where `distance` heads of a token lie ahead of the first head of some tokens: tokens from there, and bytes."""
    if segment.head_stride > segment.token_stride:
        steps = distance // at_once
        return min(steps // num_heads * at_once, _LEAD - 2 * at_once), steps % num_heads * segment.head_stride
    return min(distance // num_heads, _LEAD - 2 * at_once), distance % num_heads * segment.head_stride


@njit(fastmath=_FAST_MATH, error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _pass(
    stored: Any, job: Any, segment: Any, is_first: Any, num_tokens: Any, table_at: Any, rows_at: Any, pairs_at: Any,
    scores_at: Any, lately: Any, num_asked: Any,
) -> Any:
    """The first pass over tokens whose addresses are at `table_at`, with the query's rows, or the last, to those of the
    total. `lately`: what was asked for, at `num_asked` counted on from pass to pass, which is returned."""
    num_vectors, blocks_a_head, head_stride = job.num_vectors, job.blocks_a_head, segment.head_stride
    at_once = _at_once(stored)
    block_bytes, scores_bytes = _NUM_ROWS * _BYTES * num_vectors, job.tokens_at_once // 4 * _BYTES
    token_bytes = job.num_heads * head_stride
    far_tokens, far_bytes = _ahead_of(segment, job.num_heads, at_once, job.far)
    again, kept = job.again, _LATELY - 1
    # What is asked for follows the order of memory: heads of one token, or tokens of one head.
    step, following = (head_stride, 8 * at_once) if head_stride > segment.token_stride else (at_once * head_stride, 8)
    for first in range(0, num_tokens, at_once):
        tokens_at = table_at + 8 * first
        if segment.early > 0:
            # So that the processor knows by then where in memory the addresses are: looking it up takes long.
            for offset in range(0, token_bytes, _SMALL_PAGE):
                _ask(stored, tokens_at + 8 * min(segment.early, _LEAD - 2 * at_once), offset)
        far_at, far = tokens_at + 8 * far_tokens, far_bytes
        has_four = first % 4 + at_once == 4 or first + at_once == num_tokens
        for head in range(job.num_heads):
            lately[num_asked & kept], offset = _integer(far_at) + far, head * head_stride
            ahead = (
                lately[num_asked & kept], lately[(num_asked - again) & kept],
                lately[(num_asked - 2 * again) & kept], lately[(num_asked - 3 * again) & kept],
            )  # fmt: skip
            num_asked += 1
            for block in range(head * blocks_a_head, (head + 1) * blocks_a_head):
                rows, four = rows_at + block * block_bytes, scores_at + block * scores_bytes + first // 4 * _BYTES
                if not is_first:
                    weights = four + first % 4 * _NUM_ROWS * 4
                    _weigh(stored, rows, tokens_at, offset, ahead, num_vectors, weights)
                elif at_once == 4:
                    _dots(stored, rows, tokens_at, offset, ahead, num_vectors, four)
                else:
                    pairs = pairs_at + 2 * block * _BYTES
                    pair = pairs + first % 4 // 2 * _BYTES
                    _dots(stored, rows, tokens_at, offset, ahead, num_vectors, pair)
                    if has_four:
                        _add_up(pairs, four)
            far += step
            while far >= token_bytes:
                far_at, far = far_at + following, far - token_bytes
    return num_asked


@njit(fastmath=_FAST_MATH, error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _attend(stored: Any, job: Any, segment: Any, query_at: Any, run: Any, start: Any, last: Any) -> None:
    """Take tokens `start` to `last` of a segment into the state of a run; the query's rows are at `query_at`."""
    num_heads, blocks_a_head, num_vectors = job.num_heads, job.blocks_a_head, job.num_vectors
    num_blocks, most, at_once = num_heads * blocks_a_head, job.tokens_at_once, _at_once(stored)
    total_at, tops_at, sums_at = _state_at(job, run)
    pairs_at = total_at + num_blocks * num_vectors * _NUM_ROWS * _BYTES
    scores_at = pairs_at + num_blocks * 2 * _BYTES
    keys_at = sums_at + num_blocks * _NUM_ROWS * 4
    values_at = keys_at + (most + _LEAD) * 8
    lately = carray(_pointer(values_at + (most + _LEAD) * 8, np.int64(0)), _LATELY)
    lately[:], num_asked = query_at, np.int64(0)
    scores = carray(_pointer(scores_at, _F(0)), (num_blocks, most // 4, 16))
    keys = carray(_pointer(keys_at, np.int64(0)), most + _LEAD)
    values = carray(_pointer(values_at, np.int64(0)), most + _LEAD)
    table = carray(_pointer(segment.table_at, np.int32(0)), 1 + (segment.last - 1) // segment.page_size)
    while start < last:
        count = min(most, last - start)
        fours = (count + 3) // 4
        whole = (count + at_once - 1) // at_once * at_once
        # Behind the block's own tokens is what follows, only to be asked for: values after keys, then the next keys.
        _locate(segment, table, start, last, keys[:whole])
        for i in range(whole):
            values[i] = keys[i] + segment.plane_stride
        for i in range(_LEAD):
            keys[whole + i] = values[min(i, whole - 1)]
        _locate(segment, table, start + count, last, values[whole : whole + _LEAD])
        num_asked = _pass(
            stored, job, segment, True, whole, keys_at, query_at, pairs_at, scores_at, lately, num_asked
        )  # fmt: skip
        if job.cap > _F(0.0):
            for block in range(num_blocks):
                for four in range(fours):
                    for i in range(16):
                        scores[block, four, i] = job.cap * np.tanh(scores[block, four, i])
        for block in range(num_blocks):
            for i in range(4 * (count + 4 - 4 * fours), 16):
                scores[block, fours - 1, i] = _MINUS_INFINITY
            four_rows = block * _NUM_ROWS * 4
            _to_weights(
                scores_at + four_rows * most, fours, tops_at + four_rows, sums_at + four_rows,
                total_at + block * _NUM_ROWS * num_vectors * _BYTES, num_vectors,
            )  # fmt: skip
        num_asked = _pass(
            stored, job, segment, False, whole, values_at, total_at, pairs_at, scores_at, lately, num_asked
        )  # fmt: skip
        start += count


@njit(error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _begin_state(job: Any, run: Any) -> None:
    """Let a run have seen nothing so far."""
    num_blocks, num_vectors = job.num_heads * job.blocks_a_head, job.num_vectors
    total_at, tops_at, sums_at = _state_at(job, run)
    total = carray(_pointer(total_at, _F(0)), num_blocks * num_vectors * _NUM_ROWS * LANES)
    tops = carray(_pointer(tops_at, _F(0)), num_blocks * _NUM_ROWS)
    sums = carray(_pointer(sums_at, _F(0)), num_blocks * _NUM_ROWS)
    total[:], tops[:], sums[:] = _F(0.0), _MINUS_INFINITY, _F(0.0)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _are_there(segment: Any, start: Any, last: Any) -> Any:
    """Whether the segment has the slots of these tokens."""
    table = carray(_pointer(segment.table_at, np.int32(0)), 1 + (last - 1) // segment.page_size)
    least, most = np.int32(0), np.int32(0)
    for page in range(start // segment.page_size, len(table)):
        least, most = min(least, table[page]), max(most, table[page])
    return least >= 0 and most < segment.num_slots


@njit(error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _work(stored: Any, job: Any, query_at: Any, run: Any) -> None:
    """Take the tokens of one run, of one or more segments, into its state."""
    if run >= job.begun_runs:
        _begin_state(job, run)
    begin, end = job.num_tokens * run // job.num_runs, job.num_tokens * (run + 1) // job.num_runs
    segments, before = carray(_segments(job.segments_at), job.num_segments), np.int64(0)
    for i in range(job.num_segments):
        segment = segments[i]
        count = segment.last - segment.first
        start, last = max(begin - before, 0), min(end - before, count)
        if start < last:
            if not _are_there(segment, segment.first + start, segment.first + last):
                job.is_wrong = 1
                return
            _attend(stored, job, segment, query_at, run, segment.first + start, segment.first + last)
        before += count


@njit(fastmath=_FAST_MATH, error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _take_query(job: Any, query_at: Any) -> None:
    """Make the query's rows at `query_at`."""
    num_blocks, num_vectors = job.num_heads * job.blocks_a_head, job.num_vectors
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


@njit(fastmath=_FAST_MATH, error_model="numpy")  # type: ignore[untyped-decorator]  # Numba has no types
def _merge(job: Any, num_runs: Any) -> None:
    """Merge the states of the first runs, in their order, and write what comes out."""
    num_blocks, num_vectors = job.num_heads * job.blocks_a_head, job.num_vectors
    output = carray(_pointer(job.output_at, _F(0)), (job.num_heads * job.group, num_vectors, LANES))
    lse = carray(_pointer(job.lse_at, _F(0)), job.num_heads * job.group)
    for query_head in range(job.num_heads * job.group):
        head, row = query_head // job.group, query_head % job.group
        block = head * job.blocks_a_head + row // _NUM_ROWS
        at, row = block * _NUM_ROWS + row % _NUM_ROWS, row % _NUM_ROWS
        top = _MINUS_INFINITY
        for run in range(num_runs):
            _, tops_at, _ = _state_at(job, run)
            top = max(top, carray(_pointer(tops_at, _F(0)), num_blocks * _NUM_ROWS)[at])
        whole = 0.0
        for vector in range(num_vectors):
            for i in range(LANES):
                output[query_head, vector, i] = _F(0.0)
        for run in range(num_runs):
            total_at, tops_at, sums_at = _state_at(job, run)
            # In float64: rounded once, as a sum of two numbers in other units would not be.
            weight = math.exp((np.float64(carray(_pointer(tops_at, _F(0)), num_blocks * _NUM_ROWS)[at]) - top) * _LN_2)
            whole += weight * carray(_pointer(sums_at, _F(0)), num_blocks * _NUM_ROWS)[at]
            _add_row(
                total_at + (block * num_vectors * _NUM_ROWS + row) * _BYTES, _F(weight),
                job.output_at + query_head * num_vectors * _BYTES, num_vectors,
            )  # fmt: skip
        part = _F(1.0 / whole)
        for vector in range(num_vectors):
            for i in range(LANES):
                output[query_head, vector, i] *= part
        lse[query_head] = math.log(whole) + top * _LN_2


def compiled(number: Any) -> Any:
    """A function of C, at `address` while this object is kept, that takes the address of a `Job` with pages of the type
    that `number` stands for (`_STORED`), and works on runs until none is left; who is done last merges, if that is all.
    Several threads may do so at once."""

    def attend(jobs: Any) -> None:
        job = carray(jobs, 1)[0]
        thread, run = _counted(jobs, 0), _counted(jobs, 1)
        query_at = job.rows_at + thread * job.num_heads * job.blocks_a_head * job.num_vectors * _NUM_ROWS * _BYTES
        if run < job.num_runs:
            _take_query(job, query_at)
        while run < job.num_runs:
            _work(number, job, query_at, run)
            if _counted(jobs, 2) == job.num_runs - 1 and job.output_at != 0:
                _merge(job, max(job.num_runs, job.begun_runs))
            run = _counted(jobs, 1)

    return _function(attend)


def compiled_merge() -> Any:
    """A function likewise, for one thread: merges what was worked on before."""

    def merge(jobs: Any) -> None:
        job = carray(jobs, 1)[0]
        _merge(job, job.begun_runs)

    return _function(merge)


def _function(work: Callable[[Any], None]) -> Any:
    job = types.CPointer(from_dtype(np.dtype(Job)))
    try:
        return cfunc(types.void(job), cache=True, error_model="numpy", fastmath=_FAST_MATH)(work)
    except RuntimeError:
        # Neither the folder of this file nor the user's own can be written to.
        return cfunc(types.void(job), error_model="numpy", fastmath=_FAST_MATH)(work)
