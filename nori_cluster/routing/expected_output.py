"""How many tokens a request will probably produce: a moving mean per model and tenant, at most its max_tokens."""

FIRST_GUESS = 256
WEIGHT = 0.05  # of the newest observation


class ExpectedOutput:
    def __init__(self) -> None:
        self._means: dict[tuple[str, str], float] = {}

    def of(self, model: str, tenant: str, max_tokens: int) -> int:
        return max(1, min(max_tokens, round(self._means.get((model, tenant), FIRST_GUESS))))

    def observe(self, model: str, tenant: str, tokens: float) -> None:
        """tokens: output tokens of one candidate that ended by itself."""
        mean = self._means.get((model, tenant))
        self._means[model, tenant] = tokens if mean is None else mean + WEIGHT * (tokens - mean)
