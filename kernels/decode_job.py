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
        # int32, of slots, of which there are so many.
        ("table_at", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
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

    At `rows_at` are, for each thread, float32 [H * R, D / 16, 4, 16], the query's rows, a vector of each after the
    other, scaled so that products are in units of log2, or with a cap in units of it. At `states_at` are, for each run
    and `run_bytes` apart,

    - `total` float32 as the query's rows, values by their weights;
    - products [H * R, 2, 16] and scores [H * R, N / 4, 16], room for N tokens at once;
    - `tops` [H * R * 4], the greatest score of every row, in units of log2, and `sums` [H * R * 4], of weights; these
      and the total are relative to the top;
    - addresses int64 [2, N + 64], room for N tokens, and [64], of what was asked for last.
    """

    _fields_ = (
        # Counted up by threads, hence first: which thread comes next, which run nobody has begun, how many are done.
        ("next_thread", ctypes.c_int64),
        ("next_run", ctypes.c_int64),
        ("done_runs", ctypes.c_int64),
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
        ("rows_at", ctypes.c_int64),
        ("states_at", ctypes.c_int64),
        ("run_bytes", ctypes.c_int64),
        # Set to 1 if a table has slots that are not there; what came of its run is then worth nothing.
        ("is_wrong", ctypes.c_int64),
        # The query float32 [HQ, D], and where the output [HQ, D] and LSE [HQ], in natural units, go: 0 until the end.
        ("query_at", ctypes.c_int64),
        ("query_stride", ctypes.c_int64),
        ("output_at", ctypes.c_int64),
        ("lse_at", ctypes.c_int64),
        # What a query is multiplied by, and the cap in units of log2; 0 for none.
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )
