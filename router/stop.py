"""Stop strings on streamed text. They apply to visible text (content), not to reasoning and not to tool calls."""

from collections.abc import Sequence


class StopStrings:
    """Ends a text before the first stop string that becomes complete; of several at one character, the longest.

    Text is held back only while it may still become a stop string (Knuth-Morris-Pratt, one automaton a string), so no
    part of one is ever shown, and the split of the text does not matter.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops if stop]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text now ends with
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was met. After that nothing is shown any more."""
        if self.stopped:
            return "", True
        if not self._stops:
            return text, False
        start = len(self._held)
        held = self._held + text
        for end in range(start, len(held)):
            met = self._step(held[end])
            if met:
                self.stopped, self._held = True, ""
                return held[: end + 1 - met], True
        kept = len(held) - max(self._matched)
        self._held = held[kept:]
        return held[:kept], False

    def finish(self) -> str:
        """The text is over: what was held back did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Moves every automaton by one character; the length of the longest stop string that is complete now, or 0."""
        met = 0
        for i, (stop, borders) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                met = max(met, matched)
            self._matched[i] = matched
        return met


def _borders(text: str) -> list[int]:
    """For every prefix the length of its longest proper border (a prefix that is also its suffix)."""
    borders = [0] * len(text)
    for i in range(1, len(text)):
        k = borders[i - 1]
        while k and text[i] != text[k]:
            k = borders[k - 1]
        borders[i] = k + (text[i] == text[k])
    return borders
