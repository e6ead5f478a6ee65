"""The forms in which wrappers launch the kernels: what the compile report compiles, without a GPU.

A kernel is here under one name for each way in which it is launched, and may be with all its optional arguments or
without; pointers and scalars that a form does not name are None there, as the wrappers pass them.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from triton.compiler import ASTSource

from hicache.kernels import decode, extend, gather, merge, mla, quant, rope, score
from hicache.kernels.launch import Variant, shared_bytes_of


class Elements(NamedTuple):
    """Element types of a case: those of the query, and of stored keys and values."""

    query: torch.dtype
    query_pointer: str
    stored: torch.dtype
    stored_pointer: str

    @property
    def is_float8(self) -> bool:
        """Whether keys and values are stored in another type than the query's, with scales."""
        return self.query != self.stored


DTYPES: Final = {
    "float16": Elements(torch.float16, "*fp16", torch.float16, "*fp16"),
    "bfloat16": Elements(torch.bfloat16, "*bf16", torch.bfloat16, "*bf16"),
    "float32": Elements(torch.float32, "*fp32", torch.float32, "*fp32"),
    "float8_e4m3fn": Elements(torch.bfloat16, "*bf16", torch.float8_e4m3fn, "*fp8e4nv"),
    "float8_e5m2": Elements(torch.float16, "*fp16", torch.float8_e5m2, "*fp8e5"),
}
"""By the type of what is stored."""
HEAD_DIMS: Final = (64, 96, 128, 256)
LATENT_DIM: Final = 512
ROPE_DIM: Final = 64
PAGE_SIZES: Final = (1, 16, 64)
GROUP: Final = 4
"""Query heads a key/value head: the commonest; the registers needed hardly depend on it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel for one kind of model."""

    kernel: str
    dtype: str
    head_dim: int
    page_size: int
    options: bool = False
    """With all optional arguments that change the code: those of `Scoring`, a state to merge in."""


class Form(NamedTuple):
    """What is compiled for a case."""

    function: Any
    """The kernel."""
    variant: Variant
    types: dict[str, str]
    """Triton's type of each pointer, and of each scalar that may be None, that is given."""


def _mla(case: Case, shared_bytes: int) -> Form | None:
    if case.head_dim != HEAD_DIMS[0]:
        return None  # it has sizes of its own
    elements = DTYPES[case.dtype]
    variant = mla.mla_variant(
        elements.query, elements.stored, LATENT_DIM, ROPE_DIM, case.page_size, 128, shared_bytes=shared_bytes
    )
    types = {
        "p_query": elements.query_pointer, "p_pages": elements.stored_pointer, "p_tables": "*i32", "p_lens": "*i32",
        "p_output": "*fp32", "p_lse": "*fp32",
    }  # fmt: skip
    types |= _scales(elements)
    return Form(mla._mla_decode_kernel, variant, types | (_SCORING_WITHOUT_WINDOW if case.options else {}))


def _decode(case: Case, *, num_tokens: int = 1) -> Form:
    elements = DTYPES[case.dtype]
    variant = decode.decode_variant(elements.query, elements.stored, case.head_dim, case.page_size, GROUP, num_tokens)
    types = {
        "p_query": elements.query_pointer, "p_pages": elements.stored_pointer, "p_tables": "*i32", "p_lens": "*i32",
        "p_output": "*fp32", "p_lse": "*fp32",
    }  # fmt: skip
    if num_tokens > 1:
        types["p_indptr"] = "*i32"
    scoring = _SCORING if num_tokens == 1 else _SCORING_WITHOUT_WINDOW
    return Form(decode._paged_decode_kernel, variant, types | _scales(elements) | (scoring if case.options else {}))


