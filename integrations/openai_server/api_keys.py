"""ApiKeys: who may use a server, and as whom."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paged_backend.errors import ConfigError


@dataclass(frozen=True)
class Client:
    """name: the ``client_id`` of its requests, by which policies share out service, and part of their salt."""

    name: str


class ApiKeys:
    """Keys and the clients they stand for; keys of one name are one client.

    keys: a mapping from key to name, or keys alone, of which each is a client named by a digest of it. A key is a text
    of visible ASCII characters. Raises ConfigError for one that is not, and for a name that is empty.
    """

    def __init__(self, keys: Mapping[str, str] | Iterable[str]) -> None:
        named = keys if isinstance(keys, Mapping) else {key: f"key-{_digest(key).hex()[:8]}" for key in keys}
        for key, name in named.items():
            if not key or not all("!" <= letter <= "~" for letter in key):
                raise ConfigError("an API key must be one or more visible ASCII characters without spaces")
            if not name:
                raise ConfigError("the name of an API key's client must not be empty")
        # Digests are of one length, by which a comparison could tell something too.
        self._clients = [(_digest(key), Client(name)) for key, name in named.items()]

    @classmethod
    def from_file(cls, path: Path | str) -> ApiKeys:
        """One key a line, and after a space the name of its client if it has one; # begins a comment.

        Raises OSError if the file cannot be read, ConfigError if it holds no key or a line that is none.
        """
        named: dict[str, str] = {}
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            words = line.split("#", 1)[0].split()
            if len(words) > 2:
                raise ConfigError(f"{path}, line {number}: give a key and a name, not {len(words)} words")
            if words:
                named[words[0]] = words[1] if len(words) == 2 else f"key-{_digest(words[0]).hex()[:8]}"
        if not named:
            raise ConfigError(f"{path} holds no API key; write one a line, or leave the file out")
        return cls(named)

    def __len__(self) -> int:
        return len(self._clients)

    def __or__(self, other: ApiKeys) -> ApiKeys:
        both = ApiKeys(())
        both._clients = [*self._clients, *other._clients]
        return both

    def client(self, key: str) -> Client | None:
        """Whose key it is, or None; how long that takes does not depend on what is alike."""
        given = _digest(key)
        found = None
        for digest, client in self._clients:
            if hmac.compare_digest(digest, given):
                found = client
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
