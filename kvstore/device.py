"""The device's pool of equal pages, as tensors: typed views of the pages, and the copies inside the pool."""

import torch

from forebay.kvstore.layout import Layout, PagedGroup
from forebay.kvstore.moves import Move, Pages


class DevicePool:
    """One allocation of `n_pages` pages: `bytes` uint8 [n_pages, page_bytes]. Every other view shares its memory."""

    def __init__(self, layout: Layout, n_pages: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.n_pages = n_pages
        self.bytes = torch.zeros((n_pages, layout.page_bytes), dtype=torch.uint8, device=device)

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """All pages as [n_pages, page_bytes // itemsize]."""
        return self.bytes.view(dtype)

    def rows(self, group: str, dtype: torch.dtype, elements: int) -> torch.Tensor:
        """Pages as rows of a paged group: [n_pages, page_tokens, elements]; `elements` fill the whole row."""
        paged = self.paged_group(group)
        assert elements * dtype.itemsize == paged.row_bytes, f"a row of {group} has {paged.row_bytes} bytes"
        flat = self.bytes[:, : paged.page_tokens * paged.row_bytes].view(dtype)
        return flat.unflatten(1, (paged.page_tokens, elements))

    def field(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> torch.Tensor:
        """A part of each state page, `offset_bytes` into it: [n_pages, *shape]."""
        n_bytes = dtype.itemsize * torch.Size(shape).numel()
        assert offset_bytes + n_bytes <= self.layout.page_bytes, "the part lies inside the page"
        return self.bytes[:, offset_bytes : offset_bytes + n_bytes].view(dtype).unflatten(1, shape)

    def paged_group(self, name: str) -> PagedGroup:
        return next(group for group in self.layout.paged if group.name == name)

    def zero(self, pages: Pages, n_bytes: int) -> None:
        self.bytes[self.page_ids(pages), :n_bytes] = 0

    def copy(self, move: Move) -> None:
        """Carry out a device to device move. Sources and targets are disjoint."""
        kept = self.bytes[:, : move.n_bytes].index_select(0, self.page_ids(move.source_pages))
        self.bytes[:, : move.n_bytes].index_copy_(0, self.page_ids(move.target_pages), kept)

    def page_ids(self, pages: Pages) -> torch.Tensor:
        return torch.from_numpy(pages.astype("int64")).to(self.bytes.device)
