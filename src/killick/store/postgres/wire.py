"""The wire format: binary parameters and rows, each statement prepared once a session.

Knows the few types that the store uses, and decodes errors. Knows no tables and makes no decisions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from psycopg import Connection, Error, pq

from killick.store.sql import queries

Q: Final = queries("postgres")
Encode = Callable[[Any], bytes]
Rows = list[tuple[Any, ...]]

_LOST: Final = ("08", "57P01", "57P02", "57P03")
"""Errors of a session that is closed, about to close, or not ready."""

_DONE: Final = (int(pq.ExecStatus.TUPLES_OK), int(pq.ExecStatus.COMMAND_OK))
_CODE: Final = pq.DiagnosticField.SQLSTATE
_TEXT: Final = pq.DiagnosticField.MESSAGE_PRIMARY
_pack_8: Final = struct.Struct(">q").pack
_unpack_8: Final = struct.Struct(">q").unpack
_inferred: Final = count(1)
_array_head: Final = struct.Struct(">iiIii")
_length: Final = struct.Struct(">i")


class Failed(Exception):
    """A refused statement, or a lost session; then the statement's outcome is unknown."""

    def __init__(self, code: str, text: str, *, lost: bool) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.lost = lost


class Statement:
    """SQL with a name, under which a session finds its prepared form."""

    __slots__ = ("encode", "formats", "name", "sql", "types")

    def __init__(self, name: str, sql: str) -> None:
        self.name = f"killick_{name}".encode()
        self.sql = sql.encode()
        self.types: list[int] | None = None
        self.encode: list[Encode] = []
        self.formats: list[int] = []

    def learn(self, types: list[int]) -> None:
        """Stores the parameter types that the server inferred."""
        self.encode, self.formats = [_ENCODE[oid] for oid in types], [1] * len(types)
        self.types = types  # last, for another thread may look whether they are known