def _extend(case: Case, shared_bytes: int, *, has_prefix: bool = True, has_new: bool = True) -> Form | None:
    elements = DTYPES[case.dtype]
    if elements.is_float8 and not has_prefix:
        return None
    page_size = case.page_size if has_prefix else 1
    variant = extend.extend_variant(
        elements.query, elements.stored, case.head_dim, page_size, GROUP, has_prefix=has_prefix, has_new=has_new,
        shared_bytes=shared_bytes,
    )  # fmt: skip
    pointer = elements.query_pointer
    types = {"p_query": pointer, "p_indptr": "*i32", "p_output": pointer, "p_lse": "*fp32"}
    if has_prefix:
        types |= {"p_pages": elements.stored_pointer, "p_tables": "*i32", "p_prefix_lens": "*i32"} | _scales(elements)
    if has_new:
        types |= {"p_key": pointer, "p_value": pointer}
    return Form(extend._paged_extend_kernel, variant, types | (_SCORING if case.options else {}))


_SCORING_WITHOUT_WINDOW: Final = {"p_sinks": "*fp32", "cap_log2": "fp32"}
_SCORING: Final = _SCORING_WITHOUT_WINDOW | {"window": "i32"}
"""All that `Scoring` may ask for."""


def _scales(elements: Elements) -> dict[str, str]:
    return {"p_scales": "*fp32"} if elements.is_float8 else {}


def _merge(case: Case) -> Form | None:
    elements = DTYPES[case.dtype]
    if elements.is_float8:
        return None
    types = {"p_outputs": "*fp32", "p_lses": "*fp32", "p_output": elements.query_pointer, "p_lse": "*fp32"}
    if case.options:
        types |= {"p_initial": "*fp32", "p_initial_lse": "*fp32"}
    return Form(merge._merge_states_kernel, merge.merge_variant(case.head_dim), types)


def _gather(case: Case, *, to_slots: bool) -> Form | None:
    elements = DTYPES[case.dtype]
    if elements.is_float8:
        return None  # words are moved, whatever is in them
    layer_bytes = 2 * case.page_size * case.head_dim * elements.stored.itemsize
    variant = gather.gather_variant(16, layer_bytes)
    variant = Variant({**variant.constants, "TO_SLOTS": to_slots}, variant.num_warps, variant.num_stages)
    types = {"p_pages": "*i32", "p_offsets": "*i64", "p_page_ids": "*i32", "p_slots": "*i32", "p_slot_ids": "*i32"}
    return Form(gather._gather_pages_kernel, variant, types)


def _rotate(case: Case, *, neighbours: bool) -> Form | None:
    elements = DTYPES[case.dtype]
    if elements.is_float8:
        return None
    variant = rope.rotate_variant(case.head_dim, case.page_size * GROUP)
    variant = Variant({**variant.constants, "NEIGHBOURS": neighbours}, variant.num_warps, variant.num_stages)
    types = {"p_pages": elements.stored_pointer, "p_page_ids": "*i32", "p_turns": "*fp32"}
    return Form(rope._rotate_pages_kernel, variant, types)


