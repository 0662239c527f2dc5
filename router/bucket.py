"""Token buckets of all classes in one cluster, and the spare between them. Units: uncached prefill tokens, seconds.

The lending rule. A class fills its own bucket at its own rate; only what a full bucket would throw away goes into the
common spare, which holds at most `spare_s` seconds of all rates together, and from which any class may take. So lending
never lowers an owner's bucket: an owner that returns finds it full at once, and in the cluster it waits behind at most
`spare_s` seconds of lent work. That is the bound in which what was lent comes back.

A prompt larger than a bucket needs a full one and leaves a debt (a negative level), as does work that turns out larger
than it was reserved for; the class waits its debt out, or lives on the spare.
"""

from collections.abc import Sequence

from forebay.router.config import ClassConfig


class Buckets:
    def __init__(self, classes: Sequence[ClassConfig], spare_s: float, now: float) -> None:
        self._classes = {each.name: each for each in classes}
        self._levels = {each.name: each.burst_tokens for each in classes}
        self._spare_max = spare_s * sum(each.prefill_tokens_per_s for each in classes)
        self._spare = 0.0
        self._at = now

    @property
    def spare(self) -> float:
        return self._spare

    def level(self, name: str) -> float:
        """Tokens in the class's own bucket; negative: its debt."""
        return self._levels[name]

    def need(self, name: str, tokens: float) -> float:
        """What must be there before `tokens` can be taken: a full bucket is enough for anything."""
        return min(tokens, self._classes[name].burst_tokens)

    def refill(self, now: float) -> None:
        # A monotonic clock read in another order than the calls are made may step back a little: no time has passed.
        elapsed_s = max(0.0, now - self._at)
        self._at = max(self._at, now)
        for name, each in self._classes.items():
            self._pour(name, each.prefill_tokens_per_s * elapsed_s)

    def affordable(self, name: str, tokens: float) -> bool:
        own = self._levels[name]
        need = self.need(name, tokens)
        return own >= need or (self._classes[name].borrows and max(own, 0.0) + self._spare >= need)

    def own_part(self, name: str, tokens: float) -> float:
        """How much `take` would take from the class's own bucket; the rest is borrowed."""
        own = self._levels[name]
        need = self.need(name, tokens)
        return tokens if own >= need else tokens - need + max(own, 0.0)

    def take(self, name: str, tokens: float) -> float:
        """Take affordable `tokens`. Returns how many of them were borrowed from the spare."""
        assert self.affordable(name, tokens)
        own = self.own_part(name, tokens)
        self._levels[name] -= own
        self._spare = max(0.0, self._spare - (tokens - own))
        return tokens - own

    def give_back(self, name: str, tokens: float, borrowed: float) -> None:
        """Return tokens that were taken and not used, borrowed ones first."""
        lent = min(tokens, borrowed)
        self._spare = min(self._spare_max, self._spare + lent)
        self._pour(name, tokens - lent)

    def owe(self, name: str, tokens: float) -> None:
        """Work was larger than what was taken for it: the difference is the class's debt."""
        self._levels[name] -= tokens

    def check(self) -> None:
        assert 0 <= self._spare <= self._spare_max
        assert all(self._levels[name] <= each.burst_tokens for name, each in self._classes.items())

    def _pour(self, name: str, tokens: float) -> None:
        level = self._levels[name] + tokens
        kept = min(level, self._classes[name].burst_tokens)
        self._levels[name] = kept
        self._spare = min(self._spare_max, self._spare + level - kept)
