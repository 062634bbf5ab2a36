"""What parameters keep of float32 values, on the device where these lie: torch's own rounding.

`model/precision.py` does the same on the host, to the same bits.
"""

import torch
from torch import Tensor

from shoestring.model.precision import Precision


def rounded(values: Tensor, precision: Precision) -> Tensor:
    """A copy of a part's values as its parameters would keep them; the values themselves if all do."""
    if not precision.is_narrow:
        return values
    kept = values.clone()
    for start, stop, dtype in precision.runs:
        own: torch.dtype = getattr(torch, dtype)
        kept[start:stop] = values[start:stop].to(own)
    return kept
