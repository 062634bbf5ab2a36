"""How far training has come in one loader, and where it goes on.

A loader hands batches out ahead of training: some loops fetch the next batch while the device
computes. So a batch counts as trained on when it was handed out and a training pass has begun
since for it. Where several passes are made for a batch, as in a GAN, those handed out count.

Going through a loader counts as an epoch if it was trained on or gone through to the end. A look
at the first batch does not: one worker may take it alone, to draw a picture of it.
"""

from dataclasses import dataclass

from shoestring.worker.data.batches import Position
from shoestring.worker.session import Session


@dataclass
class Visit:
    """One going through a loader."""

    epoch: int
    skip: int  # batches that a resumed run had trained on
    length: int | None  # batches in the epoch, if that is known
    began_at: int  # training passes before it, as if those of skipped batches had been made
    handed_out: int


class Place:
    """One loader's place in the data, saved and restored with checkpoints."""

    def __init__(self, here: Session) -> None:
        self._here = here
        self._index = len(here.places)
        here.places.append(self)
        self._next = Position()
        self._is_placed = False  # a resume was looked for, and is known
        self._visit: Visit | None = None

    def begin(self, length: int | None) -> Visit:
        """Begin to go through the loader, behind what a resumed run had trained on."""
        if self._visit is not None:  # left where it was
            self.end(self._visit, is_whole=False)
        saved = self._here.resumed.places
        if not self._is_placed and self._index < len(saved):
            self._next, self._is_placed = Position(*saved[self._index]), True
        skip = self._next.batch
        self._visit = Visit(self._next.epoch, skip, length, self._here.forwards - skip, skip)
        return self._visit

    def hand_out(self, visit: Visit) -> None:
        """Count a batch that the script gets."""
        visit.handed_out += 1
        if self._here.position_source is None or isinstance(self._here.position_source, Place):
            self._here.position_source = self

    def end(self, visit: Visit, *, is_whole: bool) -> None:
        """The loader has no more batches, or is left early."""
        if visit is not self._visit:
            return
        if is_whole or self._here.forwards > visit.began_at + visit.skip:
            self._next = Position(visit.epoch + 1)
        self._visit = None

    def where(self) -> Position:
        """How far training has come."""
        visit = self._visit
        if visit is None:
            return self._next
        done = min(visit.handed_out, self._here.forwards - visit.began_at)
        if visit.length is not None and done >= visit.length:
            return Position(visit.epoch + 1)
        return Position(visit.epoch, done)
