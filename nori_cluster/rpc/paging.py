"""Pages of a sorted list of names (AIP-158): a token is the last name given, so changes to the list skip nothing."""

import base64
import binascii
import bisect
from collections.abc import Sequence

from nori_cluster.errors import ClientError

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000


def page(names: Sequence[str], page_size: int, page_token: str) -> tuple[Sequence[str], str]:
    """names: sorted. Returns this page and the next token ("" at the end). Raises ClientError."""
    if page_size < 0:
        raise ClientError("page_size must not be negative", param="page_size")
    size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    start = bisect.bisect_right(names, _last_name(page_token)) if page_token else 0
    chosen = names[start : start + size]
    more = start + size < len(names)
    return chosen, base64.urlsafe_b64encode(chosen[-1].encode()).decode() if more else ""


def _last_name(page_token: str) -> str:
    try:
        return base64.b64decode(page_token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError) as error:
        raise ClientError("page_token is not one that was given out", param="page_token") from error
