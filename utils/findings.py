"""One result of -check: what was checked, the result, its severity and the remedy."""

from dataclasses import dataclass

OK, WARN, WRONG = "ok", "WARN", "WRONG"


@dataclass(frozen=True)
class Finding:
    """A row of the table that -check prints. More lines of `found` stand below the first."""

    what: str
    found: str
    verdict: str = OK
    remedy: str = ""

    def lines(self) -> list[str]:
        """The row as text."""
        first, *more = self.found.split("\n")
        more += [f"-> {self.remedy}"] if self.remedy else []
        return [f"{self.what:<17}  {self.verdict:<5}  {first}", *(" " * 26 + line.strip() for line in more)]
