"""Which prefill worker a session's last turn went to: a bounded table, the oldest sessions are forgotten first."""

from collections import OrderedDict


class Placement:
    def __init__(self, sessions: int) -> None:
        assert sessions > 0
        self._sessions = sessions
        self._workers: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, session: str) -> str | None:
        return self._workers.get(session)

    def put(self, session: str, worker: str) -> None:
        """A session without a key has no place."""
        if not session:
            return
        self._workers[session] = worker
        self._workers.move_to_end(session)
        if len(self._workers) > self._sessions:
            self._workers.popitem(last=False)
