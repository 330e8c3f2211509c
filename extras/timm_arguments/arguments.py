"""The arguments of timm's train.py, read from the tables of configs/typed_names.py."""

from typing import Any, NamedTuple

import yaml

from configs.typed_names import ALIASES, NOT_HERE


class Argument(NamedTuple):
    """An argument of timm's train.py."""

    short: str  # another name without dashes; '' for none
    kind: type  # of its value or values: bool for a switch, int, float or str
    default: Any
    setting: str  # its row in ALIASES; '' if there is none
    reason: str  # its row in NOT_HERE; '' if there is none

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, list)


def timm_arguments() -> dict[str, Argument]:
    """Return {name without dashes: argument} for all arguments."""
    found = {}
    for row in (*ALIASES, *NOT_HERE):
        for word in (ALIASES.get(row) or NOT_HERE[row]).split():
            names, _, text = word.partition("=")
            names, _, kind = names.partition(":")
            name, _, short = names.removeprefix("--").partition("|")
            if names.startswith("--"):
                default = yaml.safe_load(text)
                place = (row, "") if row in ALIASES else ("", row)
                found[name] = Argument(short, _kind(kind, default), default, *place)
    return found


def _kind(name: str, default: Any) -> type:
    """Return the type of an argument's values, from its name in the table or from the default."""
    members = default if isinstance(default, list) else [default]
    kinds = {"int": int, "float": float, "": type(members[0]) if members and members[0] is not None else str}
    return kinds[name]
