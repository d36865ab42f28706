"""The findings about a machine: one line per part, with the command that mends it."""

from dataclasses import dataclass

OK, FAULT, NOTE = "✓", "✗", "!"


@dataclass(frozen=True)
class Check:
    """One finding. state: ✓ works, ✗ is broken or missing, ! works with something to know. fix: what mends it.

    required: nothing can run without this part.
    """

    name: str
    state: str
    found: str
    fix: str | None = None
    required: bool = False

    def __str__(self) -> str:
        line = f"[{self.state}] {self.name}: {self.found}"
        return line if self.fix is None else f"{line}\n      -> {self.fix}"


@dataclass(frozen=True)
class EnvReport:
    """All findings; and for each mode None when it can run here, else why not."""

    checks: tuple[Check, ...]
    modes: dict[str, str | None]

    @property
    def ok(self) -> bool:
        """Whether everything is there that every run needs."""
        return not any(check.required and check.state == FAULT for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        """The finding of this name; KeyError when the part was not looked at on this machine."""
        return {check.name: check for check in self.checks}[name]
