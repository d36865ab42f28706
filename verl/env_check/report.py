"""Results of the environment check: one line per component, with the fix."""

from dataclasses import dataclass

OK, FAULT, NOTE = "✓", "✗", "!"


@dataclass(frozen=True)
class Check:
    """The result for one component.

    Attributes:
        name: the component.
        state: ✓ works, ✗ broken or missing, ! works, with a remark.
        detail: its version, or what is wrong.
        fix: the command that fixes it.
        required: nothing can run without this component.
    """

    name: str
    state: str
    detail: str
    fix: str | None = None
    required: bool = False

    def __str__(self) -> str:
        line = f"[{self.state}] {self.name}: {self.detail}"
        return line if self.fix is None else f"{line}\n      -> {self.fix}"


@dataclass(frozen=True)
class EnvReport:
    """All checks; and for each mode None if it can run here, otherwise the reason why not."""

    checks: tuple[Check, ...]
    modes: dict[str, str | None]

    @property
    def ok(self) -> bool:
        """Whether all required components work."""
        return not any(check.required and check.state == FAULT for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        """Return the check of this name. Raises KeyError if it does not apply to this machine."""
        return {check.name: check for check in self.checks}[name]