def _convert(case: Case, *, to_slots: bool, stored: str) -> Form | None:
    elements = DTYPES[case.dtype]
    if elements.is_float8:
        return None
    variant = quant.quantize_variant(case.page_size, case.head_dim, 16 // elements.stored.itemsize)
    constants = dict(variant.constants)
    if to_slots:
        constants |= {"STORED_MAX": 127 if stored == "*i8" else 448, "ROUND": stored == "*i8", "EMULATE_FLOAT8": False}
    variant = Variant(constants, variant.num_warps, variant.num_stages)
    types = {
        "p_pages": elements.stored_pointer, "p_offsets": "*i64", "p_page_ids": "*i32", "p_slots": stored,
        "p_slot_ids": "*i32", "p_scales": "*fp32",
    }  # fmt: skip
    function = quant._gather_quantized_kernel if to_slots else quant._scatter_quantized_kernel
    return Form(function, variant, types)


def _score(case: Case, *, box: bool) -> Form | None:
    elements = DTYPES[case.dtype]
    if elements.is_float8:
        return None
    pointer = elements.stored_pointer
    types = {"p_query": pointer, "p_first": pointer, "p_out": "*fp32"}
    types |= {"p_high": pointer} if box else {"p_radius": "*fp32"}
    return Form(score._page_scores_kernel, score.score_variant(case.head_dim, GROUP), types)


KERNELS: Final[dict[str, Callable[[Case, int], Form | None]]] = {
    "decode": lambda case, _: _decode(case),
    "cascade": lambda case, _: _decode(case, num_tokens=32),
    "mla": _mla,
    "extend": _extend,
    "extend-prefix": lambda case, shared_bytes: _extend(case, shared_bytes, has_new=False),
    "extend-new": lambda case, shared_bytes: _extend(case, shared_bytes, has_prefix=False),
    "merge": lambda case, _: _merge(case),
    "gather": lambda case, _: _gather(case, to_slots=True),
    "scatter": lambda case, _: _gather(case, to_slots=False),
    "gather-int8": lambda case, _: _convert(case, to_slots=True, stored="*i8"),
    "gather-float8": lambda case, _: _convert(case, to_slots=True, stored="*fp8e4nv"),
    "scatter-int8": lambda case, _: _convert(case, to_slots=False, stored="*i8"),
    "scatter-float8": lambda case, _: _convert(case, to_slots=False, stored="*fp8e4nv"),
    "rotate-halves": lambda case, _: _rotate(case, neighbours=False),
    "rotate-neighbours": lambda case, _: _rotate(case, neighbours=True),
    "score-box": lambda case, _: _score(case, box=True),
    "score-ball": lambda case, _: _score(case, box=False),
}
"""The form of each kernel in a case, on a GPU where a program may have so many bytes of shared memory; None where the
case means nothing to it."""

_NULLABLE: Final = {"window", "cap_log2"}
"""Scalars that are None unless a form names them; so are all pointers."""
_UNALIGNED: Final = {
    "stride_tb", "stride_ls", "stride_lt", "stride_ln", "stride_olt", "stride_ilt", "stride_ss", "stride_sp",
    "stride_sh", "stride_rn",
}  # fmt: skip
"""Strides of tensors without a head dimension, no multiples of 16. All others are, as the launcher will find out."""


def source_of(form: Form, arch: int) -> ASTSource:
    """What the compiler is given for a form: as a launch would, with what it finds out about pointers and strides.

    Without the divisibility of pointers and strides the same kernel loads element by element, and spills. Before sm_89
    float8_e4m3fn is bytes, as `launch.loadable` makes it.
    """
    constants: dict[str, Any] = {**form.variant.constants, "EMULATE_BFLOAT16": False}
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(form.function.params):
        name = parameter.name
        given = form.types.get(name)
        if parameter.is_constexpr or (given is None and (name.startswith("p_") or name in _NULLABLE)):
            signature[name], values[name] = "constexpr", constants.get(name)
        elif given is not None:
            signature[name] = "*u8" if given == "*fp8e4nv" and arch < 89 else given
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        is_pointer = name.startswith("p_") and given is not None
        if is_pointer or (name.startswith("stride_") and name not in _UNALIGNED):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(form.function, signature, values, attributes)


def form_of(case: Case, arch: int) -> Form:
    """The form on sm_`arch` of a case that has one, as those of `all_cases` do."""
    form = KERNELS[case.kernel](case, shared_bytes_of(*divmod(arch, 10)))
    assert form is not None, case
    return form


_SHARED_BYTES: Final = shared_bytes_of(9, 0)
"""Of the forms that are compared: those that are alike with more are alike with less."""


def all_cases(
    kernels: Iterable[str],
    dtypes: Iterable[str],
    head_dims: Iterable[int],
    page_sizes: Iterable[int],
    options: Iterable[bool] = (False, True),
) -> list[Case]:
    """The product of all, each distinct form once: page size means nothing to merge, for example."""
    forms: dict[object, Case] = {}
    for case in itertools.starmap(Case, itertools.product(kernels, dtypes, head_dims, page_sizes, options)):
        form = KERNELS[case.kernel](case, _SHARED_BYTES)
        if form is not None:
            key = (form.function.__name__, tuple(form.variant.constants.items()), tuple(form.types.items()))
            forms.setdefault(key, case)
    return list(forms.values())
