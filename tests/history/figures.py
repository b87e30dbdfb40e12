"""What a soak has injected, as text: faults by kind, events and bytes, crashes and lost answers by step."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.history.record import History


class Figures:
    """Sums over the rounds of a soak."""

    def __init__(self) -> None:
        self._rounds = 0
        self._faults: dict[str, list[float]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()

    def add(self, history: History) -> None:
        """Counts a round that is over."""
        self._rounds += 1
        for fault in history.faults:
            if not fault.name.startswith("relay at a step"):
                # Those that were drawn together count each.
                for name in fault.name.split(" + "):
                    self._faults[name].append(fault.until - fault.at)
        self._counts.update(history.figures)
        self._counts["messages"] += len(history.messages)
        self._steps.update(history.steps)

    def __str__(self) -> str:
        counts = self._counts
        lines = [
            f"{self._rounds} rounds: {counts['events']} events ({counts['bytes'] / 1e6:.0f} MB), "
            f"{counts['messages']} messages, {counts['parked and published later']} parked and published "
            f"later"
        ]
        if self._faults:
            lines.append("faults, with the seconds until events flowed again (most, all):")
        for name, seconds in sorted(self._faults.items()):
            lines.append(f"{len(seconds):6} {max(seconds):6.1f} {sum(seconds):7.1f}  {name}")
        if self._steps:
            lines.append("deaths and lost answers by step:")
        lines += [f"{count:6}  {name}" for name, count in sorted(self._steps.items())]
        return "\n".join(lines)