class Session:
    """A connection and its prepared statements. A caller's connection, or a pooler's, is left without a trace."""

    def __init__(self, connection: Connection[Any], *, learn: Callable[[Statement], None] | None = None) -> None:
        """With `learn` nothing is prepared on the connection; `learn` infers parameter types, on another one or in
        `infer`."""
        self.connection = connection
        self.pg = connection.pgconn
        self._learn = learn
        self._prepared: set[bytes] = set()

    @property
    def is_lost(self) -> bool:
        return self.pg.status != pq.ConnStatus.OK

    @property
    def is_read_only(self) -> bool:
        """Whether a setting makes it read-only, rather than a server that is a standby."""
        return self.pg.parameter_status(b"default_transaction_read_only") == b"on"

    @property
    def is_idle(self) -> bool:
        return self.pg.transaction_status == pq.TransactionStatus.IDLE

    @property
    def has_failed(self) -> bool:
        """Whether its transaction has failed: PostgreSQL accepts no more statements in it."""
        return self.pg.transaction_status == pq.TransactionStatus.INERROR

    @property
    def in_transaction(self) -> bool:
        return self.pg.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)

    def rows(self, statement: Statement, *values: Any) -> Rows:
        """Runs a statement and returns its rows."""
        result = self.run(statement, *values)
        get, rows, columns = result.get_value, range(result.ntuples), list[list[Any]]()
        for column in range(result.nfields):
            decode, cells = _DECODE[result.ftype(column)], [get(row, column) for row in rows]
            columns.append(cells if decode is _plain else [None if cell is None else decode(cell) for cell in cells])
        return list(zip(*columns, strict=True))

    def run(self, statement: Statement, *values: Any) -> Any:
        self.prepare(statement)
        encoded: list[Any] = [
            None if value is None else encode(value) for encode, value in zip(statement.encode, values, strict=True)
        ]
        if self._learn is None:
            return self._checked(partial(self.pg.exec_prepared, statement.name, encoded, statement.formats, 1))
        types, formats = statement.types, statement.formats
        return self._checked(partial(self.pg.exec_params, statement.sql, encoded, types, formats, 1))

    def script(self, sql: str) -> Any:
        """Runs statements without parameters in one message. Returns the last one's rows, as text."""
        return self._checked(partial(self.pg.exec_, sql.encode()))

    def close(self) -> None:
        self.connection.close()

    def prepare(self, statement: Statement) -> None:
        """Prepares a statement on this session, and learns its types if unknown."""
        if statement.name in self._prepared:
            return
        if self._learn is None:
            self._checked(partial(self.pg.prepare, statement.name, statement.sql, statement.types))
            if statement.types is None:
                self._read_types(statement, statement.name.decode())
        elif statement.types is None:
            self._learn(statement)
        self._prepared.add(statement.name)

    def infer(self, statement: Statement) -> None:
        """Infers a statement's parameter types, in one transaction: a pooler gives that one session of the server."""
        # No other client of the server's session may have the name, and an earlier failure may have left one.
        name, begins = f"killick_{self.pg.backend_pid & 0xFFFFFFFF}_{next(_inferred)}", not self.in_transaction
        self.script(f"{'BEGIN; ' if begins else ''}PREPARE {name} AS {statement.sql.decode()}")
        self._read_types(statement, name)
        self.script(f"DEALLOCATE {name}{'; COMMIT' if begins else ''}")

    def _read_types(self, statement: Statement, name: str) -> None:
        # By a query, since describing a statement would block every thread until the answer.
        found = self.script(Q.parameter_types.format(name=name))
        statement.learn([int(found.get_value(row, 0) or 0) for row in range(found.ntuples)])

    def _checked(self, execute: Callable[[], Any]) -> Any:
        try:
            result = execute()
        except Error as error:
            raise Failed("", str(error), lost=True) from error
        if result.status not in _DONE:
            code = (result.error_field(_CODE) or b"").decode()
            text = (result.error_field(_TEXT) or result.error_message).decode(errors="replace").strip()
            raise Failed(code, text, lost=self.is_lost or code.startswith(_LOST))
        return result


def pooled(connection: Connection[Any]) -> Session:
    """A connection through a pooler, which may execute each transaction in another session of the server."""
    session = Session(connection, learn=lambda statement: session.infer(statement))
    return session


# types --------------------------------------------------------------------------------------------


def _plain(value: bytes) -> bytes:
    return value


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")  # damaged text must be read to be found


def _array(oid: int, encode: Encode, values: Sequence[Any]) -> bytes:
    if not values:
        return _array_head.pack(0, 0, oid, 0, 1)[:12]
    parts = [_array_head.pack(1, 1, oid, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            encoded = encode(value)
            parts += (_length.pack(len(encoded)), encoded)
    return b"".join(parts)


def _list(decode: Callable[[bytes], Any], value: bytes) -> list[Any]:
    found: list[Any] = []
    at = 20
    while at < len(value):
        (length,) = _length.unpack_from(value, at)
        at += 4
        if length < 0:
            found.append(None)
        else:
            found.append(decode(value[at : at + length]))
            at += length
    return found


_ENCODE: Final[dict[int, Encode]] = {
    16: lambda value: b"\1" if value else b"\0",
    17: _plain,
    20: _pack_8,
    25: str.encode,
    701: struct.Struct(">d").pack,
    1001: partial(_array, 17, _plain),
    1009: partial(_array, 25, str.encode),
    1016: partial(_array, 20, _pack_8),
    3802: lambda value: b"\1" + value,
}
"""By PostgreSQL type number: boolean, bytea, bigint, text, float, arrays of these, and jsonb as its text."""

_DECODE: Final[dict[int, Callable[[bytes], Any]]] = {
    16: lambda value: value == b"\1",
    17: _plain,
    20: lambda value: _unpack_8(value)[0],
    25: _text,
    1009: partial(_list, _text),
    2278: lambda value: None,
}
