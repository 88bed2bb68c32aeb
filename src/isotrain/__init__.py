"""Post-train language models from one recipe on any device."""

from isotrain.hidden_modules import hide_what_a_parent_hid

__version__ = "0.1.0"

hide_what_a_parent_hid()
