"""Digests of KV blocks: a chain over what precedes a block, so that equal digests mean equal contents of the cache.

The full digest keys the prefix index. Its first 64 bits are a hint for routing, never a proof.
"""

from hashlib import sha256

Digest = bytes  # 32 bytes


def root(salt: bytes = b"", adapter: str = "", adapter_revision: int = 0, media: bytes = b"") -> Digest:
    """The parent of a first block: everything besides token ids that the cache's contents depend on."""
    name = adapter.encode()
    parts = (salt, name, adapter_revision.to_bytes(8, "little"), media)
    return sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()


def extend(parent: Digest, tokens: bytes) -> Digest:
    """The digest of the block that follows `parent` and holds these tokens (little-endian int32)."""
    return sha256(parent + tokens).digest()


def hint(digest: Digest) -> int:
    """The routing hash of a block, unsigned 64-bit."""
    return int.from_bytes(digest[:8], "little")
