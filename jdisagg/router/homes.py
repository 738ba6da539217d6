"""Where the choices of one request are: together, so that they share the KV of their prompt."""

from __future__ import annotations


class Homes:
    """Address by fork group, while any request of the group lives."""

    def __init__(self) -> None:
        self._members: dict[str, int] = {}
        self._address: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, group: str) -> None:
        """A request of the group came; "" is no group."""
        if group:
            self._members[group] = self._members.get(group, 0) + 1

    def leave(self, group: str) -> None:
        """A request of the group ended."""
        if not group:
            return
        self._members[group] -= 1
        if not self._members[group]:
            del self._members[group]
            self._address.pop(group, None)

    def settle(self, group: str, address: str) -> None:
        """One of the group was sent there; the others follow."""
        if group:
            self._address[group] = address

    def of(self, group: str) -> str:
        """Where the group is, "" when it is nowhere yet."""
        return self._address.get(group, "")
