"""The device's pool of equal pages, as tensors: typed views of the pages, and the copies inside the pool."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from forebay.kvstore.layout import Layout, PagedGroup
from forebay.kvstore.moves import Move, Pages


class DevicePool:
    """One allocation of `n_pages` pages: `bytes` uint8 [n_pages, page_bytes]. Every other view shares its memory."""

    def __init__(self, layout: Layout, n_pages: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.n_pages = n_pages
        # One page more than there are: a step of a fixed number of rows points those without a sequence at it.
        self.bytes = torch.zeros((n_pages + 1, layout.page_bytes), dtype=torch.uint8, device=device)[:n_pages]
        # NumPy copies rows of bytes several times faster than torch's index operators on a CPU.
        self._on_cpu: npt.NDArray[np.uint8] | None = self.bytes.numpy() if self.bytes.device.type == "cpu" else None

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """All pages as [n_pages, page_bytes // itemsize]."""
        return self.bytes.view(dtype)

    def rows(self, group: str, dtype: torch.dtype, elements: int) -> torch.Tensor:
        """Pages as rows of a paged group: [n_pages, page_tokens, elements]; `elements` fill the whole row."""
        paged = self.paged_group(group)
        assert elements * dtype.itemsize == paged.row_bytes, f"a row of {group} has {paged.row_bytes} bytes"
        flat = self.bytes[:, : paged.page_tokens * paged.row_bytes].view(dtype)
        return flat.view(self.n_pages, paged.page_tokens, elements)

    def field(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> torch.Tensor:
        """A part of each state page, `offset_bytes` into it: [n_pages, *shape]."""
        n_bytes = dtype.itemsize * torch.Size(shape).numel()
        assert offset_bytes + n_bytes <= self.layout.page_bytes, "the part lies inside the page"
        return self.bytes[:, offset_bytes : offset_bytes + n_bytes].view(dtype).view(self.n_pages, *shape)

    def paged_group(self, name: str) -> PagedGroup:
        return next(group for group in self.layout.paged if group.name == name)

    def gather(self, pages: Pages, n_bytes: int) -> npt.NDArray[np.uint8]:
        """A copy, on the host, of the first bytes of each page: [n, n_bytes]."""
        if self._on_cpu is not None:
            return self._on_cpu[pages, :n_bytes]
        return self.bytes[:, :n_bytes].index_select(0, self._ids(pages)).cpu().numpy()

    def scatter(self, pages: Pages, data: npt.NDArray[np.uint8]) -> None:
        """Write [n, n_bytes] over the first bytes of each page."""
        if self._on_cpu is not None:
            self._on_cpu[pages, : data.shape[1]] = data
        else:
            rows = torch.from_numpy(data).to(self.bytes.device)
            self.bytes[:, : data.shape[1]].index_copy_(0, self._ids(pages), rows)

    def take(self, page: int, into: npt.NDArray[np.uint8]) -> int:
        """Copy the first bytes of one page down, `into` [n_bytes]; the checksum of what arrived."""
        from forebay.kvstore.checksum import checksum, copy_checked  # a pool that nothing leaves needs no xxhash

        if self._on_cpu is not None:
            return copy_checked(into[None], self._on_cpu[page, None, : len(into)])
        torch.from_numpy(into).copy_(self.bytes[page, : len(into)])
        return checksum(into)

    def bring(self, page: int, data: npt.NDArray[np.uint8], n_bytes: int) -> int:
        """Copy the first `n_bytes` of `data` over one page's; the checksum of all of `data`, which must not change
        meanwhile."""
        from forebay.kvstore.checksum import checksum, copy_checked

        if self._on_cpu is not None and n_bytes == len(data):
            return copy_checked(self._on_cpu[page, None, :n_bytes], data[None])
        self.bytes[page, :n_bytes].copy_(torch.from_numpy(data[:n_bytes]))
        return checksum(data)

    def copy(self, move: Move) -> None:
        """Carry out a move within the pool. Sources and targets are disjoint."""
        if self._on_cpu is not None:
            self._on_cpu[move.target_pages, : move.n_bytes] = self._on_cpu[move.source_pages, : move.n_bytes]
        else:
            rows = self.bytes[:, : move.n_bytes].index_select(0, self._ids(move.source_pages))
            self.bytes[:, : move.n_bytes].index_copy_(0, self._ids(move.target_pages), rows)

    def zero(self, move: Move) -> None:
        self.bytes[:, : move.n_bytes].index_fill_(0, self._ids(move.target_pages), 0)

    def _ids(self, pages: Pages) -> torch.Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self.bytes.device)


def pin(data: npt.NDArray[np.uint8], device: torch.device | str) -> Callable[[], None]:
    """Let a GPU copy to and from these bytes without a detour, until what is returned is called. Nothing on a CPU.

    Raises torch.cuda.CudaError, as where the system bounds locked memory.
    """
    if torch.device(device).type != "cuda":
        return lambda: None
    cudart, address = torch.cuda.cudart(), data.ctypes.data  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(address, data.nbytes, 0))
    return lambda: torch.cuda.check_error(cudart.cudaHostUnregister(address))
