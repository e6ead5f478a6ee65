"""What is handed to the compiled loops of decoding on the CPU."""

import ctypes


class Job(ctypes.Structure):
    """Tokens of a table to attend to, in runs, each with a state of its own; as the loops read it.

    `at` is the address of an array. The state's arrays have an item for each run: `tops` float32 [H * R * 4], the
    greatest score of every row, in units of log2; `sums` [H * R * 4], of its weights, and `total` [H * R, D / 16, 4,
    16], of its weighted values, relative to it; -inf, 0 and 0 at the start.
    """

    _fields_ = (
        ("next_run", ctypes.c_int64),  # which nobody has begun yet; first, because it is counted up at this address
        ("num_runs", ctypes.c_int64),
        # Pages, whose strides are in bytes, and a table int32 of slots that are there.
        ("pages_at", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
        ("plane_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("table_at", ctypes.c_int64),
        # Tokens of the table.
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        # H, R and D / 16. R * 4 rows a head, of which four lie together, a vector of each after the other: float32
        # [H, R, D / 16, 4, 16], scaled so that products are in units of log2, or with a cap in units of it.
        ("num_heads", ctypes.c_int64),
        ("blocks_a_head", ctypes.c_int64),
        ("num_vectors", ctypes.c_int64),
        ("query_at", ctypes.c_int64),
        ("tops_at", ctypes.c_int64),
        ("sums_at", ctypes.c_int64),
        ("total_at", ctypes.c_int64),
        # Room for each run: scores float32 [H * R, N / 4, 16] and addresses int64 [N + 4] for N tokens at once.
        ("tokens_at_once", ctypes.c_int64),
        ("scores_at", ctypes.c_int64),
        ("addresses_at", ctypes.c_int64),
        # How far ahead data is fetched: 1 to H, heads of four tokens each.
        ("heads_ahead", ctypes.c_int64),
        # In units of log2; 0 for none.
        ("cap", ctypes.c_float),
    )
