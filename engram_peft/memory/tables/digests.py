"""Digests of chunks: hashing while a table is written, and checking chunks before rows of them are served."""

from __future__ import annotations

import hashlib
import os

import numpy as np

from .format import TableDigestError, TableHeader


class ChunkHasher:
    """SHA-256 of a stream of bytes as a whole and of every `chunk_bytes` of it."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes, self._held = chunk_bytes, 0
        self._whole, self._chunk = hashlib.sha256(), hashlib.sha256()
        self._digests: list[bytes] = []

    def update(self, data: np.ndarray) -> None:
        """Takes the next bytes, contiguous uint8 `[n]`."""
        self._whole.update(data.data)
        while len(data):
            part = data[: self._chunk_bytes - self._held]
            self._chunk.update(part.data)
            self._held += len(part)
            data = data[len(part) :]
            if self._held == self._chunk_bytes:
                self._end_chunk()

    def finish(self) -> tuple[str, bytes]:
        """The digest of the whole, in hexadecimal, and the digests of the chunks one after another."""
        if self._held:
            self._end_chunk()
        return self._whole.hexdigest(), b"".join(self._digests)

    def _end_chunk(self) -> None:
        self._digests.append(self._chunk.digest())
        self._chunk, self._held = hashlib.sha256(), 0


class ChunkDigests:
    """The digests that a file holds of its own rows, and which of them were found to be right.

    Args:
        header (`TableHeader`): What the file says about itself.
        digests (`bytes`): Its `chunk_sha256`.
        path (`str`): The file, for messages.

    Raises:
        `TableDigestError`: The digests are not those that the header vouches for.
    """

    def __init__(self, header: TableHeader, digests: bytes, path: str | os.PathLike) -> None:
        if (found := hashlib.sha256(digests).hexdigest()) != header.chunks_sha256:
            raise TableDigestError(
                f"{path} is damaged: its digests have the digest {found}, {header.chunks_sha256} was expected."
            )
        self._path, self._digests, self._header = path, digests, header
        self.chunk_bytes = header.chunk_bytes
        self._row_bytes = header.layout.row_bytes
        self._right = np.zeros(len(digests) // 32, bool)
        self._all_right = False

    def __len__(self) -> int:
        return len(self._right)

    def unchecked(self, ids: np.ndarray) -> list[int]:
        """The chunks that rows `ids` (int64, any shape) lie in and that were not found right yet, in ascending order."""
        if self._all_right:
            return []
        size, starts = self.chunk_bytes, ids.reshape(-1) * self._row_bytes
        first, last = starts // size, (starts + (self._row_bytes - 1)) // size
        if self._row_bytes <= size + 1:  # such a row lies in two chunks at most
            touched = np.concatenate([first, last])
        else:
            touched = np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)] or [first])
        pending: list[int] = np.unique(touched[~self._right[touched]]).tolist()
        if not pending:
            self._all_right = bool(self._right.all())
        return pending

    def check_chunk(self, chunk: int, data: np.ndarray) -> None:
        """Raises a `TableDigestError` if the bytes of a chunk are not those that were written."""
        digest = hashlib.sha256(data.data).digest()
        expected = self._digests[32 * chunk : 32 * chunk + 32]
        if digest != expected:
            start = chunk * self._header.chunk_bytes
            rows = f"{start // self._row_bytes} to {(start + len(data) - 1) // self._row_bytes}"
            raise TableDigestError(
                f"{self._path} is damaged: rows {rows} have the digest {digest.hex()}, {expected.hex()} was expected."
            )
        self._right[chunk] = True

    def check_whole(self, found: str) -> None:
        """Raises a `TableDigestError` if a digest is not that of the whole table."""
        if found != self._header.table_sha256:
            raise TableDigestError(
                f"{self._path} is damaged: its rows have the digest {found}, {self._header.table_sha256} was expected."
            )
