"""What a cache holds after each method, in plain Python: a list of tokens for every row."""

import numpy as np

ROWS, SLOTS, PAGE, PAGES = 3, 16, 4, 16
ENDS = (2, 5, 11)  # of the documents of a row


class Told:
    """Tokens `(k, v)` by row; for a ring the positions in its slots, for pages table and pool.

    Attributes:
      rows: the tokens of each row.
      over: which rows have overflowed.
      table: the pages of each row, -1 for none; None without pages.
    """

    def __init__(self, how, shows):
        self.shows = shows
        self.rows = [[] for _ in range(ROWS)]
        self.over = [False] * ROWS
        self.ring = [{} for _ in range(ROWS)] if "window" in how else None
        self.reach = how.get("window", 0), how.get("window", 0) + how.get("spare", 0)
        self.first = how.get("keep_first", 0)
        self.table = [[-1] * (SLOTS // PAGE) for _ in range(ROWS)] if "pages" in how else None
        self.pool = {}

    # Appending.

    def append(self, k, v, valid):
        """Stores tokens; the position of each, -1 for padding, and the rows that are NaN."""
        places = [list(np.where(x, len(row) + x.cumsum() - 1, -1)) for row, x in self._with(valid)]
        places = [[int(p) for p in row] for row in places]
        tokens = [
            [(p, (a, b)) for p, a, b in zip(row, k[r], v[r], strict=True) if p >= 0]
            for r, row in enumerate(places)
        ]
        if self.table is not None:
            self._write(tokens)
        for r, mine in enumerate(tokens):
            if not self.over[r]:
                self.rows[r] += [token for _, token in mine]
                for p, _ in mine if self.ring else ():
                    late = self.first + (p - self.first) % self.reach[1]
                    self.ring[r][p if p < self.first else late] = p
        return places, [over or self._ahead(r, places[r]) for r, over in enumerate(self.over)]

    def _with(self, valid):
        return zip(self.rows, np.asarray(valid), strict=True)

    def up_to_what_is_shown(self, valid):
        """The call without last tokens that are shown others after it."""
        valid = valid.copy()
        for row, mine in enumerate(valid):
            start = len(self.rows[row])
            while self._ahead(row, range(start, start + mine.sum()), start + mine.sum()):
                mine[np.flatnonzero(mine)[-1]] = False
        return valid

    def _ahead(self, row, places, length=None):
        """Whether a token of the call is shown one that is not stored yet."""
        length = len(self.rows[row]) if length is None else length
        end = length + self.reach[1] if self.ring else SLOTS
        return any(self.shows(p, np.arange(length, end)).any() for p in places if p >= 0)

    def _write(self, tokens):
        """Writes to the pool; rows that would change a held slot, or an earlier row's, overflow."""
        held = self.held()
        mine = {r: [(self._slot(r, p), token) for p, token in x] for r, x in enumerate(tokens)}
        for r, writes in mine.items():
            self.over[r] |= any(self._lacks(r, p) for p, _ in tokens[r])
            if not self.over[r]:
                self.over[r] = any(s in held and not alike(self.pool.get(s), x) for s, x in writes)
        written = {}
        for r in [r for r in mine if not self.over[r]]:
            for slot, token in mine[r]:
                if slot not in held and not alike(written.setdefault(slot, token), token):
                    self.over[r] = True
        self.pool |= written

    def _lacks(self, row, place):
        return place >= SLOTS or self.table[row][place // PAGE] < 0

    def _slot(self, row, place):
        return self.table[row][min(place, SLOTS - 1) // PAGE], place % PAGE

    def held(self):
        """The slots of the pool that rows hold."""
        lengths = [len(row) for row in self.rows]
        return {self._slot(r, p) for r, length in enumerate(lengths) for p in range(length)}

    # Methods.

    def truncate(self, lengths):
        for r, length in enumerate(lengths):
            if self.ring:
                there = {p for p in self.ring[r].values() if p < length}
                wanted = {
                    *range(max(0, length - self.reach[0]), length),
                    *range(length)[: self.first],
                }
                self.over[r] |= length < len(self.rows[r]) and not wanted <= there
                self.ring[r] = {s: p for s, p in self.ring[r].items() if p < length}
            del self.rows[r][length:]

    def reset(self, rows, pages=False):
        """Empties rows; a caller takes their pages back, or leaves them."""
        for r in np.flatnonzero(rows):
            self.rows[r], self.over[r] = [], False
            if self.ring:
                self.ring[r] = {}
            if self.table is not None and not pages:
                self.table[r] = [-1] * len(self.table[r])

    def insert(self, row, k, v, pages):
        self.reset(np.arange(ROWS) == row, pages)
        tokens = list(zip(k, v, strict=True))
        if self.table is not None:
            if self.table[row][0] < 0:
                self.table[row][0] = self.free()[0]
            self._write([list(enumerate(tokens)) if r == row else [] for r in range(ROWS)])
        self.rows[row] = [] if self.over[row] else tokens
        if self.ring:
            self.ring[row] = {p: p for p in range(len(k))}

    def take(self, rows, pages=None):
        self.rows, self.over = [list(self.rows[r]) for r in rows], [self.over[r] for r in rows]
        if self.ring:
            self.ring = [dict(self.ring[r]) for r in rows]
        if self.table is None:
            return
        old = [list(x) for x in self.table]
        for r, page in enumerate(() if pages is None else pages):
            full = len(self.rows[r]) // PAGE
            if page >= 0 or rows[r] != r:
                self.table[r] = [*old[rows[r]][:full], int(page), *[-1] * SLOTS][: len(old[r])]
        self._copy([old[r] for r in rows])

    def _copy(self, sources):
        """Copies pages to those of the table: who holds most of a page, of several the last."""
        entries = []
        for r, row in enumerate(self.rows):
            needed = [(at, min(len(row) - at * PAGE, PAGE)) for at in range(-(-len(row) // PAGE))]
            self.over[r] |= any(self.table[r][at] < 0 for at, _ in needed)
            entries += [(reach, r, at) for at, reach in needed if not self.over[r]]
        pages, written = {}, {}
        for _, r, at in sorted(entries):
            pages[self.table[r][at]] = sources[r][at]
        for reach, r, at in entries:
            mine, other = sources[r][at], pages[self.table[r][at]]
            slots = [(self.pool.get((mine, s)), self.pool.get((other, s))) for s in range(PAGE)]
            self.over[r] |= not all(alike(*pair) for pair in slots[:reach])
        for page, source in pages.items():
            written |= {(page, s): x for (p, s), x in self.pool.items() if p == source}
        self.pool |= written

    # What a caller of a paged cache decides.

    def take_pages(self, rows):
        """A free page for each row that becomes another's, -1 for one that stays."""
        free = iter(self.free())
        return np.asarray([-1 if r == row else next(free) for row, r in enumerate(rows)], np.int32)

    def free(self):
        """The pages that no row names."""
        return [p for p in range(PAGES) if not self.names(p)]

    def names(self, page):
        """How many rows name a page."""
        return sum(page in row for row in self.table)

    def copy_page(self, row, at, page):
        self.pool |= {(page, s): x for (p, s), x in self.pool.items() if p == self.table[row][at]}
        self.table[row][at] = page

    def to_be_written(self, valid):
        """The row and the place in its table of each page that a call writes to."""
        counts = [(len(row), int(x.sum())) for row, x in self._with(valid)]
        return [
            (r, at)
            for r, (start, more) in enumerate(counts)
            for at in range(start // PAGE, -(-(start + more) // PAGE) if more else 0)
            if at < SLOTS // PAGE
        ]


def alike(one, other):
    """Whether two tokens have the same bits; None is what was never written."""
    if one is None or other is None:
        return one is other
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
