"""Post-train language models from one recipe on any device."""

from typing import TYPE_CHECKING, Any

from isotrain.hidden_modules import hide_what_a_parent_hid

if TYPE_CHECKING:
    from isotrain.api import Recipe, Report, Run, Verdict, compare, doctor, load_recipe, train

__version__ = "0.2.0"
__all__ = ["Recipe", "Report", "Run", "Verdict", "compare", "doctor", "load_recipe", "train"]

hide_what_a_parent_hid()


def __getattr__(name: str) -> Any:
    # Late: every worker of a run imports this package, and needs none of it.
    if name not in __all__:
        raise AttributeError(f"module 'isotrain' has no attribute {name!r}")
    from isotrain import api

    return getattr(api, name)
