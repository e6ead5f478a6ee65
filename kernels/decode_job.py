"""What is handed to the compiled loops of decoding on the CPU."""

import ctypes


class Segment(ctypes.Structure):
    """Pages, and tokens of a table of theirs, `first` to `last`, at least one; `at` and strides as in `Job`."""

    _fields_ = (
        ("pages_at", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
        ("plane_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        # int32, of slots that are there.
        ("table_at", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        # How many tokens ahead of those that data is asked for a line of every 4 KiB is: 0 for none.
        ("early", ctypes.c_int64),
    )


class Job(ctypes.Structure):
    """A query, and segments of tokens for it to attend to, one behind the other and then cut into runs, each with a
    state of its own; as the loops read it.

    `at` is the address of an array, and strides are in bytes. H key/value heads have R blocks of four rows each, query
    heads that are computed with together, of which the last may be there to fill up the group.

    At `room_at` are float32 [H * R, D / 16, 4, 16], the query's rows, a vector of each after the other, scaled so that
    products are in units of log2, or with a cap in units of it; and behind them, for each run and `run_bytes` apart,

    - `total` float32 as the query, values by their weights;
    - products [H * R, 2, 16] and scores [H * R, N / 4, 16], room for N tokens at once;
    - `tops` [H * R * 4], the greatest score of every row, in units of log2, and `sums` [H * R * 4], of weights; these
      and the total are relative to the top;
    - addresses int64 [2, N + 64], room for N tokens, and [64], of what was asked for last.
    """

    _fields_ = (
        ("next_run", ctypes.c_int64),  # which nobody has begun yet; first, because it is counted up at this address
        ("num_runs", ctypes.c_int64),
        ("most_runs", ctypes.c_int64),
        # Those that have a state already.
        ("begun_runs", ctypes.c_int64),
        # `Segment`s, and how many tokens they have.
        ("segments_at", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        # How far ahead data is asked for, in heads of a token, and how many heads' requests later again, three times:
        # a request is for the tokens that are computed with together.
        ("far", ctypes.c_int64),
        ("again", ctypes.c_int64),
        # H, R, D / 16, N, and query heads of a key/value head.
        ("num_heads", ctypes.c_int64),
        ("blocks_a_head", ctypes.c_int64),
        ("num_vectors", ctypes.c_int64),
        ("tokens_at_once", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("room_at", ctypes.c_int64),
        ("run_bytes", ctypes.c_int64),
        # The query float32 [HQ, D], and where the output [HQ, D] and LSE [HQ], in natural units, go.
        ("query_at", ctypes.c_int64),
        ("query_stride", ctypes.c_int64),
        ("output_at", ctypes.c_int64),
        ("lse_at", ctypes.c_int64),
        # What a query is multiplied by, and the cap in units of log2; 0 for none.
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )
