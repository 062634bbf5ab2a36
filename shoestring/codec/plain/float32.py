"""Every value as it is: four bytes each, nothing left over.

Body: the values as IEEE 754 binary32.
"""

import numpy as np

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.plain.base import PlainCodec


class Float32(PlainCodec):
    """Uncompressed: four bytes a value."""

    name = "float32"
    code = 1

    def _body_bytes(self, layout: Layout) -> int:
        return 4 * layout.total

    def _write(self, values: Vector, layout: Layout, body: Payload) -> None:
        body.view("<f4")[:] = values

    def _read(self, body: Payload, layout: Layout) -> Vector:
        values = body.view("<f4")
        if not np.isfinite(values).all():
            raise self._broken("NaN or infinity")
        return values
