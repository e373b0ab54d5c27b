"""Tensors that lie in memory instead of files, and say what was fetched of them."""

from pathlib import Path

from jaxrl_post.pretrained.tensor_files import Tensor

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
}
FILE = Path("memory.safetensors")


class Stored(dict):
    """Tensors by name; `fetched` lists (name, bounds of the region) in order."""

    def __init__(self, arrays):
        self.fetched = []
        self.num_bytes = 0
        for name, array in arrays.items():
            self[name] = self._tensor(name, array)

    def _tensor(self, name, array):
        def fetch(region):
            for bounds, size in zip(region, array.shape, strict=True):
                assert 0 <= bounds.start <= bounds.stop <= size
            self.fetched.append((name, *((s.start, s.stop) for s in region)))
            values = array[region].copy()
            self.num_bytes += values.nbytes
            return values

        return Tensor(FILE, array.shape, DTYPES[array.dtype.name], fetch)
