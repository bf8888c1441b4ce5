# SPDX-License-Identifier: Apache-2.0
"""Which pages of the host pool are free. Host-side bookkeeping; imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable


class HostPages:
    """Pages of the host pool: taken for a request, given back when it ends, lowest free page first.

    Args:
      count: pages of the pool.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` pages, all or none.

        Raises:
          MemoryError: fewer are free.
        """
        if count > len(self._free):
            raise MemoryError(
                f"{count} host pages are needed and {len(self._free)} of {self._count} are free: "
                "wait for a request to end or raise cache.host_pages"
            )
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Gives pages back, all or none.

        Raises:
          ValueError: a page is not taken: it was given back before, named twice, or is not of this pool.
        """
        pages = list(pages)
        wrong = [page for page in pages if page not in self._taken]
        if wrong or len(set(pages)) != len(pages):
            twice = wrong or [page for page in set(pages) if pages.count(page) > 1]
            raise ValueError(f"host pages {sorted(twice)} are not taken, so they can't be given back (double free?)")
        self._taken.difference_update(pages)
        self._free.extend(sorted(pages, reverse=True))
