"""The record: every trace as it was given, and what has happened to it, in one transactional database.

The record is the truth; all else is an index that can be made again from it. A write is one transaction, and is on disk
when its method returns. Every row carries a checksum and is held against it when it is read, so that a damaged row is
refused instead of returned. The tables and their statements suit PostgreSQL as they are; what only SQLite needs, and
how its errors read, stands in `sqlite`.
"""

from zeromem_torch.store.record import Change, Record
from zeromem_torch.store.statements import Stored

__all__ = ["Change", "Record", "Stored"]
