"""Token ids, in whatever form somebody has them."""

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import BadRequest

Tokens = npt.NDArray[np.int32]


def token_ids(tokens: npt.ArrayLike | torch.Tensor, vocab_size: int) -> Tokens:
    """Token ids as int32 `[tokens]`, from `[tokens]` or `[1, tokens]`. Raises `BadRequest` for anything else."""
    try:
        ids = np.asarray(tokens.detach().cpu() if isinstance(tokens, torch.Tensor) else tokens)
    except (TypeError, ValueError) as error:
        raise BadRequest("input_ids", f"are not an array of token ids: {error}") from error
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise BadRequest("input_ids", f"{ids.dtype} of shape {ids.shape} is not one sequence of integer token ids")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise BadRequest("input_ids", f"hold ids outside 0 to {vocab_size - 1}")
    return ids.astype(np.int32)
